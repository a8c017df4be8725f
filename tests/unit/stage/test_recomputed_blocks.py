"""Gradient checkpointing keeps only a block's inputs, and changes no bit of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.run_spec import Adapter
from tests.unit.stage.conftest import MakePipeline

FLOAT = 4
RUNS: dict[str, dict[str, Any]] = {
    "all": {},
    "dropout": {"dropout": True},
    "lora": {"adapter": Adapter.LORA},
    "lora-dropout": {"adapter": Adapter.LORA, "dropout": True, "lora_dropout": 0.3},
    "some-blocks": {"train_layers": "1-3"},
    "4bit": {"adapter": Adapter.LORA, "load_in_4bit": True},
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
@pytest.mark.sampled(5)
def test_training_has_the_bits_of_blocks_that_are_computed_once(
    name: str, changes: dict[str, Any], make_pipeline: MakePipeline, samples: Tensor
) -> None:
    plain = make_pipeline(name, 2, **changes)
    again = make_pipeline(name, 2, gradient_checkpointing=True, **changes)
    assert again.train(samples) == plain.train(samples)
    assert again.grad_norms == plain.grad_norms
    assert again.digests() == plain.digests()


def test_training_in_bfloat16_has_its_bits_too(
    make_pipeline: MakePipeline, samples: Tensor
) -> None:
    plain, again = (
        make_pipeline("llama", 2, dtype=torch.bfloat16, gradient_checkpointing=recomputes)
        for recomputes in (False, True)
    )
    assert again.train(samples) == plain.train(samples)


@pytest.mark.parametrize("name", ["gpt2-tied", "llama"])
def test_a_microbatch_holds_its_blocks_inputs_alone(name: str, make_pipeline: MakePipeline) -> None:
    stage = make_pipeline(name, 2, gradient_checkpointing=True).stages[0]
    plain = make_pipeline(name, 2).stages[0]
    tokens = torch.ones(2, 12, dtype=torch.int64)
    for one in (plain, stage):
        one.begin_step(StepNumber(0), 22)
        output = one.forward(MicrobatchIndex(0), tokens)
        num_bytes = one.microbatch_bytes
        one.backward(MicrobatchIndex(0), torch.ones_like(output))
        assert one.microbatch_bytes == num_bytes  # nothing more is left for the weights' gradients
        one.weight_gradients(MicrobatchIndex(0))
    hidden = output.numel() * FLOAT
    # The inputs of two blocks, the output, and the tokens; what embeds them may save a bit.
    assert 3 * hidden <= stage.microbatch_bytes <= 5 * hidden
    assert stage.microbatch_bytes < plain.microbatch_bytes / 4
