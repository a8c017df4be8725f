"""A stage that takes a stated time instead of computing; its tensors have the real shape.

Everything else of a peer is real: this takes the place of its engine alone (`stage.base.Engine`).
Tensors have the statistics that matter to codecs: values are normal, tokens differ in
scale, and a sample's activation moves by `CHANGE` of its spread from one visit to the next, along
directions of which a quarter of as many as there are channels have nine tenths of the energy
(benchmarks/reports/quality.md). What an activation was foretells nothing of the change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.slow_network.work import Work
from swarm_ft.errors import BadModel, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.sample_rows import NO_LABEL
from swarm_ft.stage.base import Lengths, LossAndCounts, LossAndGradient, Text

CHANGE = 0.3
"""Of an activation between two visits, relative to its spread."""
BROAD = 36
"""One of so many directions has half of the changes' energy."""
POOL = 5
"""Different tensors that outputs are made of; a prime, so that samples and steps mix."""
STATE_BYTES_PER_VALUE = 16
"""Weight, gradient and two moments in float32."""
LOSS = 1.0
"""Of every target; there is nothing to be learned here."""


class EmulatedEngine:
    """See the module's docstring, and `Engine` for what its methods are for.

    Args:
        work: seconds of each pass, as they are to be waited for.
    """

    has_backward = True

    def __init__(self, work: Work, spec: RunSpec, layers: LayerRange) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.model.num_blocks
        self.sends_gradients = not self.is_first
        self.num_values = work.stage_values
        self.state_bytes = STATE_BYTES_PER_VALUE * work.stage_values
        self.microbatch_bytes = work.held_bytes
        self._work = work
        self._shape = (spec.train.seq_length, spec.model.hidden_size)
        self._step = StepNumber(-1)
        self._idle = threading.Event()

    def load(self) -> None:
        """Draw the tensors that outputs are made of, and the gradient."""
        generator = torch.Generator().manual_seed(self.layers.start)
        scales = torch.rand(self._shape[0], 1, generator=generator) + 0.5
        self._pool = [scales * torch.randn(self._shape, generator=generator) for _ in range(POOL)]
        along = _directions(self._shape[1], generator)
        self._changes = [scales * _moved(self._shape, along, generator) for _ in range(POOL)]
        self._gradient = torch.randn(self.num_values, generator=generator)

    # ---- a step

    def begin_step(self, step: StepNumber, num_targets: int) -> None:
        """See `Engine`."""
        self._step = step

    def resume_step(
        self, step: StepNumber, counted: frozenset[MicrobatchIndex], gradient: Tensor | None
    ) -> None:
        """Nobody dies in a benchmark.

        Raises:
            OutOfTurn: always.
        """
        raise OutOfTurn(f"step {step}: an emulated stage keeps nothing to go on from")

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        """See `Engine`."""
        return self._after(self._work.forward_s, microbatch, len(x))

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        """See `Engine`."""
        seconds = self._work.forward_s + self._work.input_backward_s
        gradient = self._after(seconds, microbatch, len(x))
        num_targets = int((labels[:, 1:] != NO_LABEL).sum())
        return LossAndGradient(
            loss_sum=LOSS * num_targets, input_gradient=None if self.is_first else gradient
        )

    def infer(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """See `Engine`."""
        return self._after(self._work.forward_s, MicrobatchIndex(0), len(x))

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """See `Engine`."""
        self._after(self._work.forward_s, MicrobatchIndex(0), len(x))
        return LossAndCounts(loss_sum=LOSS * float((labels[:, 1:] != NO_LABEL).sum()))

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        """See `Engine`."""
        result = self._after(self._work.input_backward_s, microbatch, len(gradient))
        return None if self.is_first else result

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """See `Engine`."""
        self._wait_until(time.monotonic() + self._work.weight_backward_s)

    def squared_grad_norm(self) -> float:
        """Less than what is clipped."""
        return 0.0

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """Do nothing: no published figure includes the optimizer's time."""

    # ---- between replicas

    def flat_gradient(self) -> Tensor:
        """Return normal values, float32 [n]."""
        return self._gradient

    def take_sum(self, total: Tensor) -> None:
        """Nothing follows from it."""

    def apply_sum(
        self, step: StepNumber, total: Tensor, clip_factor: float, learning_rate: float
    ) -> None:
        """Nothing follows from it."""

    def shared_gradient(self) -> Tensor:
        """There is none."""
        return torch.zeros(0)

    def set_shared_gradient(self, total: Tensor) -> None:
        """See `shared_gradient`."""

    # ---- the end

    def export(self) -> Iterator[bytes]:
        """Return an empty file in place of the trained stage."""
        return iter(())

    def begin_text(self, max_tokens: int) -> Text:
        """Refuse: an emulated stage generates no text."""
        raise BadModel("an emulated stage has no weights")

    def state(self) -> dict[str, Tensor]:
        """Nothing is learned."""
        return {}

    def state_names(self) -> frozenset[str]:
        """See `state`."""
        return frozenset()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `state`."""

    def _after(self, wait_s: float, microbatch: int, num_samples: int) -> Tensor:
        """Return a tensor for a microbatch, [B, T, C], after `wait_s` from now."""
        end_s = time.monotonic() + wait_s
        first = self._pool[microbatch % POOL]
        change = self._changes[(microbatch + self._step + 1) % POOL]
        value = torch.add(first, change, alpha=CHANGE / 2**0.5)
        self._wait_until(end_s)
        return value.expand(num_samples, *self._shape)

    def _wait_until(self, end_s: float) -> None:
        while (left_s := end_s - time.monotonic()) > 0:
            self._idle.wait(left_s)


def _directions(channels: int, generator: torch.Generator) -> Tensor:
    """Orthogonal rows, [channels, channels], as long as values along them spread."""
    drawn = torch.randn(channels, channels, generator=generator)
    energies = (1 + torch.arange(channels) * (BROAD / channels)) ** -2.0
    lengths = (energies * channels / energies.sum()).sqrt()
    rows: Tensor = torch.linalg.qr(drawn)[0] * lengths[:, None]
    return rows


def _moved(shape: tuple[int, int], along: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal values along the directions; their mean square is 1."""
    return torch.randn(shape, generator=generator) @ along
