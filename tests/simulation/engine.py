"""A stage engine whose arithmetic is exact, so that one sample counted twice shows in the result.

Values are integers modulo MODULUS, sent as multiples of SCALE: a codec's error is rounded away,
so weights do not depend on where the model is cut nor on what was sent as key or as delta. Weights
follow from all they have seen, as a hash does. Entry [0, 0] of every activation and gradient is
the sample's id. To compute a microbatch's weights' gradients adds one to its samples' tallies,
which are part of the gradient. Frozen blocks keep their weights, and tally all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.errors import BadModel, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.base import Lengths, LossAndCounts, LossAndGradient, OpenStep, Text

MODULUS = 16
"""More samples than this cannot be told apart."""
SCALE = 16
"""Eight bits over SCALE * MODULUS values err by less than half of it."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Applied:
    """A step that an engine applied.

    Attributes:
        tallies: per block, how often each sample's gradient was in it.
        weights: per block, after the step.
    """

    engine: TinyEngine
    step: StepNumber
    tallies: Mapping[int, tuple[int, ...]]
    weights: Mapping[int, bytes]


class EngineWatcher(Protocol):
    """Sees what engines do."""

    def began(self, engine: TinyEngine, step: StepNumber) -> None:
        """A step begins, perhaps again; all before it are applied."""
        ...

    def applied(self, applied: Applied) -> None:
        """A step was applied."""
        ...

    def happened(self, what: str) -> None:
        """It computed something else: loaded, forward, backward, weights, exported."""
        ...


@dataclass(slots=True)
class _Block:
    """One block: C weights, their gradient, and how often each sample is in it."""

    weights: Ints
    gradient: Ints
    tally: Ints


_Step = OpenStep[list[Ints], list[tuple[Ints, Ints]]]
"""A forward leaves the input of each block, first to last; a backward leaves the input and the
gradient of the output of each, last to first."""


