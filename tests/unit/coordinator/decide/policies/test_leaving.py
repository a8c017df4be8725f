from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.policies.holding import Hold
from swarm_ft.coordinator.decide.policies.leaving import (
    ReleaseLeavers,
    hold_for_leavers,
    release_leavers,
)
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.protocol.messages.client import RunPhase
from tests.reasons import kinds_in, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    STEPS,
    after_last_step,
    between_steps,
    train,
)


@pytest.fixture
def trains(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> Swarm:
    """A run whose second stage has two replicas; the first stage has one."""
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    train(swarm, make_spec(num_steps=STEPS), a, b, newcomer)
    assert set(swarm.run().peers) == {"a", "b", "newcomer"}
    return swarm


def test_a_leaver_whose_state_another_has_is_released(trains: Swarm, b: FakePeer) -> None:
    assert release_leavers(*between_steps(trains)) is None
    trains.would_leave(b)
    state, run, now_s = between_steps(trains)
    assert release_leavers(state, run, now_s) == ReleaseLeavers()
    assert hold_for_leavers(state, run, now_s) is None
    turn = Transition(state, now_s)
    ReleaseLeavers().apply(turn, run)
    after = turn.state.runs[run.run_id]
    assert after.phase is RunPhase.WAITING
    assert ReasonKind.PEER_LEAVES in kinds_in(after.detail)


def test_nobody_is_released_after_the_last_step(trains: Swarm, b: FakePeer) -> None:
    trains.would_leave(b)
    at = between_steps(trains, after_last_step)
    assert release_leavers(*at) is None
    assert hold_for_leavers(*at) is None


@pytest.mark.parametrize("stays", [False, True])
def test_the_last_with_a_state_is_kept_until_a_snapshot_has_it(
    trains: Swarm, a: FakePeer, stays: bool
) -> None:
    trains.would_leave(a, stays=stays)
    at = between_steps(trains)
    assert release_leavers(*at) is None
    kind = ReasonKind.SAVES_BEFORE_PAUSE if stays else ReasonKind.SAVES_BEFORE_LEAVE
    expected = Hold(reason(kind, "a", layers="0-2", step=2), saves=True)
    assert hold_for_leavers(*at) == expected


def test_a_step_that_an_earlier_attempt_began_is_repeated_first(trains: Swarm, a: FakePeer) -> None:
    trains.would_leave(a)
    run = trains.run()
    assert run.step is not None
    assert hold_for_leavers(trains.state, run, trains.now_s) is None
