"""An engine that takes its time, so that how fast peers are does not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from swarm_ft.ids import MicrobatchIndex
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.base import Lengths, LossAndGradient
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine

Pace = Callable[[], float]
"""Seconds that each block takes of a forward, a backward, or the gradients of weights."""


class PacedEngine(StageEngine):
    """It sleeps by its pace, and computes besides."""

    pace: Pace

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        self._pause()
        return super().forward(microbatch, x, lengths)

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        self._pause(2)
        return super().forward_backward(microbatch, x, labels, lengths)

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        self._pause()
        return super().backward(microbatch, gradient)

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        self._pause()
        super().weight_gradients(microbatch)

    def _pause(self, parts: int = 1) -> None:
        time.sleep(parts * self.pace() * len(self.layers))


def paced(pace: Pace) -> Callable[[RunSpec, LayerRange], PacedEngine]:
    """Engines of one peer."""

    def make(spec: RunSpec, layers: LayerRange) -> PacedEngine:
        checkpoint = open_checkpoint(spec.model.reference, spec.train)
        cpu = torch.device("cpu")
        engine = PacedEngine(checkpoint, spec, layers, device=cpu, dtype=torch.float32)
        engine.pace = pace
        return engine

    return make
