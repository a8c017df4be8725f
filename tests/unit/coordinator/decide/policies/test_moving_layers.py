from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.policies.holding import Hold
from swarm_ft.coordinator.decide.policies.moving import (
    GiveUpMove,
    Move,
    NoteComparison,
    compare_stages,
    move_layers,
)
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.coordinator.facts.state import Repartition, Run
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange
from tests.reasons import reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    STEPS,
    between_steps,
    paused,
    receivers,
    saved,
    train,
)

TO_ONE = (StageAssignment(peer_id=PeerId("one"), layers=LayerRange(0, 4)),)
MOVING = Repartition(step=StepNumber(2), assignments=TO_ONE, before_s=2.0, after_s=1.0)


@pytest.fixture
def trains(swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]) -> Swarm:
    """A run on two peers, either of which could host it alone."""
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    one, two = make_peer("one", "auto"), make_peer("two", "auto")
    swarm.join(one, two)
    swarm.wait(3)
    train(swarm, make_spec(num_steps=STEPS))
    assert set(swarm.run().peers) == {"one", "two"}
    return swarm


def with_move(run: Run) -> Run:
    return replace(run, moving=MOVING)


def test_a_run_without_a_repartition_does_not_move(trains: Swarm) -> None:
    assert move_layers(*between_steps(trains)) is None


def test_a_run_that_began_to_move_or_has_a_plan_does_not_move(trains: Swarm) -> None:
    planned = with_move(trains.run())
    assert planned.step is not None
    assert move_layers(trains.state, planned, trains.now_s) is None
    state, run, now_s = between_steps(trains)
    begun = replace(run, moving=replace(MOVING, has_begun=True))
    assert move_layers(state, begun, now_s) is None


def test_a_move_waits_for_its_snapshot(trains: Swarm) -> None:
    expected = Hold(reason(ReasonKind.MOVE_SAVES_FIRST, step=2), saves=True)
    assert move_layers(*between_steps(trains, with_move)) == expected


def test_a_saved_run_moves_and_releases_peers_without_layers(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains, with_move, saved)
    action = move_layers(state, run, now_s)
    assert action == Move(MOVING)
    turn = Transition(state, now_s)
    Move(MOVING).apply(turn, run)
    after = turn.state.runs[run.run_id]
    assert after.phase is RunPhase.WAITING
    assert after.moving == replace(MOVING, has_begun=True)
    assert after.committed_steps == 2, "no step is repeated"
    assert after.moves.count == 1
    assert receivers(turn, Release) == ["two"]


@pytest.mark.parametrize("change", ["paused", "other step", "peer gone"])
def test_a_move_that_has_become_impossible_is_given_up(trains: Swarm, change: str) -> None:
    state, run, now_s = between_steps(trains, with_move, saved)
    if change == "paused":
        run = paused(run)
    elif change == "other step":
        run = replace(run, moving=replace(MOVING, step=StepNumber(1)))
    else:
        state = state.without_member(PeerId("one"))
    assert move_layers(state, run, now_s) == GiveUpMove()
    turn = Transition(state, now_s)
    after = GiveUpMove().apply(turn, run)
    assert after.moving is None
    assert after.detail == reason(ReasonKind.MOVE_IMPOSSIBLE)
    assert turn.state.runs[run.run_id] == after


def test_the_result_of_a_comparison_is_noted(
    trains: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, run, now_s = between_steps(trains)
    assert compare_stages(state, run, now_s) is None, "too few steps are measured"
    plan = "swarm_ft.coordinator.plan.moving"
    monkeypatch.setattr(f"{plan}.is_to_look", lambda *_: True)
    monkeypatch.setattr(f"{plan}.better_stages", lambda *_: MOVING)
    assert compare_stages(state, run, now_s) == NoteComparison(MOVING)
    turn = Transition(state, now_s)
    after = NoteComparison(MOVING).apply(turn, run)
    assert after.moving == MOVING
    assert after.moves.looked_s == now_s
    assert NoteComparison(None).apply(turn, after).moving == MOVING, "no result voids no move"
    assert turn.effects == []