class TinyEngine:
    """See `stage.base.Engine`, which it is.

    Args:
        watcher: called at the begin and the application of every step.
        check_disk: raises OSError if the disk is full.
    """

    def __init__(
        self,
        spec: RunSpec,
        layers: LayerRange,
        *,
        watcher: EngineWatcher | None = None,
        check_disk: Callable[[], None] = lambda: None,
    ) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.model.num_blocks
        self.sends_gradients = spec.gradients_cross(layers.start)
        self.has_backward = spec.gradients_cross(layers.stop)
        self.spec = spec
        self._watcher = watcher
        self._check_disk = check_disk
        self._blocks: dict[int, _Block] = {}
        self._step: _Step | None = None
        self._microbatch_bytes = 0

    def load(self) -> None:
        """The weights that the run begins with."""
        channels, samples = self.spec.model.hidden_size, self.spec.train.num_samples
        for b in range(self.layers.start, self.layers.stop):
            weights = (np.arange(channels) * 7 + 3 * b + 1) % MODULUS
            zeros = np.zeros(channels, np.int64), np.zeros(samples, np.int64)
            self._blocks[b] = _Block(weights, *zeros)
        self._log("loaded")

    # ---- a step

    def begin_step(self, step: StepNumber, num_targets: int) -> None:
        """See `Engine`."""
        begun = _Step(step, num_targets)
        for block in self._loaded().values():
            block.gradient[:] = 0
            block.tally[:] = 0
        self._step = begun
        if self._watcher is not None:
            self._watcher.began(self, step)

    def resume_step(
        self, step: StepNumber, counted: frozenset[MicrobatchIndex], gradient: Tensor | None
    ) -> None:
        """See `Engine`."""
        self._current().resume(step, counted)
        if gradient is not None:
            self.take_sum(gradient)
        if self._watcher is not None:
            self._watcher.began(self, step)

    def forward(self, microbatch: MicrobatchIndex, x: Tensor, lengths: Lengths = None) -> Tensor:
        """See `Engine`."""
        output = self._forward(microbatch, x)
        if not self.has_backward:
            inputs = self._current().graphs.pop(microbatch)
            self._current().products[microbatch] = [_of_nothing(x) for x in reversed(inputs)]
        self._log("forward")
        return _sent(output)

    def forward_backward(
        self, microbatch: MicrobatchIndex, x: Tensor, labels: Tensor, lengths: Lengths = None
    ) -> LossAndGradient:
        """See `Engine`."""
        output = self._forward(microbatch, x)
        gradient = (output * 5 + labels.numpy()[..., None]) % MODULUS
        gradient[:, 0, 0] = output[:, 0, 0]
        back = self._backward(microbatch, gradient)
        self._log("backward")
        return LossAndGradient(
            loss_sum=float(output.sum()),
            input_gradient=_sent(back) if self.sends_gradients else None,
        )

    def infer(self, x: Tensor, lengths: Lengths = None) -> Tensor:
        """See `Engine`."""
        output = self._through(x)[0]
        self._log("evaluated")
        return _sent(output)

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """See `Engine`; the watcher receives the samples."""
        output = self._through(x)[0]
        self._log("evaluated")
        loss_sum = float(output[:, :, 1:].sum() + labels.numpy()[:, 1:].sum())
        return LossAndCounts(loss_sum=loss_sum)

    def backward(self, microbatch: MicrobatchIndex, gradient: Tensor) -> Tensor | None:
        """See `Engine`."""
        back = self._backward(microbatch, _received(gradient))
        self._log("backward")
        return _sent(back) if self.sends_gradients else None

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        """See `Engine`; the microbatch's samples are tallied."""
        left = self._current().count(microbatch)
        for block, (x, gradient) in zip(reversed(self._blocks.values()), left, strict=True):
            block.gradient += ((x + gradient) % MODULUS).sum(axis=(0, 1))
            np.add.at(block.tally, gradient[:, 0, 0] % len(block.tally), 1)
        self._log("weights")

    def squared_grad_norm(self) -> float:
        """See `Engine`."""
        self._current().check_complete()
        return float(sum((block.gradient**2).sum() for block in self._loaded().values()))

    def apply(self, clip_factor: float, learning_rate: float) -> None:
        """See `Engine`; both numbers go into the weights."""
        step = self._current()
        step.check_complete()
        salt = hashlib.blake2b(f"{clip_factor!r} {learning_rate!r}".encode()).digest()[0]
        for block in self._trained().values():
            block.weights = (block.weights * 3 + block.gradient + salt) % MODULUS
        self._step = None
        if self._watcher is not None:
            tallies = {b: tuple(block.tally.tolist()) for b, block in self._blocks.items()}
            self._watcher.applied(Applied(self, step.number, tallies, self.weights()))

    def apply_sum(
        self, step: StepNumber, total: Tensor, clip_factor: float, learning_rate: float
    ) -> None:
        """See `Engine`."""
        self.take_sum(total)
        self._step = _Step(step, num_targets=1)
        self.apply(clip_factor, learning_rate)

    # ---- what is exchanged, and the result

    @property
    def state_bytes(self) -> int:
        """See `Engine`."""
        return sum(b.weights.nbytes + b.gradient.nbytes for b in self._loaded().values())

    @property
    def microbatch_bytes(self) -> int:
        """See `Engine`."""
        return self._microbatch_bytes

    @property
    def num_values(self) -> int:
        """See `Engine`."""
        return sum(len(b.gradient) + len(b.tally) for b in self._loaded().values())

    def flat_gradient(self) -> Tensor:
        """See `Engine`; every block's gradient and tally."""
        self._current().check_complete()
        blocks = self._loaded().values()
        parts = [part for block in blocks for part in (block.gradient, block.tally)]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))

    def take_sum(self, total: Tensor) -> None:
        """See `Engine`."""
        values, at = np.rint(total.numpy()).astype(np.int64), 0
        for block in self._loaded().values():
            for part in (block.gradient, block.tally):
                part[:] = values[at : at + len(part)]
                at += len(part)

    def shared_gradient(self) -> Tensor:
        """See `Engine`.

        Raises:
            OutOfTurn: always; nothing is shared here.
        """
        raise OutOfTurn(f"layers {self.layers}: no weight here is held by other stages")

    def set_shared_gradient(self, total: Tensor) -> None:
        """See `Engine`.

        Raises:
            OutOfTurn: always; nothing is shared here.
        """
        raise OutOfTurn(f"layers {self.layers}: no weight here is held by other stages")

    def begin_text(self, max_tokens: int) -> Text:
        """Its values have no meaning."""
        raise BadModel(f"layers {self.layers}: an engine for steps alone has no texts")

    def state(self) -> dict[str, Tensor]:
        """See `Engine`."""
        blocks = self._trained().items()
        self._log("copied")
        return {f"block.{b}": torch.from_numpy(x.weights.astype(np.float32)) for b, x in blocks}

    def state_names(self) -> frozenset[str]:
        """See `Engine`."""
        return frozenset(f"block.{b}" for b in self._trained())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        for b, block in self._trained().items():
            block.weights = np.rint(state[f"block.{b}"].numpy()).astype(np.int64)
        self._step = None
        self._log("taken-over")

    def weights(self) -> dict[int, bytes]:
        """Every block's weights."""
        return {b: block.weights.tobytes() for b, block in self._loaded().items()}

    def export(self) -> Iterator[bytes]:
        """See `Engine`; the file holds the blocks' weights, first to last."""
        self._check_disk()
        self._log("exported")
        return iter(self.weights().values())

    def _log(self, what: str) -> None:
        if self._watcher is not None:
            self._watcher.happened(what)

    # ---- arithmetic

    def _forward(self, microbatch: MicrobatchIndex, x: Tensor) -> Ints:
        step = self._current()
        step.check_untouched(microbatch)
        value, inputs = self._through(x)
        step.graphs[microbatch] = inputs
        self._holds(inputs)
        return value

    def _through(self, x: Tensor) -> tuple[Ints, list[Ints]]:
        """The output of the last block, and the input of each."""
        value = _embedded(x, self.spec.model.hidden_size) if self.is_first else _received(x)
        inputs = []
        for b, block in self._loaded().items():
            inputs.append(value)
            value = _mixed(value * 3 + block.weights + b, value)
        return value, inputs

    def _backward(self, microbatch: MicrobatchIndex, gradient: Ints) -> Ints:
        step = self._current()
        inputs = step.graph_of(microbatch)
        del step.graphs[microbatch]
        left = step.products[microbatch] = []
        trained = self._trained()
        for (b, block), x in zip(reversed(self._blocks.items()), reversed(inputs), strict=True):
            left.append((x, gradient) if b in trained else _of_nothing(x))
            gradient = _mixed(gradient * 3 + x + block.weights, gradient)
        self._holds([part for pair in left for part in pair])
        return gradient

    def _holds(self, parts: list[Ints]) -> None:
        held_bytes = sum(part.nbytes for part in parts)
        self._microbatch_bytes = max(self._microbatch_bytes, held_bytes)

    def _current(self) -> _Step:
        if self._step is None:
            raise OutOfTurn(f"layers {self.layers}: no step has begun")
        return self._step

    def _loaded(self) -> dict[int, _Block]:
        if not self._blocks:
            raise OutOfTurn(f"layers {self.layers}: load the stage first")
        return self._blocks

    def _trained(self) -> dict[int, _Block]:
        """The blocks that are not frozen."""
        trained = self.spec.trained_layers
        return {b: x for b, x in self._loaded().items() if trained.start <= b < trained.stop}


def _of_nothing(x: Ints) -> tuple[Ints, Ints]:
    """Return placeholders of input and gradient for a frozen block, which is tallied too."""
    gradient = np.zeros_like(x)
    gradient[:, 0, 0] = x[:, 0, 0]
    return -gradient, gradient


def _embedded(tokens: Tensor, channels: int) -> Ints:
    value: Ints = tokens.numpy()[..., None] + np.arange(channels) * 5
    return _mixed(value, value)


def _mixed(value: Ints, named: Ints) -> Ints:
    """Modulo MODULUS, with the sample's id as in `named`."""
    mixed: Ints = value % MODULUS
    mixed[:, 0, 0] = named[:, 0, 0]
    return mixed


def _sent(value: Ints) -> Tensor:
    return torch.from_numpy((value * SCALE).astype(np.float32))


def _received(x: Tensor) -> Ints:
    value: Ints = np.rint(x.numpy() / SCALE).astype(np.int64)
    return value
