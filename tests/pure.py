"""The plugin of `make test-pure`: whatever imports torch is skipped, at that import.

The control plane imports none, which `lint-imports` checks. Its tests then start in a second or
two, and take less than a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

import pytest

HEAVY = frozenset({"torch", "transformers", "hivemind", "numba", "triton", "datasets"})


class SkippingFinder:
    """Finder of the heavy libraries, which skips the test or the file that imports one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in HEAVY:
            _skip(name)
        return None


def _skip(name: str) -> NoReturn:
    pytest.skip(f"it imports {name}", allow_module_level=True)


def pytest_sessionstart() -> None:
    """Skip imports from now on; pytest read the configuration of the tests before."""
    sys.meta_path.insert(0, SkippingFinder())
