"""Samples of different lengths, with prompts that are only read, train as transformers has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.sample_rows import Words, counts_of, pad_rows, samples_in, words_of
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    MakeTrainSpec,
    Pipeline,
    save_random_model,
)
from tests.unit.stage.test_families import ALL, OTHERS

# Attention, learned positions, a window, linear attention, a state space, no positions at all.
FAST = ("gpt2", "llama", "opt", "gemma3_text", "qwen3_next", "mamba", "bloom", "mixtral")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""In these, what pads a sample shares products with others: zeros in a stage, and not in the whole.
On most machines that changes no bit either."""
NO_SHIFT = ("trocr",)
"""Of a model that reads pictures: its labels are those of the token itself."""
LENGTHS = ((12, 5, 2), (7, 9, 3))


def rows_of(lengths: tuple[int, ...], seed: int) -> Words:
    """The first third of each is a prompt."""
    random = np.random.default_rng(seed)
    rows = [
        pad_rows(words_of(random.integers(1, VOCAB_SIZE, n), np.arange(n) >= n // 3), SEQ_LENGTH)
        for n in lengths
    ]
    return np.concatenate(rows)


BATCHES = [rows_of(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
NUM_TARGETS = sum(counts_of(rows).num_targets for rows in BATCHES)


@pytest.fixture(scope="module")
def train(make_train_spec: MakeTrainSpec) -> TrainSpec:
    return make_train_spec(batch_size=6, micro_batch_size=3)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else OTHERS) for name in ALL]
)
@pytest.mark.sampled(3)
def test_masked_samples_of_different_lengths_train_as_in_the_whole(
    tmp_path: Path, train: TrainSpec, family: str
) -> None:
    source = save_random_model(small_config(family), tmp_path / "source")
    losses, gradients = [], []
    for num_stages in (1, 3):
        pipeline = Pipeline(open_checkpoint(str(source)), train, num_stages, torch.float32)
        for stage in pipeline.stages:
            stage.begin_step(StepNumber(0), NUM_TARGETS)
        losses.append([pipeline.ragged(i, rows) for i, rows in enumerate(BATCHES)])
        gradients.append(torch.cat([stage.flat_gradient() for stage in pipeline.stages]))
    if any(getattr(small_config(family), name, None) for name in EXPERTS):
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    else:
        assert losses[1] == losses[0]
    if family not in NO_SHIFT:
        # It has logits of all tokens, and sums over them.
        theirs = _of_transformers(source)
        assert sum(losses[1]) / NUM_TARGETS == pytest.approx(theirs, rel=1e-6)
    norms = [float(one.double().norm()) for one in gradients]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def _of_transformers(source: Path) -> float:
    """The mean loss by transformers' own labels and masks."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    total = 0.0
    for rows in BATCHES:
        samples = samples_in(rows)
        lengths = torch.from_numpy(samples.lengths)
        mask = torch.arange(samples.token_ids.shape[1])[None] < lengths[:, None]
        result = model(
            input_ids=torch.from_numpy(samples.token_ids),
            attention_mask=mask.long(),
            labels=torch.from_numpy(samples.labels),
            num_items_in_batch=NUM_TARGETS,
            use_cache=False,
        )
        total += result.loss.item()
    return total


def test_what_pads_a_sample_reaches_nothing(tmp_path: Path, train: TrainSpec) -> None:
    """Neither what it holds nor that it is there changes a loss by a bit, or a gradient."""
    source = save_random_model(small_config("llama"), tmp_path / "source")
    seen = []
    for fill in (0, VOCAB_SIZE - 1):
        pipeline = Pipeline(open_checkpoint(str(source)), train, 1, torch.float32)
        (stage,) = pipeline.stages
        stage.begin_step(StepNumber(0), NUM_TARGETS)
        samples = samples_in(BATCHES[0])
        tokens, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
        for row, length in enumerate(samples.lengths):
            tokens[row, length:] = fill
        made = stage.forward_backward(MicrobatchIndex(0), tokens, labels)
        stage.weight_gradients(MicrobatchIndex(0))
        seen.append((made.loss_sum, stage.flat_gradient()))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])
