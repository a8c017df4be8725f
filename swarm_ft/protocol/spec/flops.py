"""How much stages compute, in floating-point operations, by what a run says of itself. Pure."""

from __future__ import annotations

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, RunSpec

FORWARD_PART = 1 / 3
"""Of a forward, a backward and the weights' gradients, which are about equal."""


def block_flops(num_parameters: float, hidden_size: int, tokens: int, seq_length: int) -> float:
    """Of a block's forward and backward pass: two a weight and token there, twice that back.

    Args:
        num_parameters: of the block.
        hidden_size: its width.
        tokens: that pass, in all samples.
        seq_length: tokens of a sample, that attend to each other.
    """
    return tokens * (6.0 * num_parameters + 12.0 * seq_length * hidden_size)


def stage_flops(spec: RunSpec, layers: LayerRange) -> float:
    """Of one microbatch at a stage, there and, where somebody waits for it, back."""
    return all_flops(spec, layers) * part_computed(spec, layers)


def part_computed(spec: RunSpec, layers: LayerRange) -> float:
    """Of forward, backward and weights' gradients, about equal, those that a stage computes.

    Blocks whose inputs alone are kept have their forward twice.
    """
    trained = spec.trained_layers
    if not spec.gradients_cross(layers.stop):
        return FORWARD_PART
    has_weights = layers.start < trained.stop and not spec.train.adapts
    return (2 + has_weights + spec.train.gradient_checkpointing) / 3


def all_flops(spec: RunSpec, layers: LayerRange) -> float:
    """Of one microbatch, were everything trained."""
    model, train = spec.model, spec.train
    tokens = train.micro_batch_size * train.seq_length
    weights = model.block_bytes / BYTES_PER_FLOAT
    flops = len(layers) * block_flops(weights, model.hidden_size, tokens, train.seq_length)
    if layers.stop == model.num_blocks:
        flops += 6.0 * tokens * model.hidden_size * num_outputs(spec)
    return flops


def num_outputs(spec: RunSpec) -> int:
    """Of the head: classes, or tokens of the vocabulary."""
    return len(spec.train.labels) or spec.model.vocab_size
