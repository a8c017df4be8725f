"""What steps a stage's weights, and what it keeps of each from one step to the next.

Replicas step alike from equal sums, so nothing here may depend on a machine: its sums are taken in
one order (`device.summed`), whatever the number of threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swarm_ft.protocol.spec.run_spec import Optim
from swarm_ft.stage.device import summed

BETAS = (0.9, 0.999)
"""Of every stage's AdamW."""
STEP = "step"
Groups = list[dict[str, Any]]


class Stepper(Protocol):
    """What this package asks of a torch optimizer."""

    param_groups: Groups
    state: Any

    def step(self) -> object:
        """Change the weights by their gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to step weights.

    Attributes:
        name: in front of the names of what it keeps, in a stage's state.
        kept: shapes of the float32 tensors that it keeps of a weight of some shape, by its own
            names for them.
        squares: which of those are means of squares, and never negative.
        make: for groups with their learning rates and decays.
    """

    name: str
    kept: Callable[[torch.Size], dict[str, torch.Size]]
    squares: frozenset[str]
    make: Callable[[Groups], Stepper]

    def over(self, parameters: Collection[nn.Parameter], weight_decay: float) -> Stepper:
        """Steps these; decay spares biases and norms: in these models, all of one dimension.

        Each is a group of its own: of a group torch keeps more than one weight's temporaries.
        """
        decays = [weight_decay if p.ndim > 1 else 0.0 for p in parameters]
        groups = [
            {"params": [parameter], "weight_decay": decay}
            for parameter, decay in zip(parameters, decays, strict=True)
        ]
        return self.make(groups or [{"params": [], "weight_decay": 0.0}])

    def kept_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Of all that it keeps of weights but for the counts of steps, once they were stepped."""
        shapes = (shape for p in parameters for shape in self.kept(p.shape).values() if shape)
        return sum(shape.numel() * torch.float32.itemsize for shape in shapes)


def kind_of(optim: Optim) -> Kind:
    """By a run's word for it."""
    return _KINDS[optim]


# ---- Adafactor: of the squares of a matrix's gradients it keeps rows' and columns' means alone


class Adafactor:
    """torch's own (Shazeer and Stern 2018, arXiv 1804.04235), with its sums in one order.

    The learning rate is relative: a step changes a weight by that part of its own root mean square.
    """

    def __init__(self, groups: Groups) -> None:
        self.param_groups: Groups = [{"lr": 0.0, **group} for group in groups]
        self.state: defaultdict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Change the weights by their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _step(self, parameter: nn.Parameter, gradient: Tensor, lr: float, decay: float) -> None:
        kept = self.state[parameter] or self._begun(parameter)
        kept[STEP] += 1
        count = float(kept[STEP])
        rate = max(_MIN_SCALE, _root_mean_square(parameter)) * min(lr, 1 / math.sqrt(count))
        if decay:
            parameter.mul_(1 - lr * decay)
        update = _mean_squares(kept, gradient, count**_BETA2_DECAY)
        torch.div(gradient, update.clamp_(min=_EPSILON**2).sqrt_(), out=update)
        parameter.sub_(update.mul_(rate / max(1.0, _root_mean_square(update))))

    def _begun(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        kept = self.state[parameter]
        for name, shape in _adafactor_kept(parameter.shape).items():
            kept[name] = torch.zeros(shape, device=parameter.device if shape else "cpu")
        return kept


_EPSILON = torch.finfo(torch.float32).eps
_MIN_SCALE = 1e-3
_BETA2_DECAY = -0.8


def _mean_squares(kept: dict[str, Tensor], gradient: Tensor, part: float) -> Tensor:
    """Running means of a gradient's squares, of which `part` is this one's; not to be kept."""
    if gradient.ndim < 2:
        return _moved(kept["variance"], gradient.square(), part).clone()
    rows, columns = gradient.shape[-2:]
    row = _moved(kept["row_var"], summed(gradient.square(), -1) / columns, part)
    column = _moved(kept["col_var"], summed(gradient.square(), -2) / rows, part)
    return (row * column).div_((summed(row, -2) / rows).clamp_(min=_EPSILON))


def _moved(mean: Tensor, to: Tensor, part: float) -> Tensor:
    # Not `lerp`, which machines round in one step or in two.
    return mean.mul_(1 - part).add_(to.mul_(part))


def _root_mean_square(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return math.sqrt(float(summed(tensor.detach().reshape(-1).square(), 0)) / tensor.numel())


# ---- the kinds


def _adamw_kept(shape: torch.Size) -> dict[str, torch.Size]:
    return {"exp_avg": shape, "exp_avg_sq": shape, STEP: torch.Size()}


def _adafactor_kept(shape: torch.Size) -> dict[str, torch.Size]:
    if len(shape) < 2:
        return {"variance": shape, STEP: torch.Size()}
    columns = torch.Size((*shape[:-2], 1, shape[-1]))
    return {"row_var": torch.Size((*shape[:-1], 1)), "col_var": columns, STEP: torch.Size()}


def _sgd_kept(_shape: torch.Size) -> dict[str, torch.Size]:
    return {}


def _adamw(groups: Groups) -> Stepper:
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=1e-8)


def _sgd(groups: Groups) -> Stepper:
    return torch.optim.SGD(groups, lr=0.0)


_KINDS = {
    Optim.ADAMW: Kind("adamw", _adamw_kept, frozenset({"exp_avg_sq"}), _adamw),
    Optim.ADAFACTOR: Kind(
        "adafactor", _adafactor_kept, frozenset({"variance", "row_var", "col_var"}), Adafactor
    ),
    Optim.SGD: Kind("sgd", _sgd_kept, frozenset(), _sgd),
}
