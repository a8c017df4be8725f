"""The sample of a test's cases that `make test` takes; `make test-rest` takes the others."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import pytest


def mark_cases(items: Iterable[pytest.Item], every: int = sys.maxsize) -> None:
    """Mark all but every n-th case of each test as thorough.

    Args:
        items: in the order of their collection.
        every: n of tests without a mark `sampled(n)`. By default only the first case stays.
    """
    seen = Counter[str]()
    for item in items:
        function = item.nodeid.partition("[")[0]
        mark = item.get_closest_marker("sampled")
        if seen[function] % (mark.args[0] if mark else every):
            item.add_marker(pytest.mark.thorough)
        seen[function] += 1
