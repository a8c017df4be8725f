"""A sample has the result of its own length, whatever travels beside it and whatever came before.

Sources: QwenLM/Qwen#401, lablup/mlxcel#1358 and unslothai/unsloth#10681: transformers takes the
frequencies of longrope and dynamic NTK from the longest sample of a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
)

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.sample_rows import Words, pad_rows, samples_in, words_of
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.unit.stage.conftest import (
    VOCAB_SIZE,
    MakeTrainSpec,
    Pipeline,
    received,
    save_random_model,
)

SEQ_LENGTH = 24
LIMIT = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": LIMIT,
    "rope_theta": 10000.0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
CONFIGS: dict[str, PretrainedConfig] = {
    "phi3, longrope": Phi3Config(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=LIMIT,
        rope_parameters=LONGROPE | {"factor": 8.0},
    ),
    "phimoe, longrope": PhimoeConfig(
        **SIZES,
        max_position_embeddings=64,
        original_max_position_embeddings=LIMIT,
        num_local_experts=2,
        rope_parameters=LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.2, "factor": 8.0},
    ),
    "llama, dynamic": LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters=DYNAMIC),
    "gemma3, dynamic in one type of layer": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        max_position_embeddings=LIMIT,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=6,
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
LENGTHS = (20, 3, 14, LIMIT, 23, 5, LIMIT + 1, 14)
"""Of samples: several of each kind, next to each other in no order."""


def rows() -> Words:
    rng = np.random.default_rng(5)
    ids = (rng.integers(1, VOCAB_SIZE, length) for length in LENGTHS)
    return np.concatenate([pad_rows(words_of(one), SEQ_LENGTH) for one in ids])


def pipeline_of(source: Path, make_train_spec: MakeTrainSpec, **changes: Any) -> Pipeline:
    fields = {"seq_length": SEQ_LENGTH, "num_samples": len(LENGTHS), "batch_size": len(LENGTHS)}
    train = make_train_spec(**fields, **changes)
    return Pipeline(open_checkpoint(str(source)), train, 2, torch.float32)


def loss_sum(pipeline: Pipeline, own: Words) -> float:
    samples = samples_in(own)
    x, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
    lengths = samples.lengths.tolist()
    first, last = pipeline.stages
    return last.evaluate(received(first.infer(x, lengths), samples), labels, lengths).loss_sum


def alone_in_transformers(source: Path, row: Words) -> float:
    """The loss of one sample by a model that has seen no other."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.from_numpy(samples_in(row[None]).token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    return cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


@pytest.fixture(scope="module", params=CONFIGS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(CONFIGS[request.param], tmp_path_factory.mktemp("model"))


@pytest.mark.sampled(3)
def test_losses_are_those_of_transformers_one_sample_at_a_time(
    make_train_spec: MakeTrainSpec, source: Path
) -> None:
    own = rows()
    expected = [alone_in_transformers(source, row) for row in own]
    pipeline = pipeline_of(source, make_train_spec)
    for size in (1, 2, 4, 8):
        parts = [own[at : at + size] for at in range(0, len(own), size)]
        sums = [sum(expected[at : at + size]) for at in range(0, len(own), size)]
        assert [loss_sum(pipeline, part) for part in parts] == pytest.approx(sums, rel=1e-5)
    # The order is no matter either: transformers remembers the longest of dynamic NTK.
    backwards = [loss_sum(pipeline, row[None]) for row in own[::-1]]
    assert backwards == pytest.approx(expected[::-1], rel=1e-5)


@pytest.mark.sampled(3)
def test_gradients_are_those_of_one_sample_at_a_time(
    make_train_spec: MakeTrainSpec, source: Path
) -> None:
    own, found = rows(), []
    for size, recomputes in ((1, False), (4, False), (4, True)):
        pipeline = pipeline_of(
            source, make_train_spec, micro_batch_size=size, gradient_checkpointing=recomputes
        )
        for stage in pipeline.stages:
            stage.begin_step(StepNumber(0), sum(LENGTHS) - len(LENGTHS))
        for number, at in enumerate(range(0, len(own), size)):
            pipeline.ragged(MicrobatchIndex(number), own[at : at + size])
        found.append([stage.weights.flat_gradient().clone() for stage in pipeline.stages])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            assert float((one - same).norm() / one.norm()) < 1e-4
