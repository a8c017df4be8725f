"""Several runs train side by side, each with peers of its own."""

import pytest

from swarm_ft.coordinator.facts.events import ResultCollected
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.membership import GRACE_S
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import Assign
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import behind, missing, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN, SECOND, THIRD = RunId("run-1"), RunId("run-2"), RunId("run-3")
STEPS = [0, 1, 2]


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec()


@pytest.fixture
def whole(make_peer: type[FakePeer]) -> tuple[FakePeer, ...]:
    """Four peers, each of which can host a run alone."""
    return tuple(make_peer(f"p{i}", "0-4") for i in range(4))


def both_commit(swarm: Swarm, *runs: RunId) -> None:
    swarm.settle_until(lambda: all(swarm.run(run).committed_steps for run in runs))


def test_two_runs_train_at_the_same_time_each_with_its_own_peers(
    swarm: Swarm, spec: RunSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(*whole[:2])
    both_commit(swarm, RUN, SECOND)
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.TRAINING
    assert [(run.place, run.behind) for run in overview(swarm.state).runs] == [(0, None)] * 2
    swarm.settle()
    for run in (RUN, SECOND):
        assert swarm.run(run).phase is RunPhase.FINISHED
        assert [step.step for step in swarm.history[run]] == STEPS
    assert {*swarm.run().peers, *swarm.run(SECOND).peers} == {"p0", "p1"}


def test_a_death_in_one_run_is_nothing_to_the_other(
    swarm: Swarm, spec: RunSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(*whole[:2])
    both_commit(swarm, RUN, SECOND)
    attempt = swarm.run(SECOND).attempt.number
    lost = next(peer for peer in whole if peer.peer_id in swarm.run().peers)
    swarm.leave(lost)
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    assert swarm.run(SECOND).attempt.number == attempt
    assert swarm.run().phase is RunPhase.WAITING
    swarm.join(whole[2])
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_replica_goes_to_a_run_that_waits_when_its_step_ends(
    swarm: Swarm, make_spec: MakeSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(make_spec(num_steps=20))
    swarm.join(*whole[:2])
    swarm.settle_until(lambda: swarm.run().committed_steps and len(swarm.run().peers) == 2)
    committed = swarm.run().committed_steps
    swarm.submit(make_spec(), SECOND)
    assert swarm.run(SECOND).detail == behind("run-1")
    assert swarm.run(SECOND).phase is RunPhase.QUEUED
    swarm.settle_until(lambda: swarm.run(SECOND).committed_steps)
    assert swarm.run().committed_steps > committed
    assert swarm.num_rollbacks == 0
    (released,) = (peer for peer, message in swarm.said(Release) if message.run_id == RUN)
    assert swarm.run(SECOND).peers == (released,)
    swarm.settle()
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED


def test_a_peer_that_a_run_needs_is_not_taken_from_it(
    swarm: Swarm, make_spec: MakeSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(make_spec(num_steps=6), owner="ann")
    swarm.join(whole[0])
    swarm.settle_until(lambda: swarm.run().committed_steps)
    swarm.submit(make_spec(), SECOND, owner="bob", priority=9)
    assert swarm.run(SECOND).priority == 9
    swarm.submit(make_spec(), THIRD, owner="bob")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().attempt.number == 1
    swarm.handle(ResultCollected(RUN))
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    assert swarm.run(THIRD).phase is not RunPhase.FINISHED


def test_who_waits_tells_what_for_and_how_many_come_before_it(
    swarm: Swarm, make_spec: MakeSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(make_spec())
    swarm.join(whole[0])
    swarm.submit(make_spec(), SECOND)
    swarm.submit(make_spec(), THIRD)
    swarm.submit(make_spec(num_blocks=6), RunId("run-4"))
    assert swarm.run(SECOND).detail == behind("run-1")
    assert swarm.run(THIRD).detail == behind("run-1", position=1)
    assert swarm.run(RunId("run-4")).detail == missing("4-6")
    places = [(0, None), (1, RUN), (2, SECOND), (3, THIRD)]
    assert [(run.place, run.behind) for run in overview(swarm.state).runs] == places


def test_a_member_that_comes_while_one_loads_goes_to_the_run_that_has_less(
    swarm: Swarm, spec: RunSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(whole[0], whole[1])
    swarm.join(whole[2], whole[3])
    assert sorted(map(len, (swarm.run().peers, swarm.run(SECOND).peers))) == [2, 2]
    swarm.settle()
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED


def test_automatic_peers_are_divided(
    swarm: Swarm, spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(*(make_peer(f"any{i}", "auto") for i in range(4)))
    swarm.wait(SETTLE_S)
    assert sorted(map(len, (swarm.run().stages, swarm.run(SECOND).stages))) == [2, 2]
    swarm.settle()
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED


def test_runs_side_by_side_go_on_after_a_restart(
    make_swarm: type[Swarm], spec: RunSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.submit(spec)
    swarm.submit(spec, SECOND, owner="bob", priority=9)
    swarm.join(*whole[:2])
    both_commit(swarm, RUN, SECOND)
    assigned = len(swarm.said(Assign))
    swarm.restart()
    assert swarm.run(SECOND).priority == 9
    swarm.join(*whole[:2])
    swarm.settle()
    assert len(swarm.said(Assign)) == assigned + 2
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_a_lost_result_is_made_again_beside_a_run_that_trains_if_there_are_peers(
    swarm: Swarm, make_spec: MakeSpec, whole: tuple[FakePeer, ...]
) -> None:
    swarm.submit(make_spec())
    swarm.join(whole[0])
    swarm.settle()
    swarm.submit(make_spec(num_steps=9), SECOND)
    swarm.join(whole[1])
    swarm.settle_until(lambda: swarm.run(SECOND).committed_steps)
    swarm.lose(whole[0])
    swarm.wait(GRACE_S)
    assert swarm.run().detail == reason(Kind.RESULT_LOST, layers="0-4", runs=(SECOND,))
    swarm.join(whole[2])
    assert swarm.run().peers == ("p2",)
    swarm.settle()
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED


def test_a_run_with_more_stages_than_it_needs_is_cut_anew_for_one_that_waits(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=20, save_steps=100))
    swarm.join(*(make_peer(f"any{i}", "auto") for i in range(4)))
    swarm.wait(SETTLE_S)
    swarm.settle_until(lambda: swarm.run().committed_steps == 3)
    assert len(swarm.run().stages) == 4
    swarm.submit(make_spec(), SECOND)
    assert swarm.run(SECOND).detail == behind("run-1")
    swarm.settle_until(lambda: swarm.run(SECOND).committed_steps)
    assert [len(swarm.run(run).stages) for run in (RUN, SECOND)] == [2, 2]
    assert swarm.num_rollbacks == 1
    assert swarm.run().committed_steps >= 3
    swarm.settle()
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED
    assert [step.step for step in swarm.history[RUN]] == list(range(20))


def test_a_run_without_snapshots_keeps_its_stages(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=9))
    swarm.join(*(make_peer(f"any{i}", "auto") for i in range(4)))
    swarm.wait(SETTLE_S)
    swarm.settle_until(lambda: swarm.run().committed_steps)
    swarm.submit(make_spec(), SECOND)
    swarm.settle()
    assert swarm.run().attempt.number == 1
    assert swarm.run().phase is RunPhase.FINISHED
