"""Memory of runs that are over, and the lifetime of their results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.coordinator.decide import history
from swarm_ft.coordinator.facts.events import ForgetRecord, ResultCollected, RunCancelled, Tick
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import MAX_PAGE_RUNS, RunPhase, StatusRequest
from tests.reasons import reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")


@pytest.fixture
def finished(
    make_swarm: Callable[..., Swarm], make_spec: MakeSpec, tmp_path: Path, a: FakePeer, b: FakePeer
) -> Swarm:
    """A trained run, whose result has waited for its client for an hour."""
    swarm = make_swarm(Journal(str(tmp_path / "journal.db")))
    swarm.state = replace(swarm.state, result_s=3600.0)
    swarm.submit(make_spec())
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    return swarm


def test_a_result_that_nobody_fetches_is_let_go_of_and_why_is_told(finished: Swarm) -> None:
    finished.wait(3590)
    assert finished.run().phase is RunPhase.FINISHED
    finished.wait(20)
    assert finished.run().phase is RunPhase.FAILED
    assert finished.run().detail == reason(Kind.RESULT_EXPIRED, amount=3600.0)
    assert [peer for peer, _ in finished.said(Release)] == ["a", "b"]


def test_a_result_is_kept_as_long_again_after_a_restart(
    finished: Swarm, a: FakePeer, b: FakePeer
) -> None:
    finished.wait(3000)
    finished.restart()
    finished.join(a, b)
    finished.state = replace(finished.state, result_s=3600.0)
    finished.wait(3500)
    assert finished.run().phase is RunPhase.FINISHED


def test_a_result_that_is_made_again_waits_anew(finished: Swarm, b: FakePeer) -> None:
    finished.wait(3000)
    finished.leave(b)
    finished.wait(1)
    assert not finished.run().phase.is_over
    b.forget()
    finished.join(b)
    finished.settle()
    assert finished.run().phase is RunPhase.FINISHED
    finished.wait(3000)
    assert finished.run().phase is RunPhase.FINISHED


def test_the_oldest_of_many_runs_that_are_over_are_forgotten_for_ever(
    finished: Swarm, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_RUNS_OVER", 2)
    others = [RunId(f"other-{number}") for number in range(4)]
    for run_id in others:
        finished.submit(make_spec(num_blocks=1), run_id)
        finished.handle(RunCancelled(run_id))
    finished.handle(Tick())
    known = {RUN, *others[2:]}
    assert finished.state.runs.keys() == known, "a result that waits is no history"
    finished.restart()
    assert finished.state.runs.keys() == known
    finished.handle(ResultCollected(RUN))
    forgotten = [e for e in finished.handle(Tick()) if isinstance(e, ForgetRecord)]
    assert forgotten == [ForgetRecord(RUN)]
    assert finished.journal is not None
    assert finished.journal.steps(RUN, 0, 10) == ()


def page(first_member: int, first_run: int) -> StatusRequest:
    return StatusRequest(first_member=first_member, first_run=first_run)


def test_the_overview_comes_in_pages(finished: Swarm, make_spec: MakeSpec) -> None:
    for number in range(MAX_PAGE_RUNS):
        finished.submit(make_spec(num_blocks=1), RunId(f"other-{number}"))
    first, rest = overview(finished.state), overview(finished.state, page(1, MAX_PAGE_RUNS))
    assert first.num_runs == rest.num_runs == len(first.runs) + len(rest.runs) == MAX_PAGE_RUNS + 1
    assert [run.run_id for run in rest.runs] == ["other-31"]
    assert [member.peer_id for member in rest.members] == ["b"]
    assert not overview(finished.state, page(2, 99)).members
