"""Replicas of a stage tell alike what they have alike; who does not is done without."""

import pytest

from swarm_ft.coordinator.decide.machine import RETRY_S
from swarm_ft.coordinator.plan.agreement import NORM_TOLERANCE
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import CommitStep
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")


@pytest.fixture
def replicas(make_peer: type[FakePeer]) -> list[FakePeer]:
    """Of the second stage, in the order in which they join."""
    return [make_peer(name, "2-4") for name in ("b1", "b2", "b3")]


def train(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, replicas: list[FakePeer]) -> None:
    swarm.join(*replicas, a)
    swarm.submit(make_spec())
    swarm.settle()


def aside(swarm: Swarm) -> set[PeerId]:
    return {p for p in swarm.state.members if swarm.state.is_aside(p, swarm.now_s)}


# ---- gradient norms


@pytest.mark.parametrize("told", [0.0, 1e60])
@pytest.mark.parametrize(("count", "liar"), [(2, 1), (3, 0), (3, 1), (3, 2)])
def test_who_tells_another_norm_is_done_without_and_moves_no_clip_factor(
    swarm: Swarm,
    make_spec: MakeSpec,
    a: FakePeer,
    replicas: list[FakePeer],
    told: float,
    count: int,
    liar: int,
) -> None:
    replicas[liar].squared_grad_norm = told
    train(swarm, make_spec, a, replicas[:count])
    assert aside(swarm) == {replicas[liar].peer_id}
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.grad_norm for step in swarm.steps()] == [8.0**0.5] * len(swarm.steps())
    words = "it told another gradient norm than its replicas"
    assert swarm.idlers() == {replicas[liar].peer_id: f"set aside for 30 s after {words}"}
    others = " and ".join(p.peer_id for p in replicas[:count] if p is not replicas[liar])
    assert (
        f"peer {replicas[liar].peer_id} (layers 2-4) told another gradient norm than its replicas; "
        f"its part goes to {others}"
    ) in [status.detail for status in swarm.told_of()]


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
