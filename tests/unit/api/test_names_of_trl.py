"""A name that is TRL's has TRL's default, or a reason why it has not."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import pytest

from swarm_ft import SwarmConfig
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadOption

OTHERWISE = {
    "per_device_train_batch_size": "2 x 4 samples a step are TRL's 8; several travel in a pipeline",
    "gradient_accumulation_steps": "see per_device_train_batch_size",
    "gradient_checkpointing": "no effect on the result; each volunteer has one stage alone",
    "dataset_text_field": "None finds the column out; 'text' is taken where there is one",
    "eval_strategy": "the swarm evaluates before and after the training by itself",
    "save_steps": "0 lets the swarm choose when a step is written",
    "save_total_limit": "volunteers' disks are small",
    "metric_for_best_model": "None is the loss in transformers too",
    "hub_private_repo": "nothing becomes public unasked",
    "optim": "both are AdamW; fused is a matter of the device",
    "output_dir": "TRL has none that one could use",
}
"""Fields of `SwarmConfig` whose default is not `SFTConfig`'s; docs/how-to/python.md has them."""


@pytest.fixture(scope="module")
def of_trl() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.sft_config import SFTConfig
    return {field.name: field.default for field in fields(SFTConfig)}


def test_defaults_are_those_of_trl(of_trl: dict[str, Any]) -> None:
    ours: dict[str, Any] = {
        field.name: field.default for field in fields(SwarmConfig) if field.name in of_trl
    }
    assert {name for name, value in ours.items() if value != of_trl[name]} == set(OTHERWISE)
    assert (ours["max_length"], ours["packing"], ours["packing_strategy"]) == (1024, False, "bfd")
    step = ours["per_device_train_batch_size"] * ours["gradient_accumulation_steps"]
    assert step == of_trl["per_device_train_batch_size"] * of_trl["gradient_accumulation_steps"]


def test_options_of_the_command_that_have_names_of_trl_have_its_defaults(
    of_trl: dict[str, Any],
) -> None:
    ours = ReadOptions()
    assert ours.packing is of_trl["packing"]
    assert ours.packing_strategy.name.lower() == of_trl["packing_strategy"]
    assert ours.assistant_only_loss is of_trl["assistant_only_loss"]
    # None of TRL's is True where rows are a prompt and its completion, and nothing elsewhere.
    assert (ours.completion_only_loss, of_trl["completion_only_loss"]) == (True, None)


def test_a_length_without_bound_is_refused() -> None:
    with pytest.raises(BadOption, match="max_length: expected a number of tokens, got None"):
        SwarmConfig(max_length=None).keywords()
