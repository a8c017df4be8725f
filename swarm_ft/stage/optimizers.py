"""Optimizers of a stage's weights, and the state that they keep between steps.

Replicas take equal steps from equal sums, so that nothing here may depend on a machine. Sums have a
fixed order (`device.summed`), whatever the number of threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from swarm_ft.protocol.spec.run_spec import Optim
from swarm_ft.stage.device import sum_in_order
from swarm_ft.stage.eight_bits import BLOCK, decode, encode, num_scales

BETAS = (0.9, 0.999)
"""Betas of AdamW in every stage."""
STEP = "step"
Groups = list[dict[str, Any]]


class Optimizer(Protocol):
    """The part of a torch optimizer that this package uses."""

    param_groups: Groups
    state: Any

    def step(self) -> object:
        """Update the weights by their gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""


class StateTensor(NamedTuple):
    """Shape and dtype of a tensor of optimizer state."""

    shape: torch.Size
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def initial(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the initial tensor, zeros. Counts are on the CPU, as in torch."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device if self.shape else "cpu")


StateTensors = dict[str, StateTensor]


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """A kind of optimizer.

    Attributes:
        name: Prefix of its names in a stage's state.
        state_of: Returns its state of a weight of some shape, by its own names.
        make: Creates it for groups with learning rates and decays.
    """

    name: str
    state_of: Callable[[torch.Size], StateTensors]
    make: Callable[[Groups], Optimizer]

    def create(self, parameters: Collection[nn.Parameter], weight_decay: float) -> Optimizer:
        """Create the optimizer of these parameters.

        Decay spares biases and norms, with one dimension.

        Each parameter is a group of its own, because torch holds temporaries for a whole group.
        """
        decays = [weight_decay if p.ndim > 1 else 0.0 for p in parameters]
        groups = [
            {"params": [parameter], "weight_decay": decay}
            for parameter, decay in zip(parameters, decays, strict=True)
        ]
        return self.make(groups or [{"params": [], "weight_decay": 0.0}])

    def state_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of all optimizer state, without the counts of steps."""
        kept = (one for p in parameters for one in self.state_of(p.shape).values() if one.shape)
        return sum(one.nbytes for one in kept)


def kind_of(optim: Optim) -> OptimizerKind:
    """Return the kind of a run's optimizer."""
    return _KINDS[optim]


# ---- optimizers that update one weight at a time


class _Singly(ABC):
    """An optimizer that updates weights one after the other.

    Args:
        groups: Groups with learning rates and decays.
        kept: State of a weight, see `Kind`.
    """

    def __init__(self, groups: Groups, kept: Callable[[torch.Size], StateTensors]) -> None:
        self.param_groups: Groups = [{"lr": 0.0, **group} for group in groups]
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
        self._state_of = kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights by their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kept = self.state[parameter] or self._begun(parameter)
                    kept[STEP] += 1
                    self._step(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _begun(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        kept = self.state[parameter]
        for name, one in self._state_of(parameter.shape).items():
            kept[name] = one.initial(parameter.device)
        return kept

    @abstractmethod
    def _step(self, parameter: nn.Parameter, gradient: Tensor, lr: float, decay: float) -> None:
        """Update one weight, whose count already includes this step."""


def _moved(mean: Tensor, to: Tensor, part: float) -> Tensor:
    # `lerp` is not used, because machines round it in one step or in two.
    return mean.mul_(1 - part).add_(to.mul_(part))


# ---- Adafactor: stores only the means of a squared gradient's rows and columns


class Adafactor(_Singly):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) as in torch, with sums in a fixed order.

    The learning rate is relative: a step changes a weight by that part of its own root mean square.
    """

    def _step(self, parameter: nn.Parameter, gradient: Tensor, lr: float, decay: float) -> None:
        kept = self.state[parameter]
        count = float(kept[STEP])
        rate = max(_MIN_SCALE, _root_mean_square(parameter)) * min(lr, 1 / math.sqrt(count))
        if decay:
            parameter.mul_(1 - lr * decay)
        update = _mean_squares(kept, gradient, count**_BETA2_DECAY)
        torch.div(gradient, update.clamp_(min=_EPSILON**2).sqrt_(), out=update)
        parameter.sub_(update.mul_(rate / max(1.0, _root_mean_square(update))))


_EPSILON = torch.finfo(torch.float32).eps
_MIN_SCALE = 1e-3
_BETA2_DECAY = -0.8


def _mean_squares(kept: dict[str, Tensor], gradient: Tensor, part: float) -> Tensor:
    """Return running means of a gradient's squares; `part` is the weight of this gradient."""
    if gradient.ndim < 2:
        return _moved(kept["variance"], gradient.square(), part).clone()
    rows, columns = gradient.shape[-2:]
    row = _moved(kept["row_var"], sum_in_order(gradient.square(), -1) / columns, part)
    column = _moved(kept["col_var"], sum_in_order(gradient.square(), -2) / rows, part)
    return (row * column).div_((sum_in_order(row, -2) / rows).clamp_(min=_EPSILON))


def _root_mean_square(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return math.sqrt(float(sum_in_order(tensor.detach().reshape(-1).square(), 0)) / tensor.numel())


# ---- AdamW in 8 bits: a quarter of AdamW's state


class AdamW8bit(_Singly):
    """AdamW as in torch, with both means in 8 bits between steps (Dettmers et al. 2021).

    Unlike there, the codes of the second mean are of its root: updates are divided by the root, and
    small values beside large ones stay apart from 0 a million times longer. Means of norms and
    biases, which are few, stay in float32.
    """

    def _step(self, parameter: nn.Parameter, gradient: Tensor, lr: float, decay: float) -> None:
        kept, weights = self.state[parameter], parameter.view(-1)
        count, gradients = float(kept[STEP]), gradient.reshape(-1)
        if decay:
            weights.mul_(1 - lr * decay)
        for begin in range(0, len(weights), _PIECE):
            piece = slice(begin, begin + _PIECE)
            mean, square = (_Mean(kept, name, piece) for name in (MEAN, SQUARE))
            means = _moved(mean.read(), gradients[piece].clone(), 1 - BETAS[0])
            squares = _moved(square.read(), gradients[piece].square(), 1 - BETAS[1])
            mean.write(means)
            square.write(squares)
            roots = squares.sqrt_().div_(math.sqrt(1 - BETAS[1] ** count)).add_(EPSILON)
            weights[piece].sub_(means.div_(roots).mul_(lr / (1 - BETAS[0] ** count)))


MEAN, SQUARE = "exp_avg", "exp_avg_sq"
EPSILON = 1e-8
_SCALES = "_scales"
_PIECE = 1024 * BLOCK
"""Values in float32 at a time."""


@dataclass(frozen=True, slots=True)
class _Mean:
    """A piece of one of the two means, of whole blocks, or the last one."""

    kept: dict[str, Tensor]
    name: str
    piece: slice

    def read(self) -> Tensor:
        """Return a copy of the values."""
        values = self.kept[self.name].view(-1)[self.piece]
        if values.dtype is torch.float32:
            return values.clone()
        values_in = decode(values, self._scales(), signed=self._is_signed)
        return values_in if self._is_signed else values_in.square_()

    def write(self, means: Tensor) -> None:
        """Store values."""
        values = self.kept[self.name].view(-1)[self.piece]
        if values.dtype is torch.float32:
            values.copy_(means)
            return
        values_in = means if self._is_signed else means.sqrt()
        codes, scales = encode(values_in, signed=self._is_signed)
        values.copy_(codes)
        self._scales().copy_(scales)

    @property
    def _is_signed(self) -> bool:
        return self.name == MEAN

    def _scales(self) -> Tensor:
        first = self.piece.start // BLOCK
        return self.kept[self.name + _SCALES][first : first + _PIECE // BLOCK]


# ---- the kinds of optimizers


def _adamw_state(shape: torch.Size) -> StateTensors:
    return {MEAN: StateTensor(shape), SQUARE: StateTensor(shape), STEP: StateTensor(torch.Size())}


def _adamw_8bit_state(shape: torch.Size) -> StateTensors:
    if len(shape) < 2:
        return _adamw_state(shape)
    codes, scales = (
        StateTensor(shape, torch.uint8),
        StateTensor(torch.Size((num_scales(shape.numel()),))),
    )
    means = {MEAN: codes, MEAN + _SCALES: scales, SQUARE: codes, SQUARE + _SCALES: scales}
    return {**means, STEP: StateTensor(torch.Size())}


def _adafactor_state(shape: torch.Size) -> StateTensors:
    if len(shape) < 2:
        return {"variance": StateTensor(shape), STEP: StateTensor(torch.Size())}
    rows = StateTensor(torch.Size((*shape[:-1], 1)))
    columns = StateTensor(torch.Size((*shape[:-2], 1, shape[-1])))
    return {"row_var": rows, "col_var": columns, STEP: StateTensor(torch.Size())}


def _sgd_state(_shape: torch.Size) -> StateTensors:
    return {}


def _adamw(groups: Groups) -> Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON)


def _adamw_8bit(groups: Groups) -> Optimizer:
    return AdamW8bit(groups, _adamw_8bit_state)


def _adafactor(groups: Groups) -> Optimizer:
    return Adafactor(groups, _adafactor_state)


def _sgd(groups: Groups) -> Optimizer:
    return torch.optim.SGD(groups, lr=0.0)


NEVER_NEGATIVE = {SQUARE, SQUARE + _SCALES, MEAN + _SCALES, "variance", "row_var", "col_var"}
"""State that is never negative: means of squares, and scales."""
_KINDS = {
    Optim.ADAMW: OptimizerKind("adamw", _adamw_state, _adamw),
    Optim.ADAMW_8BIT: OptimizerKind("adamw-8bit", _adamw_8bit_state, _adamw_8bit),
    Optim.ADAFACTOR: OptimizerKind("adafactor", _adafactor_state, _adafactor),
    Optim.SGD: OptimizerKind("sgd", _sgd_state, _sgd),
}
