"""Results at peers: losses of them, their repetition, and its first step."""

import pytest

from swarm_ft.coordinator.facts.events import ResultCollected, RunCancelled
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.membership import GRACE_S
from swarm_ft.coordinator.watching import status_of
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PlanStep, SaveStage
from tests.reasons import all_parts, kinds_in, missing, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN, SECOND = RunId("run-1"), RunId("run-2")


@pytest.fixture
def finished(make_swarm: type[Swarm], make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    """A run whose result is at a and b, without any other state."""
    swarm = make_swarm(Journal(":memory:"))
    swarm.submit(make_spec())
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    return swarm


@pytest.fixture
def saved(make_swarm: type[Swarm], make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    """The run of `finished`, with a snapshot after the last step."""
    swarm = make_swarm(Journal(":memory:"))
    swarm.submit(make_spec(save_steps=2))
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    return swarm


def details(swarm: Swarm, run_id: RunId = RUN) -> list[Reason]:
    return swarm.reasons(run_id)


# ---- one run


def test_clients_are_told_who_gives_which_file_and_again_after_a_restart(
    finished: Swarm, a: FakePeer, b: FakePeer
) -> None:
    exported = {"a": a.exported, "b": b.exported}
    assert {
        result.peer_id: result.file for result in status_of(finished.told_of(RUN)[-1]).results
    } == exported
    finished.restart()
    assert status_of(finished.run()).results == (), "it is for the peers to say"
    finished.join(a)
    assert [result.file for result in status_of(finished.run()).results] == [a.exported]
    finished.join(b)
    assert {result.peer_id: result.file for result in status_of(finished.run()).results} == exported


def test_a_peer_that_comes_back_with_its_part_costs_nothing(finished: Swarm, b: FakePeer) -> None:
    attempt = finished.run().attempt.number
    finished.lose(b)
    finished.wait(GRACE_S - 1.0)
    finished.join(b)
    finished.wait(10 * GRACE_S)
    assert (finished.run().phase, finished.run().attempt.number) == (RunPhase.FINISHED, attempt)


def test_a_part_that_nobody_comes_back_with_is_trained_again(
    finished: Swarm, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    finished.lose(b)
    finished.wait(GRACE_S)
    expected = reason(Kind.RESULT_LOST, layers="2-4", step=0)
    assert expected in details(finished)
    assert finished.run().detail == missing("2-4")
    finished.join(newcomer)
    finished.settle()
    assert finished.run().phase is RunPhase.FINISHED
    assert a.applied == newcomer.applied == [0, 1, 2]
    assert newcomer.exported
    assert finished.num_rollbacks == 1


def test_with_a_snapshot_of_the_end_nothing_is_trained_twice(
    saved: Swarm, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    num_plans = len(saved.said(PlanStep))
    saved.lose(b)
    saved.wait(GRACE_S)
    assert reason(Kind.RESULT_LOST, layers="2-4", step=3) in details(saved)
    saved.join(newcomer)
    saved.settle()
    assert saved.run().phase is RunPhase.FINISHED
    assert a.exported
    assert newcomer.exported
    assert len(saved.said(PlanStep)) == num_plans
    assert [save.step for _, save in saved.said(SaveStage)] == [2, 2, 3, 3], "once is enough"


def test_a_goodbye_takes_the_result_along_at_once(finished: Swarm, b: FakePeer) -> None:
    finished.leave(b)
    assert finished.run().phase is RunPhase.WAITING


def test_a_peer_that_restarted_without_its_part_is_not_waited_for(
    finished: Swarm, b: FakePeer
) -> None:
    finished.lose(b)
    b.forget()
    finished.join(b)
    assert finished.run().phase is RunPhase.LOADING
    finished.settle()
    assert finished.run().phase is RunPhase.FINISHED
    assert b.exported


def test_a_replica_keeps_the_result(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    twin = make_peer("twin", "2-4")
    swarm.join(a, b, twin)
    swarm.submit(make_spec())
    swarm.settle()
    swarm.leave(b)
    swarm.wait(10 * GRACE_S)
    assert swarm.run().phase is RunPhase.FINISHED
    swarm.leave(twin)
    assert swarm.run().phase is RunPhase.WAITING


def test_a_part_of_a_voided_history_is_no_result(
    finished: Swarm, b: FakePeer, newcomer: FakePeer
) -> None:
    finished.lose(b)
    finished.wait(GRACE_S)
    finished.join(newcomer)
    finished.settle_until(lambda: finished.run().committed_steps == 1)
    finished.join(b)
    assert b.peer_id not in finished.run().past.exported
    finished.settle()
    assert finished.run().phase is RunPhase.FINISHED
    assert b.applied == [0, 1, 2]


def test_a_collected_result_may_be_lost(finished: Swarm, a: FakePeer, b: FakePeer) -> None:
    finished.handle(ResultCollected(RUN))
    finished.leave(b)
    finished.leave(a)
    finished.wait(GRACE_S)
    assert finished.run().phase is RunPhase.COLLECTED


# ---- after a restart of the coordinator


def test_after_a_restart_holders_are_waited_for_and_believed(
    finished: Swarm, a: FakePeer, b: FakePeer
) -> None:
    finished.restart()
    finished.join(a)
    finished.wait(GRACE_S - 1.0)
    finished.join(b)
    finished.wait(10 * GRACE_S)
    assert finished.run().phase is RunPhase.FINISHED
    finished.leave(b)
    assert finished.run().phase is RunPhase.WAITING


def test_after_a_restart_a_result_that_nobody_brings_is_made_again(
    saved: Swarm, a: FakePeer, newcomer: FakePeer
) -> None:
    saved.restart()
    saved.join(a, newcomer)
    saved.wait(GRACE_S)
    saved.settle()
    assert saved.run().phase is RunPhase.FINISHED
    assert newcomer.exported
    assert saved.num_rollbacks == 1


def test_a_run_that_went_back_goes_on_after_a_restart(
    saved: Swarm, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    saved.leave(b)
    assert saved.run().phase is RunPhase.WAITING
    saved.restart()
    saved.join(a, newcomer)
    saved.settle()
    assert saved.run().phase is RunPhase.FINISHED
    assert newcomer.exported


# ---- with other runs


@pytest.fixture
def c(make_peer: type[FakePeer]) -> FakePeer:
    return make_peer("c", "0-4")


@pytest.fixture
def second(finished: Swarm, make_spec: MakeSpec, c: FakePeer) -> Swarm:
    """A second run that trains at c while the first waits for its client."""
    finished.submit(make_spec(num_steps=5), SECOND)
    finished.join(c)
    finished.settle_until(lambda: finished.run(SECOND).committed_steps == 2)
    return finished


def test_a_run_that_trains_is_not_disturbed_by_an_older_ones_lost_result(
    second: Swarm, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    second.leave(b)
    assert second.run().phase is RunPhase.FINISHED
    expected = reason(Kind.RESULT_LOST, layers="2-4", runs=(SECOND,))
    assert second.run().detail == expected
    second.settle()
    assert second.run(SECOND).phase is RunPhase.FINISHED
    assert second.num_rollbacks == 1, "the first run's, when the second is over"
    assert missing("2-4") in all_parts(second.run().detail)
    assert c.exported


def test_a_part_that_comes_back_meanwhile_counts(second: Swarm, b: FakePeer) -> None:
    second.lose(b)
    second.wait(GRACE_S)
    assert Kind.RESULT_LOST in kinds_in(second.run().detail)
    second.join(b)
    assert second.run().detail == reason(Kind.RESULT_READY)
    second.settle()
    assert second.run(SECOND).phase is RunPhase.FINISHED
    assert second.run().phase is RunPhase.FINISHED
    assert second.num_rollbacks == 0


def test_two_results_are_made_again_one_after_the_other(
    second: Swarm, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    second.settle()
    second.leave(c)
    assert second.run(SECOND).phase is RunPhase.WAITING
    second.leave(b)
    assert second.run().phase is RunPhase.WAITING
    assert second.run().detail == missing("2-4")
    second.join(c)
    second.join(b)
    second.settle()
    assert c.exported
    assert second.run(SECOND).phase is RunPhase.FINISHED
    second.handle(ResultCollected(SECOND))
    second.settle()
    assert second.run().phase is RunPhase.FINISHED


def test_what_is_left_of_a_lost_result_does_not_keep_its_peers_from_a_run_that_waits(
    second: Swarm, a: FakePeer, b: FakePeer, c: FakePeer, newcomer: FakePeer
) -> None:
    second.leave(c)
    assert second.run(SECOND).phase is RunPhase.WAITING
    second.leave(b)
    second.join(newcomer)
    second.settle()
    assert second.run().phase is RunPhase.FINISHED, "it came first"
    assert second.run().peers == ("a", "newcomer")
    second.handle(ResultCollected(RUN))
    second.settle()
    assert second.run(SECOND).phase is RunPhase.FINISHED


def test_a_run_that_was_never_begun_waits_for_the_older_one(
    finished: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    finished.submit(make_spec(), SECOND)
    assert finished.run(SECOND).phase is RunPhase.WAITING
    finished.leave(b)
    assert finished.run(SECOND).phase is RunPhase.WAITING
    finished.join(newcomer)
    finished.settle()
    assert finished.run().phase is RunPhase.FINISHED
    finished.handle(ResultCollected(RUN))
    finished.settle()
    assert finished.run(SECOND).phase is RunPhase.FINISHED


def test_of_runs_that_were_begun_the_one_that_came_first_is_first_after_a_restart(
    second: Swarm, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    second.settle()
    second.leave(c)
    second.leave(b)
    second.restart()
    second.join(c)
    second.settle()
    assert second.run().phase is RunPhase.FINISHED
    assert second.run(SECOND).phase is RunPhase.WAITING


def test_a_lost_result_may_be_cancelled(finished: Swarm, a: FakePeer, b: FakePeer) -> None:
    finished.leave(b)
    finished.handle(RunCancelled(RUN))
    finished.wait(GRACE_S)
    assert finished.run().phase is RunPhase.CANCELLED
    assert a.assign is None
