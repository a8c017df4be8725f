from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.policies.saving import Save, save_again, save_if_due
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.ids import Attempt, RunId
from swarm_ft.protocol.messages.control import SaveStage
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    STEPS,
    after_last_step,
    between_steps,
    receivers,
    saved,
    train,
)

LATER_S = 10_000.0


@pytest.fixture
def saving(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    """A run that saves every second step, of which two are committed."""
    train(swarm, make_spec(num_steps=STEPS, save_steps=2), a, b)
    return swarm


def not_saved(run: Run) -> Run:
    return replace(run, saving=replace(run.saving, asked=None, unlisted=()))


def in_next_attempt(run: Run) -> Run:
    return replace(run, attempt=replace(run.attempt, number=Attempt(run.attempt.number + 1)))


def test_a_commit_that_the_job_wants_saved_is_saved(saving: Swarm) -> None:
    state, run, now_s = between_steps(saving, not_saved)
    assert save_if_due(state, run, now_s) == Save()
    turn = Transition(state, now_s)
    after = Save().apply(turn, run)
    assert after.saving.asked is not None
    assert (after.saving.asked.step, after.saving.attempt) == (2, run.attempt.number)
    assert receivers(turn, SaveStage) == ["a", "b"]
    assert turn.state.runs[run.run_id] == after


def test_a_saved_commit_and_the_last_one_are_not_saved(saving: Swarm) -> None:
    assert save_if_due(*between_steps(saving, not_saved, saved)) is None
    assert save_if_due(*between_steps(saving, not_saved, after_last_step)) is None


def test_a_run_that_gives_peers_saves_in_its_next_attempt(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    peers = (make_peer(name, "0-4") for name in ("p0", "p1"))
    swarm.has_slow_disk = True
    train(swarm, make_spec(num_steps=20, save_steps=1), *peers)
    swarm.settle_until(lambda: len(swarm.run().computing[0].peers) == 2)
    assert save_if_due(*between_steps(swarm, not_saved)) == Save()
    swarm.submit(make_spec(), RunId("run-2"))
    assert save_if_due(*between_steps(swarm, not_saved)) is None
    assert save_again(*between_steps(swarm, not_saved, in_next_attempt)) == Save()


def test_peers_keep_snapshots_of_jobs_without_a_schedule_by_time(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True, num_keepers=2)
    train(swarm, make_spec(num_steps=STEPS), a, b)
    state, run, now_s = between_steps(swarm)
    assert save_if_due(state, run, now_s) is None
    assert save_if_due(state, run, now_s + LATER_S) == Save()
    assert save_if_due(state, after_last_step(run), now_s + LATER_S) is None


def test_a_request_is_repeated_once_an_attempt(saving: Swarm) -> None:
    state, run, now_s = between_steps(saving, not_saved)
    assert run.saving.attempt == run.attempt.number
    assert save_again(state, run, now_s) is None
    again = in_next_attempt(run)
    assert save_again(state, again, now_s) == Save()
    assert save_again(state, saved(again), now_s) is None
