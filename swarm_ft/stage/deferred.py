"""Linear layers that compute their weights' gradients later than their input's. Knows torch alone.

The stage upstream waits for the gradient of the input; nobody waits for those of the weights,
which a stage can compute when it would idle (Qi et al. 2023, arXiv 2401.10241). What autograd does
in one go is cut in two here, with the same products of the same operands, so both ways end with
the same bits.

Shape suffixes: n rows (samples times tokens), i inputs, o outputs of a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from swarm_ft.errors import OutOfTurn


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """What a backward pass left of one layer: the operands of its weight's gradient."""

    layer: nn.Module
    x_ni: Tensor
    gradient_no: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""
        return self.x_ni, self.gradient_no

    def accumulate(self) -> None:
        """Add the gradients of weight and bias to theirs."""
        x_ni, gradient_no = self.tensors
        if isinstance(self.layer, nn.Linear):
            gradient = gradient_no.t().mm(x_ni)
        else:
            gradient = x_ni.t().mm(gradient_no)
        _add(self.layer.get_parameter("weight"), gradient)
        if self.layer.bias is not None:
            _add(self.layer.get_parameter("bias"), gradient_no.sum(0))


class DeferredLinears:
    """The linear layers of a module, whose backward pass leaves the weights' gradients undone.

    Layers that share their weight with another module are left as they are: autograd sums a
    weight's gradients over its roles before it adds them to what is there.

    Args:
        module: has its weights, and keeps them the same objects. Its layers compute through this
            one until `restore`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._left: list[WeightProduct] = []
        self._casts: dict[nn.Parameter, Tensor] = {}
        # Weakly: a stage that is let go of must give its memory back at once.
        self._layers = [ref(layer) for layer in _own_linears(module)]
        for weak in self._layers:
            _there(weak).forward = partial(self._forward, weak)

    def restore(self) -> None:
        """Have the layers compute as their classes do."""
        for weak in self._layers:
            del _there(weak).forward

    def forget(self) -> None:
        """Weights have changed perhaps, and what was left is of no use any more."""
        self._left.clear()
        self._casts.clear()

    def take(self) -> list[WeightProduct]:
        """What backward passes left since the last call, in their order."""
        taken, self._left[:] = list(self._left), []
        return taken

    @property
    def cast_bytes(self) -> int:
        """Of the weights' copies in autocast's type, which all microbatches of a step share."""
        return sum(cast.nbytes for cast in self._casts.values())

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """A weight in the type that autocast computes in; copied once a step."""
        if parameter.dtype == dtype:
            return parameter.detach()
        if parameter not in self._casts:
            self._casts[parameter] = parameter.detach().to(dtype)
        return self._casts[parameter]

    def weight_oi(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """A layer's weight, outputs first, cast."""
        weight = self.cast(layer.get_parameter("weight"), dtype)
        return weight if isinstance(layer, nn.Linear) else weight.t()

    def left(self, product: WeightProduct) -> None:
        """A backward pass came by."""
        self._left.append(product)

    def _forward(self, weak: ref[nn.Module], x: Tensor) -> Tensor:
        layer = _there(weak)
        # As autocast does, in front of the layer: it is the copy that is kept for the backward.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output: Tensor = _Deferred.apply(x, layer.weight, layer, self)  # type: ignore[no-untyped-call]
        return output


class _Context(Protocol):
    """What torch and `_Deferred.forward` keep for the backward pass."""

    layer: nn.Module
    owner: DeferredLinears
    shape: torch.Size
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Deferred(torch.autograd.Function):
    """A layer whose backward pass is the input's gradient alone.

    The weight is an input so that the output has a gradient whether the layer's input has or not.
    """

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, _weight: Tensor, layer: nn.Module, owner: DeferredLinears
    ) -> Tensor:
        x_ni = x.detach().reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_ni)
        ctx.layer, ctx.owner, ctx.shape = layer, owner, x.shape
        bias = None if layer.bias is None else owner.cast(layer.get_parameter("bias"), x.dtype)
        output_no = linear(x_ni, owner.weight_oi(layer, x.dtype), bias)
        return output_no.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x_ni,) = ctx.saved_tensors
        gradient_no = gradients[0].reshape(len(x_ni), -1)
        ctx.owner.left(WeightProduct(ctx.layer, x_ni, gradient_no))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight_oi = ctx.owner.weight_oi(ctx.layer, x_ni.dtype)
        return gradient_no.mm(weight_oi).view(ctx.shape), None, None, None


def _there(layer: ref[nn.Module]) -> nn.Module:
    found = layer()
    if found is None:
        raise OutOfTurn("a layer is asked to compute whose stage was let go of")
    return found


def _own_linears(module: nn.Module) -> Iterator[nn.Module]:
    every = module.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in every)
    for layer in module.modules():
        if isinstance(layer, nn.Linear | Conv1D) and uses[id(layer.weight)] == 1:
            yield layer


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
