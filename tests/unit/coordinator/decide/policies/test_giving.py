import pytest

from swarm_ft.coordinator.decide.policies.giving import give_peers
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase
from tests.reasons import reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    after_last_step,
    between_steps,
    receivers,
    train,
)

SECOND = RunId("run-2")


@pytest.fixture
def alone(swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]) -> Swarm:
    """A run with two replicas of its only stage."""
    train(swarm, make_spec(num_steps=20), *(make_peer(name, "0-4") for name in ("p0", "p1")))
    swarm.settle_until(lambda: len(swarm.run().peers) == 2)
    return swarm


@pytest.fixture
def shared(alone: Swarm, make_spec: MakeSpec) -> Swarm:
    """The same, and a run that waits for one of them."""
    alone.submit(make_spec(), SECOND)
    return alone


def test_a_replica_goes_to_the_waiting_run(shared: Swarm) -> None:
    state, run, now_s = between_steps(shared)
    action = give_peers(state, run, now_s)
    assert action is not None
    (given,) = action.peers
    turn = Transition(state, now_s)
    action.apply(turn, run)
    after = turn.state.runs[run.run_id]
    assert after.phase is RunPhase.WAITING
    assert after.peers == tuple(peer for peer in run.peers if peer != given)
    assert given not in after.past.holds
    assert after.detail == reason(ReasonKind.PEERS_GIVEN, given)
    assert receivers(turn, Release) == [given]


def test_a_run_after_its_last_step_gives_nothing(shared: Swarm) -> None:
    assert give_peers(*between_steps(shared, after_last_step)) is None


def test_without_a_waiting_run_nothing_is_given(alone: Swarm) -> None:
    assert give_peers(*between_steps(alone)) is None
