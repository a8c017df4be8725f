"""Options of a job: derived values and refusals, without a command line."""

import re
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.api.local_job import SAMPLE_LR
from swarm_ft.client.options import (
    EvalOptions,
    JobOptions,
    Outputs,
    PlanOptions,
    StoppingStrategy,
)
from swarm_ft.errors import BadCodec, BadInput, BadOption
from swarm_ft.protocol.spec.options import arguments, build, by_names, option_fields
from swarm_ft.protocol.spec.run_spec import EvalStrategy, LrSchedule, TrainOptions, TrainSpec

NAMED = {"model": "gpt2", "dataset": "notes.txt"}


def test_every_option_has_a_name_of_its_own() -> None:
    options = option_fields(JobOptions)
    assert len({one.field for one in options}) == len({one.flag for one in options}) == len(options)


def test_a_model_and_a_text_are_enough() -> None:
    assert build(JobOptions, NAMED) == JobOptions(model="gpt2", dataset="notes.txt")


def test_values_reach_the_part_that_declares_them() -> None:
    values = {
        "learning_rate": 1e-3,
        "lr_schedule": LrSchedule.COSINE,
        "max_eval_samples": 5,
        "json_file": Path("report.json"),
        "steps": None,
        "resume": True,
    }
    assert build(JobOptions, NAMED | values) == JobOptions(
        model="gpt2",
        dataset="notes.txt",
        evaluation=EvalOptions(max_eval_samples=5),
        train=TrainOptions(learning_rate=1e-3, lr_schedule=LrSchedule.COSINE),
        resume=True,
        outputs=Outputs(json_file=Path("report.json")),
    )


@pytest.mark.parametrize(
    ("values", "num_samples", "num_steps"),
    [
        ({}, 8, 3),
        ({}, 9, 6),
        ({"epochs": 1}, 17, 3),
        ({"epochs": 1, "batch_size": 4}, 17, 5),
        ({"epochs": 2, "steps": 7}, 100, 7),
    ],
)
def test_steps_win_over_epochs(values: dict[str, object], num_samples: int, num_steps: int) -> None:
    options = build(JobOptions, NAMED | values)
    spec = options.train_spec(num_samples)
    assert spec == TrainSpec.of(options.train, num_samples=num_samples, num_steps=num_steps)


@pytest.mark.parametrize(
    ("values", "resolved"),
    [
        # 100 samples of 8 a step: 13 steps in an epoch, 39 in all
        ({"warmup_ratio": 0.1}, {"warmup_steps": 4}),
        ({"warmup_ratio": 1.0, "epochs": 1}, {"warmup_steps": 13}),
        ({"warmup_ratio": 0.1, "steps": 100}, {"warmup_steps": 10}),
        ({"evals_per_epoch": 4, "saves_per_epoch": 2}, {"eval_steps": 4, "save_steps": 7}),
        ({"evals_per_epoch": 1000}, {"eval_steps": 1}),
    ],
)
def test_shares_become_steps(values: dict[str, object], resolved: dict[str, int]) -> None:
    # rounded up, as transformers' TrainingArguments.get_warmup_steps does
    spec = build(JobOptions, NAMED | values).train_spec(100)
    assert {name: getattr(spec, name) for name in resolved} == resolved


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eval_size": 1.5}, "--eval-size: expected a share below 1 or a whole number"),
        ({"eval_size": -0.1}, "--eval-size: expected a finite number, 0 or more"),
        ({"eval_size": 0.1, "eval_split": "test"}, "expected it without --eval-split"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "expected it or --warmup-steps, got both"),
        ({"evals_per_epoch": 2, "eval_steps": 3}, "expected it or --eval-steps, got both"),
        ({"evals_per_epoch": 2, "eval_strategy": EvalStrategy.NO}, "--eval-strategy steps beside"),
        ({"saves_per_epoch": 2, "save_steps": 3}, "expected it or --save-steps, got both"),
    ],
)
def test_shares_that_contradict_others_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=re.escape(message)):
        build(JobOptions, NAMED | values)


