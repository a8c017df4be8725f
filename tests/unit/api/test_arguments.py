"""Each argument of the installed transformers and trl has a decision, and the decision holds."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

from swarm_ft import SwarmConfig
from swarm_ft.api.arguments import (
    DECISIONS,
    FORMER,
    MODEL_INIT,
    TRAINER,
    Honoured,
    Ignored,
    Refused,
)
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import build, by_names, option_fields

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import TrainingArguments
    from trl.trainer.sft_config import SFTConfig

OF_TRL = {one.name: one.default for one in fields(SFTConfig)}
OF_TRANSFORMERS = {one.name: one.default for one in fields(TrainingArguments)}


def job_of(config: SwarmConfig) -> JobOptions:
    return build(
        JobOptions, by_names(JobOptions, {"model": "a", "dataset": "b"} | config.keywords())
    )


def of_libraries(**arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SFTConfig(bf16=False, report_to="none", **arguments)


TEXTS = {"output_dir", "logging_dir", "metric_for_best_model", "dataset_text_field", "report_to"}
"""Arguments that any text is a value of, as far as is known before a run."""

# ---- the table is whole


def test_every_argument_of_the_installed_libraries_is_decided() -> None:
    names = OF_TRL.keys() | OF_TRANSFORMERS.keys()
    undecided = names - TRAINER.keys()
    assert not undecided, f"decide on {sorted(undecided)} in swarm_ft/api/arguments.py"
    assert TRAINER.keys() - names == FORMER.keys(), "names that the libraries have no longer"


def test_every_option_that_is_set_is_an_option() -> None:
    options = {one.field for one in option_fields(JobOptions)}
    for name, decision in DECISIONS.items():
        if isinstance(decision, Honoured):
            assert not decision.option or decision.option in options, name


@pytest.mark.parametrize("name", sorted(TRAINER))
def test_every_argument_is_read_or_refused_with_a_reason(name: str) -> None:
    decision = TRAINER[name]
    arguments: Any = {name: "odd"}
    config = SwarmConfig(**arguments)
    if isinstance(decision, Ignored):
        assert "odd" not in str(config.keywords())
        assert any(name in note for note in config.notes())
        return
    if name in ("hub_model_id", "push_to_hub"):  # together they name the repository
        return
    if isinstance(decision, Honoured) and name in TEXTS:
        assert "odd" in str(config.keywords())
        return
    with pytest.raises(BadOption, match=f"^SwarmConfig: {name}: ") as refused:
        config.keywords()
    assert "there is no such" not in refused.value.message


REFUSING = [name for name, one in TRAINER.items() if isinstance(one, Refused)]


def test_all_that_is_refused_is_in_one_message_with_its_reasons() -> None:
    arguments: Any = dict.fromkeys(REFUSING, "odd")
    config = SwarmConfig(**arguments)
    with pytest.raises(BadOption) as refused:
        config.keywords()
    message = refused.value.message
    assert message.startswith(f"SwarmConfig: {len(REFUSING)} arguments cannot be used: (1) ")
    for name in REFUSING:
        decision = TRAINER[name]
        assert isinstance(decision, Refused)
        assert f"{name}: {decision.reason or 'expected '}" in message


# ---- what libraries mean is what a job does


def test_a_config_of_trl_is_taken_as_it_is(tmp_path: Path) -> None:
    theirs = of_libraries(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        max_length=256,
        eval_strategy="epoch",
        logging_steps=1,
        packing=True,
    )
    config = SwarmConfig(**theirs.to_dict())
    job = job_of(config)
    assert (job.train.batch_size, job.train.micro_batch_size) == (8, 4)
    assert (job.epochs, job.warmup_ratio, job.train.seq_length) == (3, 0.1, 256)
    assert (job.train.learning_rate, job.train.seed) == (theirs.learning_rate, theirs.seed)
    assert job.train.gradient_checkpointing is theirs.gradient_checkpointing is True
    assert (job.train.shuffle, job.reading.packing) == (True, True)
    assert job.outputs.out == tmp_path / "out"
    assert config.notes() == (
        "logging_steps, accelerator_config, do_eval: no effect on the result here",
    )


@pytest.mark.parametrize("of", [OF_TRL, OF_TRANSFORMERS], ids=["trl", "transformers"])
def test_every_default_of_the_libraries_is_taken(of: dict[str, Any]) -> None:
    for name, default in of.items():
        if default not in (MISSING, None):
            arguments: Any = {name: default}
            SwarmConfig(**arguments).keywords()


@pytest.mark.parametrize("warmup", [0, 7, 0.1, 0.03, 0.5])
@pytest.mark.parametrize("max_steps", [-1, 50])
def test_a_warm_up_has_the_steps_of_transformers(warmup: float, max_steps: int) -> None:
    batches = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    shared: dict[str, Any] = {"warmup_steps": warmup, "max_steps": max_steps, **batches}
    spec = job_of(SwarmConfig(num_train_epochs=2, **shared)).train_spec(num_samples=200)
    assert spec.num_steps == (max_steps if max_steps > 0 else 2 * -(-200 // 15))
    theirs = of_libraries(output_dir="out", num_train_epochs=2, **shared)
    assert spec.warmup_steps == theirs.get_warmup_steps(spec.num_steps)


def test_former_names_still_count() -> None:
    job = job_of(
        SwarmConfig(
            max_seq_length=64,
            evaluation_strategy="epoch",
            activation_checkpointing=True,
            warmup_ratio=0.1,
        )
    )
    train = job.train
    assert (train.seq_length, train.eval_strategy.name) == (64, "EPOCH")
    assert (train.gradient_checkpointing, job.warmup_ratio) == (True, 0.1)
    with pytest.raises(BadOption, match="expected one seq_length, got"):
        SwarmConfig(max_seq_length=64, max_length=128).keywords()


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "label smoothing": (
        {"label_smoothing_factor": 0.1},
        "label_smoothing_factor: the loss has no label smoothing",
    ),
    "deepspeed": ({"deepspeed": "zero3.json"}, "the swarm partitions the model itself"),
    "beta": ({"adam_beta2": 0.95}, "adam_beta2: expected 0.999, got 0.95"),
    "template": ({"chat_template_path": "x.jinja"}, "put another one beside the model"),
    "half an epoch": ({"num_train_epochs": 0.5}, "expected a whole number, got 0.5"),
    "constant": (
        {"lr_scheduler_type": "constant", "warmup_steps": 5},
        "lr_scheduler_type: expected constant_with_warmup, since constant has no warmup",
    ),
    "seeds": ({"seed": 1, "data_seed": 2}, "data_seed: expected 1, since a run has one seed"),
    "order": ({"train_sampling_strategy": "group_by_length"}, "expected random or sequential"),
    "metric": ({"greater_is_better": True}, "expected False of metric_for_best_model loss"),
    "dft": ({"loss_type": "dft"}, "negative log-likelihood"),
    "code": ({"model_init_kwargs": {"trust_remote_code": True}}, "never runs code of a model"),
    "inner typo": ({"model_init_kwargs": {"atn_implementation": "sdpa"}}, "did you mean 'attn"),
    "optimizer": ({"optim": "lion_8bit"}, "optim: expected adamw, adafactor, sgd or adamw-8bit"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_a_swarm_has_nothing_for_are_refused_in_words(name: str) -> None:
    arguments, words = ARGUMENTS[name]
    with pytest.raises(BadOption) as refused:
        SwarmConfig(**arguments).keywords()
    assert words in refused.value.message


def test_arguments_of_models_are_read_too() -> None:
    config = SwarmConfig(
        model_init_kwargs={"attn_implementation": "flash_attention_2", "torch_dtype": "bfloat16"}
    )
    plain, dtype = config.notes()
    assert plain.startswith("model_init_kwargs: attn_implementation: no effect")
    assert dtype.startswith("model_init_kwargs: torch_dtype: no effect here; weights train in")
    assert all(isinstance(one, Ignored | Refused) for one in MODEL_INIT.values())


def test_a_repository_is_named_as_a_trainer_names_it() -> None:
    assert SwarmConfig(push_to_hub=True, output_dir="a/tuned").keywords()["push_to_hub"] == "tuned"
    named = SwarmConfig(push_to_hub=True, hub_model_id="me/it")
    assert named.keywords()["push_to_hub"] == "me/it"
    assert "push_to_hub" not in SwarmConfig(hub_model_id="me/it").keywords()


# ---- as an object


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadOption, match="learning_rat: no such argument; did you mean 'l"):
        SwarmConfig(learning_rat=1e-4)  # type: ignore[call-arg]
    with pytest.raises(BadOption, match=r"forward_codec: .*expected options of a job in swarm="):
        SwarmConfig(forward_codec="aq2")  # type: ignore[call-arg]
    config = SwarmConfig()
    with pytest.raises(BadOption, match="did you mean 'logging_steps'"):
        config.logging_step = 1
    with pytest.raises(AttributeError, match="no attribute 'logging_steps'"):
        config.logging_steps  # noqa: B018


def test_arguments_may_be_set_and_read_later() -> None:
    config = SwarmConfig(logging_steps=10)
    config.learning_rate, config.weight_decay = 1e-4, 0.1
    config.label_smoothing_factor = 0.1
    assert (config.logging_steps, config.label_smoothing_factor) == (10, 0.1)
    for one in (config, replace(config, seed=3)):
        with pytest.raises(BadOption, match="label_smoothing_factor: "):
            one.keywords()
    config.label_smoothing_factor = 0.0
    assert config.keywords()["learning_rate"] == 1e-4
    assert replace(config, seed=3) == replace(config, seed=3)
    assert replace(config, seed=3).keywords()["seed"] == 3
