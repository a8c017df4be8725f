"""One model and one training spec for all tests of the protocol; tests replace what they vary."""

from __future__ import annotations

import pytest

from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec


@pytest.fixture(scope="session")
def model_spec() -> ModelSpec:
    return ModelSpec(
        reference="gpt2",
        architecture="gpt2",
        num_blocks=3,
        hidden_size=64,
        vocab_size=1000,
        block_bytes=200_000,
        embed_digest=b"e" * 16,
        block_digests=(b"0" * 16, b"1" * 16, b"2" * 16),
        head_digest=b"h" * 16,
        nonce=bytes(16),
        tied_embeddings=True,
    )


@pytest.fixture(scope="session")
def train_spec() -> TrainSpec:
    return TrainSpec(
        num_samples=10,
        seq_length=128,
        batch_size=4,
        micro_batch_size=2,
        num_steps=9,
        learning_rate=1e-3,
        lr_schedule=LrSchedule.LINEAR,
        warmup_steps=2,
        weight_decay=0.01,
        seed=0,
        shuffle=True,
        forward_codec="aq4",
        backward_codec="q8",
        key_codec="fp16",
    )


@pytest.fixture(scope="session")
def run_spec(model_spec: ModelSpec, train_spec: TrainSpec) -> RunSpec:
    return RunSpec(model=model_spec, train=train_spec)
