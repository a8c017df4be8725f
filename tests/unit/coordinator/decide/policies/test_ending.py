from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.policies.ending import (
    Export,
    LoadBest,
    export_result,
    load_best,
)
from swarm_ft.coordinator.facts.events import Transition
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import ExportStage, SaveStage
from swarm_ft.protocol.spec.best import Best, Judged
from tests.reasons import reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import (
    STEPS,
    after_last_step,
    between_steps,
    receivers,
    saved,
    train,
)


def with_best(run: Run) -> Run:
    """Return the trained run whose best weights are those of the snapshot of its second step."""
    run = after_last_step(saved(run))
    best = Best(StepNumber(2), 1.0)
    judged = Judged(step=StepNumber(STEPS), best=best, saved=best)
    return replace(run, past=replace(run.past, judged=judged))


@pytest.fixture
def trains(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    options = {"num_eval_samples": 2, "eval_steps": 1, "save_steps": 1}
    spec = make_spec(num_steps=STEPS, load_best_model_at_end=True, **options)
    b.eval_losses = [5.0] * (STEPS + 1)
    train(swarm, spec, a, b)
    return swarm


def test_a_run_with_steps_left_does_not_end(trains: Swarm) -> None:
    at = between_steps(trains)
    assert load_best(*at) is None
    assert export_result(*at) is None


def test_a_trained_run_loads_its_best_weights(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains, with_best)
    (best,) = run.past.snapshots
    assert load_best(state, run, now_s) == LoadBest(best)
    turn = Transition(state, now_s)
    LoadBest(best).apply(turn, run)
    after = turn.state.runs[run.run_id]
    assert after.phase is RunPhase.WAITING
    assert (after.committed_steps, after.past.trained_steps) == (2, STEPS)
    assert after.detail == reason(ReasonKind.LOADING_BEST, step=2, text="loss", value=1.0)


def test_peers_that_loaded_the_best_weights_export_them(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains, with_best)
    loaded = replace(run, past=run.past.with_best(run.past.snapshots[0]))
    assert load_best(state, loaded, now_s) is None
    assert export_result(state, loaded, now_s) == Export()


def test_all_peers_export_and_unsaved_weights_are_saved_first(trains: Swarm) -> None:
    state, run, now_s = between_steps(trains, after_last_step)
    turn = Transition(state, now_s)
    Export().apply(turn, run)
    assert turn.state.runs[run.run_id].phase is RunPhase.EXPORTING
    assert receivers(turn, ExportStage) == ["a", "b"]
    kinds = [type(effect.message) for effect in turn.effects if hasattr(effect, "message")]
    assert kinds == [SaveStage, SaveStage, ExportStage, ExportStage]


def test_a_learner_is_released_and_exports_nothing(trains: Swarm, newcomer: FakePeer) -> None:
    newcomer.is_slow_to_take = True
    trains.join(newcomer)
    trains.settle_until(lambda: trains.run().listeners)
    state, run, now_s = between_steps(trains, after_last_step)
    turn = Transition(state, now_s)
    Export().apply(turn, run)
    assert receivers(turn, Release) == ["newcomer"]
    assert receivers(turn, ExportStage) == ["a", "b"]
    assert turn.state.runs[run.run_id].peers == ("a", "b")
