"""The mark of the tests of benchmarks, which `make test` leaves out."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.benchmarks)