def test_more_steps_than_a_run_can_have_are_refused() -> None:
    options = build(JobOptions, NAMED | {"epochs": 1 << 31, "batch_size": 2})
    with pytest.raises(BadOption, match="number of steps: expected 1 to"):
        options.train_spec(num_samples=3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "--epochs: expected 1 to"),
        ("steps", 0, "--steps: expected 1 to"),
        ("max_eval_samples", 0, "--max-eval-samples: expected 1 or more, got 0"),
        ("batch_size", 1 << 17, "--batch-size: expected 1 to 65536, got 131072"),
        ("batch_size", "8", "--batch-size: expected an integer, got '8'"),
        ("learning_rate", float("inf"), "--lr: expected a finite number, 0 to 1e+30, got inf"),
        ("lr_schedule", "linear", "--lr-schedule: expected constant, linear or cosine, got 'linea"),
        ("forward_codec", "q" * 41, "--fw: expected at most 40 bytes of UTF-8, got 41"),
        ("forward_codec", "ü" * 21, "--fw: expected at most 40 bytes of UTF-8, got 42"),
        ("forward_codec", "zip", "--fw: codec 'zip': expected a codec such as"),
        ("backward_codec", "aq4", "--bw: codec 'aq4': "),
        ("key_codec", "aq4", "--key: codec 'aq4': a key frame builds on nothing"),
        ("fill_codec", "zip", "--fill: codec 'zip': "),
        ("fill_codec", "q2", "--fill: expected a delta codec, such as aq2, like --fw aq3+z"),
        ("drain_codec", "q2+last", "--drain: expected a codec with the state of --bw"),
        ("dp_codec", "top10", "--dp: codec 'top10': expected none, fp16, bf16"),
    ],
)
def test_what_cannot_be_is_refused_by_the_options_name(
    field: str, value: object, message: str
) -> None:
    with pytest.raises(BadInput) as raised:
        build(JobOptions, NAMED | {field: value})
    assert isinstance(raised.value, BadOption | BadCodec)
    assert raised.value.message.startswith(message)


def test_the_learning_rates_that_help_tells_are_those_that_are_used() -> None:
    (lr,) = (one for one in option_fields(JobOptions) if one.flag == "--lr")
    rates = [float(number) for number in re.findall(r"\de-\d", lr.option.default)]
    assert rates == [TrainOptions().learning_rate, SAMPLE_LR]


@pytest.mark.parametrize(
    ("changes", "num_eval_samples"),
    [
        ({}, 256),
        ({"num_samples": 10}, 10),
        ({"num_eval_samples": 7}, 7),
        ({"train": TrainOptions(eval_strategy=EvalStrategy.NO)}, 0),
    ],
)
def test_a_plan_evaluates_as_a_job_would(changes: dict[str, Any], num_eval_samples: int) -> None:
    options = PlanOptions(model="gpt2", **changes)
    assert options.train_spec().num_eval_samples == num_eval_samples


def test_a_plans_numbers_are_bounded() -> None:
    with pytest.raises(BadOption, match="--num-eval-samples"):
        PlanOptions(model="gpt2", num_eval_samples=-1)


# ---- several datasets


def test_datasets_are_one_or_several() -> None:
    assert JobOptions(model="a", dataset="b").datasets == ("b",)
    assert build(JobOptions, by_names(JobOptions, {"model": "a", "dataset": "b"})).datasets == (
        "b",
    )
    several = JobOptions(model="a", dataset=("b", "c"), probabilities="0.7,0.3")
    assert (several.datasets, several.shares) == (("b", "c"), (0.7, 0.3))
    words = arguments(several)
    assert words[2:] == ["--dataset", "b", "--dataset", "c", "--probabilities", "0.7,0.3"]


@pytest.mark.parametrize("probabilities", ["0.7", "0.7,0.2", "1,0", "a,b", "0.5,0.3,0.2", "-1,2"])
def test_probabilities_that_are_none_are_refused(probabilities: str) -> None:
    options = JobOptions(model="a", dataset=("b", "c"), probabilities=probabilities)
    with pytest.raises(BadOption, match="--probabilities: expected 2 numbers above 0 that sum to"):
        _ = options.shares


def test_a_stopping_strategy_needs_probabilities() -> None:
    options = JobOptions(
        model="a", dataset=("b", "c"), stopping_strategy=StoppingStrategy.ALL_EXHAUSTED
    )
    with pytest.raises(BadOption, match="--stopping-strategy: expected --probabilities beside it"):
        _ = options.shares
