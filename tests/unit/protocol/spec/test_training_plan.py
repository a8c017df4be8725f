"""Order of samples, microbatches, learning rates and clipping, against torch and transformers."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.optimization import get_scheduler

from swarm_ft.ids import SampleId, StepNumber
from swarm_ft.protocol.spec.run_spec import (
    EvalCompression,
    EvalStrategy,
    LrSchedule,
    SaveStrategy,
    TrainSpec,
)
from swarm_ft.protocol.spec.training_plan import (
    MAX_EVAL_BATCH,
    NEVER,
    VisitOrder,
    clip_factor,
    evaluates_at,
    evaluation_microbatches,
    learning_rate_at,
    num_evaluations,
    saves_at,
    step_microbatches,
    step_samples,
)

# ---- samples of steps


@given(
    num_samples=st.integers(1, 40),
    micro_batch_size=st.integers(1, 5),
    microbatches_a_step=st.integers(1, 4),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(derandomize=True, deadline=None)
def test_an_epoch_visits_every_sample_once(
    train_spec: TrainSpec,
    num_samples: int,
    micro_batch_size: int,
    microbatches_a_step: int,
    shuffle: bool,
    epoch: int,
) -> None:
    spec = replace(
        train_spec,
        num_samples=num_samples,
        batch_size=micro_batch_size * microbatches_a_step,
        micro_batch_size=micro_batch_size,
        shuffle=shuffle,
    )
    first = epoch * spec.steps_per_epoch
    batches = [step_samples(spec, StepNumber(first + i)) for i in range(spec.steps_per_epoch)]
    assert Counter(sum(batches, ())) == Counter(range(num_samples))
    assert {len(batch) for batch in batches[:-1]} <= {spec.batch_size}
    assert 1 <= len(batches[-1]) <= spec.batch_size


@given(
    num_samples=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    num_steps=st.integers(1, 14),
    shuffle=st.booleans(),
    after_steps=st.lists(st.integers(-2, 16), min_size=1, max_size=5),
)
@settings(derandomize=True, deadline=None)
def test_the_next_visit_is_the_first_step_to_come_that_has_the_sample(
    train_spec: TrainSpec,
    num_samples: int,
    batch_size: int,
    num_steps: int,
    shuffle: bool,
    after_steps: list[int],
) -> None:
    spec = replace(
        train_spec,
        num_samples=num_samples,
        batch_size=batch_size,
        micro_batch_size=1,
        num_steps=num_steps,
        warmup_steps=0,
        shuffle=shuffle,
    )
    order = VisitOrder(spec)
    samples = [*range(num_samples), num_samples, num_samples + 7]
    for after in after_steps:  # in any order: a run may go back
        expected = [
            next(
                (
                    s
                    for s in range(max(0, after + 1), num_steps)
                    if i in step_samples(spec, StepNumber(s))
                ),
                NEVER,
            )
            for i in samples
        ]
        assert order.next_visits(np.array(samples), after).tolist() == expected
        assert [order.next_visit(i, after) for i in samples] == expected


@pytest.mark.parametrize("strategy", list(EvalStrategy))
@pytest.mark.parametrize("eval_steps", [0, 1, 3, 20])
@pytest.mark.parametrize("compression", [EvalCompression.OFF, EvalCompression.BOTH])
def test_a_held_out_sample_is_visited_where_it_is_evaluated(
    train_spec: TrainSpec, strategy: EvalStrategy, eval_steps: int, compression: EvalCompression
) -> None:
    spec = replace(
        train_spec,
        num_samples=9,
        batch_size=2,
        micro_batch_size=1,
        num_steps=14,
        num_eval_samples=3,
        eval_strategy=strategy,
        eval_steps=eval_steps,
        eval_compression=compression,
    )
    held_out = np.arange(spec.num_samples, spec.num_names)
    for after in range(-1, spec.num_steps + 2):
        due = (s for s in range(after + 1, spec.num_steps + 1) if evaluates_at(spec, StepNumber(s)))
        expected = [next(due, NEVER)] * len(held_out)
        assert VisitOrder(spec).next_visits(held_out, after).tolist() == expected
    assert VisitOrder(spec).next_visit(SampleId(spec.num_names), 0) == NEVER


@given(num_samples=st.integers(1, 30), micro_batch_size=st.integers(1, 6), step=st.integers(0, 9))
@settings(derandomize=True, deadline=None)
def test_microbatches_cut_a_step_in_order(
    train_spec: TrainSpec, num_samples: int, micro_batch_size: int, step: int
) -> None:
    spec = replace(
        train_spec,
        num_samples=num_samples,
        batch_size=3 * micro_batch_size,
        micro_batch_size=micro_batch_size,
    )
    batches = step_microbatches(spec, StepNumber(step))
    assert [batch.index for batch in batches] == list(range(len(batches)))
    assert sum((batch.samples for batch in batches), ()) == step_samples(spec, StepNumber(step))
    assert {len(batch.samples) for batch in batches[:-1]} <= {micro_batch_size}


def test_the_last_batch_of_an_epoch_is_short_and_the_next_epoch_begins_anew(
    train_spec: TrainSpec,
) -> None:
    spec = replace(train_spec, num_samples=10, batch_size=4, micro_batch_size=4, shuffle=False)
    steps = [step_samples(spec, StepNumber(step)) for step in range(4)]
    assert steps == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), (0, 1, 2, 3)]


def epoch_order(spec: TrainSpec, epoch: int) -> tuple[SampleId, ...]:
    """Return all samples in the order in which the steps of an epoch visit them."""
    first = epoch * spec.steps_per_epoch
    return sum((step_samples(spec, StepNumber(first + i)) for i in range(spec.steps_per_epoch)), ())


def test_without_shuffling_every_epoch_is_in_file_order(train_spec: TrainSpec) -> None:
    spec = replace(train_spec, shuffle=False)
    assert epoch_order(spec, 0) == epoch_order(spec, 5) == tuple(range(10))


def test_shuffled_orders_are_pinned(train_spec: TrainSpec) -> None:
    """Peers and restarted coordinators of any version must draw the same order."""
    assert epoch_order(train_spec, 0) == (4, 1, 2, 0, 6, 8, 5, 7, 9, 3)
    assert epoch_order(train_spec, 1) == (1, 2, 3, 7, 6, 8, 4, 9, 0, 5)
    assert epoch_order(replace(train_spec, seed=1), 0) == (3, 5, 9, 0, 2, 4, 1, 6, 8, 7)


# ---- learning rates


def transformers_rates(spec: TrainSpec) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=spec.learning_rate)
    scheduler = get_scheduler(
        spec.lr_schedule.name.lower()
        if spec.lr_schedule is not LrSchedule.CONSTANT
        else "constant_with_warmup",
        optimizer,
        num_warmup_steps=spec.warmup_steps,
        num_training_steps=spec.num_steps,
    )
    rates = []
    for _ in range(spec.num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", LrSchedule)
@pytest.mark.parametrize(
    ("warmup_steps", "num_steps"), [(0, 1), (0, 10), (3, 10), (1, 2), (9, 10), (10, 10), (20, 5)]
)
def test_schedules_are_those_of_transformers(
    train_spec: TrainSpec, schedule: LrSchedule, warmup_steps: int, num_steps: int
) -> None:
    spec = replace(
        train_spec,
        lr_schedule=schedule,
        warmup_steps=warmup_steps,
        num_steps=num_steps,
        learning_rate=3e-4,
    )
    ours = [learning_rate_at(spec, StepNumber(step)) for step in range(num_steps)]
    assert ours == pytest.approx(transformers_rates(spec), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("schedule", [LrSchedule.LINEAR, LrSchedule.COSINE])
def test_the_rate_ends_at_zero_and_stays_there(train_spec: TrainSpec, schedule: LrSchedule) -> None:
    spec = replace(train_spec, lr_schedule=schedule)
    assert learning_rate_at(spec, StepNumber(spec.num_steps)) == 0.0
    assert learning_rate_at(spec, StepNumber(spec.num_steps + 5)) == 0.0


@given(
    gradient=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8),
    bound=st.floats(1e-3, 1e3),
)
@settings(derandomize=True, deadline=None)
def test_clipping_is_that_of_torch(
    train_spec: TrainSpec, gradient: list[float], bound: float
) -> None:
    parameter = torch.zeros(len(gradient), dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    norm = torch.nn.utils.clip_grad_norm_([parameter], bound).item()
    factor = clip_factor(replace(train_spec, clip_grad_norm=bound), norm)
    assert parameter.grad.tolist() == pytest.approx([factor * g for g in gradient], rel=1e-12)


def test_a_bound_of_zero_turns_clipping_off(train_spec: TrainSpec) -> None:
    spec = replace(train_spec, clip_grad_norm=0.0)
    assert clip_factor(spec, 1e30) == clip_factor(spec, math.inf) == 1.0


# ---- snapshots


@pytest.mark.parametrize(
    ("strategy", "save_steps", "expected"),
    [
        (SaveStrategy.NO, 2, []),
        (SaveStrategy.STEPS, 0, []),
        (SaveStrategy.STEPS, 3, [3, 6]),
        (SaveStrategy.STEPS, 7, [7]),
        (SaveStrategy.EPOCH, 0, [3, 6]),
    ],
)
def test_snapshots_are_taken_every_few_steps_or_every_epoch(
    train_spec: TrainSpec, strategy: SaveStrategy, save_steps: int, expected: list[int]
) -> None:
    train = replace(
        train_spec,
        num_samples=9,
        batch_size=4,
        micro_batch_size=2,
        num_steps=7,
        save_strategy=strategy,
        save_steps=save_steps,
    )
    assert [step for step in range(8) if saves_at(train, StepNumber(step))] == expected
    assert train.takes_snapshots == bool(expected)


# ---- evaluation


@pytest.mark.parametrize(
    ("strategy", "eval_steps", "expected"),
    [
        (EvalStrategy.NO, 2, []),
        (EvalStrategy.STEPS, 0, [0, 7]),
        (EvalStrategy.STEPS, 3, [0, 3, 6, 7]),
        (EvalStrategy.STEPS, 7, [0, 7]),
        (EvalStrategy.EPOCH, 2, [0, 3, 6, 7]),
    ],
)
def test_the_first_and_last_weights_are_evaluated_and_some_between(
    train_spec: TrainSpec, strategy: EvalStrategy, eval_steps: int, expected: list[int]
) -> None:
    train = replace(
        train_spec,
        num_samples=9,
        batch_size=4,
        micro_batch_size=2,
        num_steps=7,
        num_eval_samples=1,
        eval_strategy=strategy,
        eval_steps=eval_steps,
    )
    assert [step for step in range(8) if evaluates_at(train, StepNumber(step))] == expected
    assert num_evaluations(train) == len(expected)
    nothing = replace(train, num_eval_samples=0)
    assert not any(evaluates_at(nothing, StepNumber(step)) for step in range(8))


@given(
    num_eval_samples=st.integers(1, 90),
    micro_batch_size=st.sampled_from([1, 2, 3, 40]),
    compression=st.sampled_from(EvalCompression),
    first=st.integers(0, 9),
)
@settings(derandomize=True, deadline=None)
def test_each_pass_has_every_held_out_sample_once(
    train_spec: TrainSpec,
    num_eval_samples: int,
    micro_batch_size: int,
    compression: EvalCompression,
    first: int,
) -> None:
    train = replace(
        train_spec,
        batch_size=micro_batch_size,
        micro_batch_size=micro_batch_size,
        num_eval_samples=num_eval_samples,
        eval_compression=compression,
    )
    batches = evaluation_microbatches(train, first)
    assert [batch.index for batch in batches] == list(range(first, first + len(batches)))
    samples = [sample for batch in batches for sample in batch.samples]
    stop = train.num_samples + len(train.eval_passes) * num_eval_samples
    assert samples == list(range(train.num_samples, stop))
    assert max(len(batch.samples) for batch in batches) <= min(micro_batch_size, MAX_EVAL_BATCH)
    for batch in batches:
        assert len({train.pass_of(sample) for sample in batch.samples}) == 1
