from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.policies.holding import Hold, pause
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import SaveStage
from tests.reasons import reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    STEPS,
    between_steps,
    paused,
    receivers,
    train,
)

PAUSED = reason(ReasonKind.PAUSED, step=2)
LEAVES = reason(ReasonKind.SAVES_BEFORE_LEAVE, "b", layers="2-4", step=2)


@pytest.fixture
def trains(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    train(swarm, make_spec(num_steps=STEPS), a, b)
    return swarm


def test_a_paused_run_holds_between_steps_only(trains: Swarm) -> None:
    assert pause(*between_steps(trains)) is None
    assert pause(*between_steps(trains, paused)) == Hold(PAUSED)


def test_a_step_that_an_earlier_attempt_began_is_repeated_first(trains: Swarm) -> None:
    run = paused(trains.run())
    assert run.step is not None
    assert pause(trains.state, run, trains.now_s) is None


def test_the_wait_counts_from_the_first_reason_of_its_kind(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    Hold(LEAVES).apply(turn, run)
    begun = turn.state.runs[run.run_id]
    assert begun.detail == LEAVES
    assert begun.attempt.awaited.since_s == now_s
    later = Transition(turn.state, now_s + 60)
    Hold(replace(LEAVES, peers=(PeerId("a"),))).apply(later, begun)
    same_kind = later.state.runs[run.run_id]
    assert same_kind.detail != LEAVES
    assert same_kind.attempt.awaited.since_s == now_s
    Hold(PAUSED).apply(later, same_kind)
    assert later.state.runs[run.run_id].attempt.awaited.since_s == now_s + 60


def test_the_same_reason_is_not_written_again(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    Hold(PAUSED).apply(turn, run)
    again = Transition(turn.state, now_s)
    Hold(PAUSED).apply(again, turn.state.runs[run.run_id])
    assert turn.effects
    assert again.effects == []


def test_a_snapshot_is_requested_once(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    Hold(LEAVES, saves=True).apply(turn, run)
    assert receivers(turn, SaveStage) == ["a", "b"]
    Hold(LEAVES, saves=True).apply(turn, turn.state.runs[run.run_id])
    assert receivers(turn, SaveStage) == ["a", "b"]


def test_a_pause_requests_no_snapshot(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    Hold(PAUSED).apply(turn, run)
    assert receivers(turn, SaveStage) == []
