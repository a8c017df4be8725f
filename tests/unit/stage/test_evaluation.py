"""Held-out samples through an engine: no dropout, no trace, the loss of the whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_ft.errors import MalformedMessage, NonFinite
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    MakeTrainSpec,
    Pipeline,
    save_random_model,
)


def tokens_of(seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(1, VOCAB_SIZE, (3, SEQ_LENGTH)))


def evaluated(pipeline: Pipeline, tokens: torch.Tensor) -> float:
    *upstream, last = pipeline.stages
    x = tokens
    for stage in upstream:
        x = stage.infer(x)
    return last.evaluate(x, tokens).loss_sum


@pytest.fixture(params=[False, True], ids=["", "gradient-checkpointing"])
def make_pipeline(
    request: pytest.FixtureRequest, tmp_path: Path, make_train_spec: MakeTrainSpec
) -> Pipeline:
    """Make a pipeline of three stages, which trains with dropout."""
    source = save_random_model(small_config("gpt2"), tmp_path / "source")
    train = make_train_spec(
        batch_size=3, micro_batch_size=3, dropout=True, gradient_checkpointing=request.param
    )
    return Pipeline(open_checkpoint(str(source)), train, 3, torch.float32)


def test_the_loss_is_the_whole_models_without_dropout(
    make_pipeline: Pipeline, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    tokens = tokens_of(1)
    with torch.no_grad():
        theirs = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    num_targets = len(tokens) * (SEQ_LENGTH - 1)
    assert evaluated(make_pipeline, tokens) / num_targets == pytest.approx(theirs, rel=1e-6)
    assert evaluated(make_pipeline, tokens) == evaluated(make_pipeline, tokens)


def test_an_evaluation_between_two_tasks_changes_no_bit_of_the_step(
    make_pipeline: Pipeline,
) -> None:
    pipeline, index = make_pipeline, MicrobatchIndex(0)
    seen = []
    for is_evaluated in (False, True):
        for stage in pipeline.stages:
            stage.begin_step(StepNumber(0), 3)
        *upstream, last = pipeline.stages
        x = tokens_of(2)
        for stage in upstream:
            x = stage.forward(index, x)
            if is_evaluated:
                evaluated(pipeline, tokens_of(3))
        gradient = last.forward_backward(index, x, tokens_of(2)).input_gradient
        for stage in reversed(upstream):
            if is_evaluated:
                evaluated(pipeline, tokens_of(4))
            assert gradient is not None
            gradient = stage.backward(index, gradient)
        for stage in pipeline.stages:
            stage.weight_gradients(index)
        seen.append([stage.flat_gradient() for stage in pipeline.stages])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def test_what_others_sent_is_checked(make_pipeline: Pipeline) -> None:
    first, middle, last = make_pipeline.stages
    with pytest.raises(MalformedMessage, match="tokens"):
        first.infer(tokens_of(1) + VOCAB_SIZE)
    hidden = first.infer(tokens_of(1))
    with pytest.raises(MalformedMessage, match="activation"):
        middle.infer(hidden[:, :, 1:])
    with pytest.raises(MalformedMessage):
        last.evaluate(hidden, tokens_of(1)[:1])
    with pytest.raises(NonFinite, match="evaluation"):
        middle.infer(hidden * torch.inf)
