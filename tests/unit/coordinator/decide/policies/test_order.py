from dataclasses import dataclass, replace

import pytest

from swarm_ft.coordinator.decide.policies.action import Action, Policy
from swarm_ft.coordinator.decide.policies.order import (
    AFTER_COMMIT,
    BETWEEN_STEPS,
    WITH_PRESENT_PEERS,
    decide_next,
)
from swarm_ft.coordinator.decide.policies.planning import plan_next
from swarm_ft.coordinator.facts.events import RunPaused, Transition
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.protocol.messages.control import PlanStep, SaveStage
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import STEPS, between_steps, receivers, train


@dataclass(frozen=True)
class Step:
    """An action that adds a committed step; it ends the decision, or does not."""

    ends: bool

    def apply(self, turn: Transition, run: Run) -> Run | None:
        run = replace(run, past=replace(run.past, committed_steps=run.committed_steps + 1))
        turn.set_run(run)
        return None if self.ends else run


@pytest.fixture
def trains(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    train(swarm, make_spec(num_steps=STEPS), a, b)
    return swarm


def policy(seen: list[tuple[int, int]], action: Action | None) -> Policy:
    """A policy that notes the steps of the run, and of the state's run, of each call."""

    def decides(state: SwarmState, run: Run, _now_s: float) -> Action | None:
        seen.append((run.committed_steps, state.runs[run.run_id].committed_steps))
        return action

    return decides


def test_the_first_action_without_a_run_ends_the_decision(trains: Swarm) -> None:
    seen: list[tuple[int, int]] = []
    actions = (None, Step(ends=False), None, Step(ends=True), Step(ends=True))
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    decide_next(turn, run, tuple(policy(seen, one) for one in actions))
    assert seen == [(2, 2), (2, 2), (3, 3), (3, 3)]
    assert turn.state.runs[RUN].committed_steps == 4


def test_each_list_ends_with_the_shorter_one_and_with_a_plan() -> None:
    for longer, shorter in ((AFTER_COMMIT, BETWEEN_STEPS), (BETWEEN_STEPS, WITH_PRESENT_PEERS)):
        assert longer[-len(shorter) :] == shorter
    assert WITH_PRESENT_PEERS[-1] is plan_next


@pytest.mark.parametrize("policies", [AFTER_COMMIT, BETWEEN_STEPS, WITH_PRESENT_PEERS])
def test_a_run_that_nothing_stops_plans_its_next_step(
    trains: Swarm, policies: tuple[Policy, ...]
) -> None:
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    decide_next(turn, run, policies)
    assert receivers(turn, PlanStep) == ["a", "b"]


def test_a_paused_run_saves_what_would_leave_with_a_peer(trains: Swarm, b: FakePeer) -> None:
    trains.handle(RunPaused(RUN))
    trains.would_leave(b)
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    decide_next(turn, run, BETWEEN_STEPS)
    detail = turn.state.runs[RUN].detail
    assert detail is not None
    assert detail.kind is ReasonKind.SAVES_BEFORE_LEAVE
    assert receivers(turn, SaveStage) == ["a", "b"]
    assert receivers(turn, PlanStep) == []


def test_leavers_go_before_newcomers_come(
    trains: Swarm, b: FakePeer, newcomer: FakePeer, make_peer: type[FakePeer]
) -> None:
    trains.join(newcomer)
    trains.settle_until(lambda: len(trains.run().peers) == 3 and not trains.run().listeners)
    trains.would_leave(b)
    trains.join(make_peer("later", "2-4"))
    state, run, now_s = between_steps(trains)
    turn = Transition(state, now_s)
    decide_next(turn, run, BETWEEN_STEPS)
    detail = turn.state.runs[RUN].detail
    assert detail is not None
    assert detail.kind is ReasonKind.PEER_LOST
    assert detail.peers == ("b",)
