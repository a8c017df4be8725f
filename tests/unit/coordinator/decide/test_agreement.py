"""Replicas that must report the same: the run goes on without one that does not."""

import pytest

from swarm_ft.coordinator.decide.blame import RETRY_S
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.agreement import NORM_TOLERANCE
from swarm_ft.coordinator.watching import status_of
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import CommitStep
from tests.reasons import reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")


@pytest.fixture
def replicas(make_peer: type[FakePeer]) -> list[FakePeer]:
    """The replicas of the second stage, in the order in which they join."""
    return [make_peer(name, "2-4") for name in ("b1", "b2", "b3")]


def train(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer]) -> None:
    swarm.join(*replicas, a)
    swarm.submit(make_spec())
    swarm.settle()


def aside(swarm: Swarm) -> set[PeerId]:
    return {p for p in swarm.state.members if swarm.state.is_suspended(p, swarm.now_s)}


# ---- gradient norms


@pytest.mark.parametrize("reported", [0.0, 1e60])
@pytest.mark.parametrize(("count", "liar"), [(2, 1), (3, 0), (3, 1), (3, 2)])
def test_who_tells_another_norm_is_done_without_and_moves_no_clip_factor(
    swarm: Swarm,
    make_spec: MakeSpec,
    a: FakePeer,
    replicas: list[FakePeer],
    reported: float,
    count: int,
    liar: int,
) -> None:
    replicas[liar].squared_grad_norm = reported
    train(swarm, make_spec, a, replicas[:count])
    assert aside(swarm) == {replicas[liar].peer_id}
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.grad_norm for step in swarm.steps()] == [8.0**0.5] * len(swarm.steps())
    wrong = reason(Kind.WRONG_NORM)
    suspended = reason(Kind.PEER_SUSPENDED, amount=30.0, parts=(wrong.of(RUN),))
    assert swarm.idlers() == {replicas[liar].peer_id: suspended}
    others = tuple(p.peer_id for p in replicas[:count] if p is not replicas[liar])
    taken_over = reason(Kind.TAKEN_OVER, others=others)
    lost = reason(Kind.PEER_LOST, replicas[liar].peer_id, layers="2-4", parts=(wrong, taken_over))
    assert lost in swarm.reasons()


def test_of_two_the_one_that_failed_before_is_not_believed(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer]
) -> None:
    first, second, _ = replicas
    swarm.join(first, second, a)
    swarm.submit(make_spec())
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    swarm.pending.clear()
    swarm.say(first, first.failed("internal"))
    first.squared_grad_norm = 9.0
    swarm.wait(RETRY_S)
    swarm.settle()
    assert aside(swarm) == {"b1"}
    assert swarm.run().phase is RunPhase.FINISHED


def test_sums_in_another_order_are_the_same_norm(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer]
) -> None:
    for index, peer in enumerate(replicas):
        peer.squared_grad_norm *= 1.0 + index * NORM_TOLERANCE / 4
    train(swarm, make_spec, a, replicas)
    assert not aside(swarm)
    assert {peer for peer, _ in swarm.said(CommitStep)} == {"a", "b1", "b2", "b3"}


# ---- results


def results(swarm: Swarm) -> list[PeerId]:
    """Return the peers whose results of the second stage clients see, in that order."""
    return [r.peer_id for r in status_of(swarm.run()).results if r.peer_id != "a"]


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_of_three_results_the_one_that_differs_is_none(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer], liar: int
) -> None:
    replicas[liar].result = b"another"
    train(swarm, make_spec, a, replicas)
    others = [peer.peer_id for peer in replicas if peer is not replicas[liar]]
    name = replicas[liar].peer_id
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().detail == reason(Kind.RESULT_READY)
    assert results(swarm) == others
    assert name not in swarm.state.result_keepers
    (release,) = (message for peer, message in swarm.said(Release) if peer == name)
    assert release.reason == reason(Kind.RELEASED_OUTVOTED)
    assert not aside(swarm), "other hardware than most is no fault"


def test_of_two_results_that_differ_both_count_the_first_one_first_and_people_are_told(
    make_swarm: type[Swarm], make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer]
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    first, second, _ = replicas
    second.result = b"as a GPU has it"
    train(swarm, make_spec, a, [first, second])
    expected = reason(Kind.RESULT_READY, layers="2-4")
    assert (swarm.run().phase, swarm.run().detail) == (RunPhase.FINISHED, expected)
    assert results(swarm) == ["b1", "b2"]
    assert not aside(swarm)
    swarm.restart()
    swarm.join(second, first, a)
    assert results(swarm) == ["b1", "b2"]
    assert swarm.run().detail == expected


def test_who_was_outvoted_does_not_come_back_with_its_result(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer]
) -> None:
    liar = replicas[0]
    liar.result = b"another"
    train(swarm, make_spec, a, replicas)
    assert liar.assign is None, "it let go of the run"
    before = results(swarm)
    swarm.lose(liar)
    swarm.join(liar)
    assert results(swarm) == before
