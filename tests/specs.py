"""RunSpecs for tests that care about little of them; they name what they care about."""

from typing import Any

from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainOptions, TrainSpec


def model_spec(*, num_blocks: int = 4, **changes: Any) -> ModelSpec:
    """A GPT-2 whose digests nothing stands behind."""
    fields: dict[str, Any] = {
        "reference": "a-model",
        "architecture": "gpt2",
        "num_blocks": num_blocks,
        "hidden_size": 8,
        "vocab_size": 32,
        "block_bytes": 1000,
        "embed_digest": bytes(16),
        "block_digests": tuple(bytes([i % 256]) * 16 for i in range(num_blocks)),
        "head_digest": b"h" * 16,
        "tied_embeddings": False,
        "nonce": bytes(16),
    }
    return ModelSpec(**fields | changes)


_DEFAULTS = TrainOptions()
USUAL_CODECS: dict[str, Any] = {
    "forward_codec": _DEFAULTS.forward_codec,
    "backward_codec": _DEFAULTS.backward_codec,
    "key_codec": _DEFAULTS.key_codec,
}
"""Beside which a quality can be asked for."""


def train_spec(**changes: Any) -> TrainSpec:
    """Six samples of five tokens, four in a batch, compressed both ways."""
    fields: dict[str, Any] = {
        "num_samples": 6,
        "seq_length": 5,
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_steps": 3,
        "learning_rate": 0.5,
        "lr_schedule": LrSchedule.LINEAR,
        "seed": 0,
        "forward_codec": "aq4",
        "backward_codec": "q8",
        "key_codec": "fp16",
    }
    return TrainSpec(**fields | changes)


def run_spec(*, num_blocks: int = 4, **train: Any) -> RunSpec:
    """Both together."""
    return RunSpec(model=model_spec(num_blocks=num_blocks), train=train_spec(**train))
