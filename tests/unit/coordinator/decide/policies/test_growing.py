from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.policies.growing import AdmitLearners, admit_learners, grow
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from tests.reasons import kinds_in, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    STEPS,
    after_last_step,
    between_steps,
    paused,
    receivers,
    train,
)


@pytest.fixture
def trains(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    train(swarm, make_spec(num_steps=STEPS), a, b)
    return swarm


def test_a_newcomer_joins_the_next_attempt(trains: Swarm, newcomer: FakePeer) -> None:
    assert grow(*between_steps(trains)) is None
    trains.join(newcomer)
    state, run, now_s = between_steps(trains)
    action = grow(state, run, now_s)
    assert action is not None
    assert action.fewer is run
    assert set(action.grown.peers) == {"a", "b", "newcomer"}
    turn = Transition(state, now_s)
    action.apply(turn, run)
    after = turn.state.runs[run.run_id]
    assert after.phase is RunPhase.WAITING
    assert after.peers == run.peers, "the next attempt finds the newcomer again"
    assert after.detail == reason(ReasonKind.PEERS_JOIN, "newcomer")
    assert receivers(turn, Release) == []


def test_a_run_after_its_last_step_does_not_grow(trains: Swarm, newcomer: FakePeer) -> None:
    trains.join(newcomer)
    assert grow(*between_steps(trains, after_last_step)) is None


def test_a_paused_run_grows_by_successors_alone(
    trains: Swarm, b: FakePeer, newcomer: FakePeer
) -> None:
    trains.join(newcomer)
    assert grow(*between_steps(trains, paused)) is None
    trains.would_leave(b)
    action = grow(*between_steps(trains, paused))
    assert action is not None
    assert "newcomer" in action.grown.peers


def test_a_peer_that_moves_to_other_layers_is_not_released(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    one, two, three = (make_peer(name, "auto") for name in ("one", "two", "three"))
    swarm.join(one, two)
    swarm.wait(3)
    train(swarm, make_spec(num_steps=STEPS))
    swarm.join(three)
    swarm.settle_until(lambda: len(swarm.run().peers) == 3 and not swarm.run().listeners)
    (last,) = next(stage.peers for stage in swarm.run().stages if len(stage.peers) == 1)
    leaver = next(peer for peer in (one, two, three) if peer.peer_id == last)
    swarm.would_leave(leaver)
    state, run, now_s = between_steps(swarm)
    action = grow(state, run, now_s)
    assert action is not None
    (moves,) = set(run.peers) - set(action.fewer.peers)
    turn = Transition(state, now_s)
    action.apply(turn, run)
    assert receivers(turn, Release) == []
    detail = turn.state.runs[run.run_id].detail
    assert detail is not None
    assert detail.kind is ReasonKind.PEER_MOVES
    assert detail.peers == (moves,)
    assert kinds_in(detail) == [ReasonKind.PEER_MOVES, ReasonKind.STAGE_LEFT]


def test_learners_that_caught_up_are_admitted(trains: Swarm, newcomer: FakePeer) -> None:
    assert admit_learners(*between_steps(trains)) is None
    newcomer.is_slow_to_take = True
    trains.join(newcomer)
    trains.settle_until(lambda: trains.run().listeners and trains.run().committed_steps == 4)
    trains.say(newcomer, newcomer.caught_up())
    state, run, now_s = between_steps(trains)
    assert run.attempt.caught_up == {"newcomer"}
    action = admit_learners(state, run, now_s)
    named = reason(ReasonKind.CAUGHT_UP, "newcomer", layers="2-4", step=run.committed_steps)
    assert action == AdmitLearners(named)
    assert action is not None
    turn = Transition(state, now_s)
    after = action.apply(turn, run)
    assert (after.listeners, after.attempt.caught_up) == ((), frozenset())
    assert after.detail == named
    assert turn.state.runs[run.run_id] == after


def test_learners_without_a_stage_are_admitted_without_a_record(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains)
    run = replace(run, attempt=replace(run.attempt, caught_up=frozenset({PeerId("gone")})))
    assert admit_learners(state, run, now_s) == AdmitLearners(None)
    turn = Transition(state, now_s)
    assert AdmitLearners(None).apply(turn, run).attempt.caught_up == frozenset()
    assert turn.effects == []
