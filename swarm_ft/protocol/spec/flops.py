"""Floating-point operations of stages, by a run's spec. Pure."""

from __future__ import annotations

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, RunSpec

FORWARD_PART = 1 / 3
"""Share of the forward among a forward, a backward and the weights' gradients, about equal."""


def block_flops(num_parameters: float, hidden_size: int, tokens: int, seq_length: int) -> float:
    """Return the operations of a block: two a weight and token forward, twice that backward.

    Args:
        num_parameters: Parameters of the block.
        hidden_size: Width of the block.
        tokens: Tokens of all samples.
        seq_length: Tokens of a sample, which attend to each other.
    """
    return tokens * (6.0 * num_parameters + 12.0 * seq_length * hidden_size)


def stage_flops(spec: RunSpec, layers: LayerRange) -> float:
    """Return the operations of one microbatch at a stage, forward and, where needed, backward."""
    return all_flops(spec, layers) * part_computed(spec, layers)


def part_computed(spec: RunSpec, layers: LayerRange) -> float:
    """Return the share of forward, backward and weights' gradients that a stage computes.

    Blocks with gradient checkpointing compute their forward twice.
    """
    trained = spec.trained_layers
    if not spec.gradients_cross(layers.stop):
        return FORWARD_PART
    has_weights = layers.start < trained.stop and not spec.train.adapts
    return (2 + has_weights + spec.train.gradient_checkpointing) / 3


def all_flops(spec: RunSpec, layers: LayerRange) -> float:
    """Return the operations of one microbatch if everything trains."""
    model, train = spec.model, spec.train
    tokens = train.micro_batch_size * train.seq_length
    weights = model.block_bytes / BYTES_PER_FLOAT
    flops = len(layers) * block_flops(weights, model.hidden_size, tokens, train.seq_length)
    if layers.stop == model.num_blocks:
        flops += 6.0 * tokens * model.hidden_size * num_outputs(spec)
    return flops


def num_outputs(spec: RunSpec) -> int:
    """Return the outputs of the head: classes, or tokens of the vocabulary."""
    return len(spec.train.labels) or spec.model.vocab_size
