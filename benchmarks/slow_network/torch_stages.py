"""The compute of a stage of torch.distributed.pipelining: a real model's share, or its time.

The real share is this project's own stage, so that both train the same model in the same way.
Shapes: B samples, T tokens, C channels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.slow_network.emulated import EmulatedStage, wait_out
from benchmarks.slow_network.torch_pipeline import StageJob
from benchmarks.slow_network.training import (
    CLIP_GRAD_NORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    random_tokens,
)
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.weights import StageWeights


@dataclass(frozen=True, kw_only=True)
class Training:
    """A stage's module and all that a step of it needs.

    Attributes:
        inputs: of the whole step, for the first stage.
        target: of the whole step, for the last.
        loss: of a microbatch; those of a step add up to its mean loss.
        weight_backward: makes what computes the weights' gradients of one microbatch, which the
            module's own backward pass then leaves out; None leaves the split to torch.
    """

    module: nn.Module
    inputs: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer_step: Callable[[], None]
    weight_backward: Callable[[], Callable[[], None]] | None = None


def emulated_training(job: StageJob) -> Training:
    """Make a stage that takes the work's time."""
    work = job.work
    is_last = job.rank == work.stages - 1
    dtype = torch.float32 if is_last else _dtype(job)
    module = EmulatedStage(work.forward_s, work.input_backward_s, dtype)

    def weight_backward() -> Callable[[], None]:
        return lambda: wait_out(time.monotonic(), work.weight_backward_s)

    return Training(
        module=module,
        inputs=torch.randn(work.batch_size, work.tokens, work.channels),
        target=torch.zeros(work.batch_size),
        loss=lambda output, _: output.mean() / work.num_microbatches,
        optimizer_step=module.zero_grad,
        weight_backward=weight_backward,
    )


def real_training(job: StageJob) -> Training:
    """Load a stage of the setting's model; it trains on tokens drawn at random.

    Raises:
        SwarmError: the model cannot be read, or has fewer blocks than there are stages.
    """
    work = job.work
    checkpoint = open_checkpoint(str(job.setting.model))
    spec = checkpoint.describe()
    layers = split_evenly(LayerRange(0, spec.num_blocks), work.stages)[job.rank]
    stage = StageModule(checkpoint.config, layers)
    stage.materialise(checkpoint.load(layers, spec), torch.device("cpu"))
    stage.eval()  # without dropout
    weights = StageWeights(stage, weight_decay=WEIGHT_DECAY)
    weights.linears.restore()  # torch's own backward passes
    tokens = random_tokens(work, spec.vocab_size)
    num_targets = work.batch_size * (work.tokens - 1)
    return Training(
        module=_RealStage(stage, _dtype(job)),
        inputs=tokens,
        target=tokens,
        loss=lambda hidden, target: stage.loss_sum(hidden, target) / num_targets,
        optimizer_step=partial(_optimizer_step, weights),
    )


class _RealStage(nn.Module):
    """A stage from tokens [B, T] or hidden [B, T, C] to hidden, cast for the way."""

    def __init__(self, stage: StageModule, dtype: torch.dtype) -> None:
        super().__init__()
        self._stage, self._dtype = stage, dtype

    def forward(self, x: Tensor) -> Tensor:
        hidden = self._stage(x if self._stage.is_first else x.float())
        return hidden if self._stage.is_last else hidden.to(self._dtype)


def _optimizer_step(weights: StageWeights) -> None:
    """Clip by the norm of the whole model's gradient and step AdamW."""
    squared = torch.tensor(weights.squared_grad_norm(), dtype=torch.float64)
    dist.all_reduce(squared)
    clip_factor = min(1.0, CLIP_GRAD_NORM / math.sqrt(squared.item()))
    weights.apply(clip_factor, LEARNING_RATE)


def _dtype(job: StageJob) -> torch.dtype:
    dtype = getattr(torch, job.setting.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"--dtype {job.setting.dtype}: torch has no such dtype")
    return dtype
