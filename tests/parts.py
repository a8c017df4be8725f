"""The plugin of parallel test targets: each worker collects and runs files of its own.

`--dist loadfile` would have every worker import and collect all files, 20 CPU seconds each. Here a
fixed part goes to each worker, with `--dist each`. What files take balances the parts:
`python -m tests.parts REPORT WEIGHTS` reads it from a report of `--junitxml`. Old weights cost
balance and nothing else: a file without one counts as a short one.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
SHORT_S = 0.3
"""What counts for a file without a weight; weights below are not written."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--weights`."""
    parser.addoption("--weights", type=Path, help="CPU seconds by file, which balance workers.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a file of another worker."""
    return (collection_path.match("test_*.py") and _is_anothers(collection_path, config)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Drop tests of other workers from files on the command line, which pytest always collects."""
    items[:] = [item for item in items if not _is_anothers(item.path, config)]


def _is_anothers(path: Path, config: pytest.Config) -> bool:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker:
        return False
    parts = _parts(config.getoption("weights"), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    return parts.get(path.relative_to(ROOT).as_posix(), 0) != int(worker.removeprefix("gw"))


@cache
def _parts(weights: Path | None, count: int) -> Mapping[str, int]:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    return parts_of(files, json.loads(weights.read_text()) if weights else {}, count)


def parts_of(files: Iterable[str], weights: Mapping[str, float], count: int) -> Mapping[str, int]:
    """Return the part of each file, 0 to `count` - 1; the heaviest files are placed first."""
    sums, parts = [0.0] * count, dict[str, int]()
    for name in sorted(files, key=lambda name: (-weights.get(name, SHORT_S), name)):
        lightest = min(range(count), key=sums.__getitem__)
        parts[name] = lightest
        sums[lightest] += weights.get(name, SHORT_S)
    return parts


def weights_in(report: Path) -> dict[str, float]:
    """Return the seconds of each file that takes longer than a short one."""
    seconds = defaultdict[str, float](float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[case.get("file", "")] += float(case.get("time", 0.0))
    found = sorted(seconds.items())
    return {name: round(took, 1) for name, took in found if name and took > SHORT_S}


if __name__ == "__main__":
    _report, _weights = map(Path, sys.argv[1:])
    _weights.write_text(json.dumps(weights_in(_report), indent=0) + "\n")
