"""Tiers of tests: parts of workers, tests without torch, and draws of property tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.draws import draws
from tests.parts import parts_of, weights_in
from tests.pure import SkippingFinder
from tests.sampled import mark_cases


def test_the_heaviest_files_are_apart_and_all_are_placed() -> None:
    weights = {"a": 9.0, "b": 8.0, "c": 4.0, "d": 3.0, "e": 2.0}
    parts = parts_of(["e", "d", "c", "b", "a", "new"], weights, 2)
    assert set(parts) == {*weights, "new"}
    assert parts["a"] != parts["b"]
    sums = [sum(weights.get(name, 0.3) for name in parts if parts[name] == n) for n in (0, 1)]
    assert abs(sums[0] - sums[1]) <= 2.0
    assert parts == parts_of(sorted(parts), weights, 2), "whatever order a disk lists them in"


def test_seconds_are_read_from_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = '<testcase file="x.py" time="0.25"/><testcase file="x.py" time="1.0"/>'
    report.write_text(f'<testsuite>{cases}<testcase file="y.py" time="0.2"/></testsuite>')
    assert weights_in(report) == {"x.py": 1.2}


@pytest.mark.parametrize("name", ["torch", "torch.nn", "transformers", "hivemind.dht"])
def test_whoever_imports_torch_is_skipped(name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"it imports {name}"):
        SkippingFinder().find_spec(name)
    assert SkippingFinder().find_spec("torchlike") is None


def test_the_quick_profile_draws_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.draws.PROFILE", "quick")
    assert [draws(count) for count in (2, 40, 500)] == [1, 10, 125]
    monkeypatch.setattr("tests.draws.PROFILE", "full")
    assert [draws(count) for count in (2, 40, 500)] == [2, 40, 500]


class Case:
    """The part of a test case that a sample reads and marks."""

    def __init__(self, nodeid: str, every: int | None = None) -> None:
        self.nodeid = nodeid
        self.is_thorough = False
        self._mark = pytest.mark.sampled(every).mark if every else None

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        assert name == "sampled"
        return self._mark

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name == "thorough"
        self.is_thorough = True


def test_a_sample_is_every_nth_case_or_the_first_one() -> None:
    cases = [Case(f"a.py::test[{n}]", every=3) for n in range(7)]
    others = [Case("a.py::other[0]"), Case("a.py::other[1]"), Case("a.py::alone")]
    mark_cases(cases + others)  # type: ignore[arg-type]
    assert [n for n, case in enumerate(cases) if not case.is_thorough] == [0, 3, 6]
    assert [case.is_thorough for case in others] == [False, True, False]
