"""Patience, threshold and ties equal those of transformers' own callback."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import EarlyStoppingCallback

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.best import Best, Judged, metric_of
from swarm_ft.protocol.spec.run_spec import CLASS_METRICS, TaskKind, TrainSpec
from swarm_ft.protocol.spec.tasks import task_of
from tests.specs import train_spec

VALUES = st.lists(st.sampled_from([0.0, 0.5, 0.75, 1.0, 1.25, 2.0, 3.0]), max_size=12)


def train_of(**options: object) -> TrainSpec:
    return train_spec(**{"num_eval_samples": 1, "eval_steps": 1, **options})


def judged(train: TrainSpec, values: list[float], saved: frozenset[int] = frozenset()) -> Judged:
    found = Judged().after(train, StepNumber(0), -1.0, is_saved=False)
    for step, value in enumerate(values, 1):
        found = found.after(train, StepNumber(step), value, is_saved=step in saved)
    return found


def theirs(values: list[float], threshold: float, *, greater: bool) -> tuple[int, float | None]:
    """Return their callback's count of evaluations without improvement, and their best value."""
    callback = EarlyStoppingCallback(early_stopping_threshold=threshold)
    args, state = SimpleNamespace(greater_is_better=greater), SimpleNamespace(best_metric=None)
    for value in values:
        callback.check_metric_value(args, state, None, value)
        best = state.best_metric
        if best is None or (value > best if greater else value < best):  # as their Trainer does
            state.best_metric = value
    return callback.early_stopping_patience_counter, state.best_metric


@pytest.mark.parametrize("is_accuracy", [False, True])
@given(values=VALUES, threshold=st.sampled_from([0.0, 0.25, 0.5, 1.0]), patience=st.integers(1, 4))
def test_a_run_is_judged_as_transformers_judges_it(
    is_accuracy: bool, values: list[float], threshold: float, patience: int
) -> None:
    of_task = {
        "task_kind": TaskKind.CLASSIFICATION,
        "label_names": "a,b",
        "metric_for_best_model": "eval_accuracy",
    }
    train = train_of(
        early_stopping_patience=patience,
        early_stopping_threshold=threshold,
        **(of_task if is_accuracy else {}),
    )
    found = judged(train, values)
    num_worse, best = theirs(values, threshold, greater=is_accuracy)
    assert found.num_worse == num_worse
    assert found.stops(train) == (num_worse >= patience)
    assert (found.best and found.best.value) == best
    assert found.step == len(values)


@given(values=VALUES, saved=st.frozensets(st.integers(1, 12)))
def test_the_best_that_can_be_had_again_is_the_first_of_them(
    values: list[float], saved: frozenset[int]
) -> None:
    found = judged(train_of(), values, saved).saved
    candidates = [(value, step) for step, value in enumerate(values, 1) if step in saved]
    assert found == (
        Best(StepNumber(min(candidates)[1]), min(candidates)[0]) if candidates else None
    )


def test_without_patience_nothing_stops() -> None:
    assert not judged(train_of(), [1.0] * 100).stops(train_of())


def test_weights_before_the_first_step_are_not_judged() -> None:
    found = judged(train_of(), [])
    assert (found.step, found.best, found.saved, found.num_worse) == (0, None, None, 0)


@pytest.mark.parametrize("name", CLASS_METRICS)
@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_metrics_are_those_of_the_task(name: str, prefix: str) -> None:
    train = train_of(
        task_kind=TaskKind.CLASSIFICATION,
        label_names="a,b",
        metric_for_best_model=prefix + name,
    )
    counts = (3, 2, 4, 4, 5, 3)
    assert task_of(train).metrics(counts).keys() == set(CLASS_METRICS)
    assert metric_of(train, 0.25, counts) == task_of(train).metrics(counts)[name]
    assert metric_of(train, 0.25, ()) == 0.0
    assert not train.lower_is_better
    of_loss = replace(train, metric_for_best_model="eval_loss")
    assert metric_of(of_loss, 0.25, counts) == 0.25
    assert of_loss.lower_is_better
