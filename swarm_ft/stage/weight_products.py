"""Weight gradients that a stage computes after its input gradients.

The previous stage waits for the input gradient. No stage waits for weight gradients, which can be
computed when the stage would idle (Qi et al. 2023, arXiv 2401.10241). This module splits the
backward pass of autograd in two, with the same products of the same operands and so the same bits.
A frozen layer computes the input gradient only, and stores nothing of the microbatch.

Shape suffixes: n rows (samples times tokens), i inputs, o outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from swarm_ft.errors import OutOfTurn
from swarm_ft.stage.weight_formats import own_linears, packing_of, weight_of

LARGE_BYTES = 64 << 20
"""Bytes of a weight above which no second tensor of its size is created."""
BLOCK_BYTES = 4 << 20
"""Bytes of the part of such a weight in one computation; caches of CPUs hold it."""


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """Operands of a layer's weight gradient, from a backward pass."""

    layer: nn.Module
    x_ni: Tensor
    gradient_no: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that are held."""
        return self.x_ni, self.gradient_no

    def accumulate(self) -> None:
        """Add the gradients of weight and bias to theirs."""
        x_ni, gradient_no = self.tensors
        is_linear = isinstance(self.layer, nn.Linear)
        factors = (gradient_no.t(), x_ni) if is_linear else (x_ni.t(), gradient_no)
        _add_product(self.layer.get_parameter("weight"), *factors)
        if self.layer.bias is not None:
            _add(self.layer.get_parameter("bias"), gradient_no.sum(0))


class DeferredLinears:
    """Linear layers of a module whose weight gradients are deferred.

    Layers that share their weight with another module are unchanged: autograd sums a weight's
    gradients over its roles before it adds them.

    Args:
        module: Module with its weights, which must stay the same objects. Its layers compute
            through this object until `restore`.
        at_once: Whether a backward pass computes weight gradients at once. With recomputation,
            deferred operands would take the memory that it saves.
    """

    def __init__(self, module: nn.Module, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._left: list[WeightProduct] = []
        self._casts: dict[nn.Parameter, Tensor] = {}
        # The references are weak, because a released stage must free its memory at once.
        self._layers = [ref(layer) for layer in own_linears(module).values()]
        for weak in self._layers:
            _layer_of(weak).forward = partial(self._forward, weak)

    def restore(self) -> None:
        """Restore the layers' own forward."""
        for weak in self._layers:
            del _layer_of(weak).forward

    def forget(self) -> None:
        """Drop deferred products and casts, because weights have changed."""
        self._left.clear()
        self._casts.clear()

    def take(self) -> list[WeightProduct]:
        """Remove and return the products of backward passes since the last call, in order."""
        taken, self._left[:] = list(self._left), []
        return taken

    @property
    def cast_bytes(self) -> int:
        """Bytes of the weights' copies in autocast's dtype, shared by a step's microbatches."""
        return sum(cast.nbytes for cast in self._casts.values())

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return a weight in autocast's dtype, copied once a step."""
        if parameter.dtype == dtype:
            return parameter.detach()
        if parameter.dtype != torch.float32:  # it is stored in fewer bits to save memory
            return parameter.detach().to(dtype)
        if parameter not in self._casts:
            self._casts[parameter] = parameter.detach().to(dtype)
        return self._casts[parameter]

    def weight_oi(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """Return a layer's weight in a dtype, outputs first."""
        if packing_of(layer) is None:
            weight = self.cast(layer.get_parameter("weight"), dtype)
        else:
            weight = weight_of(layer).to(dtype)
        return weight if isinstance(layer, nn.Linear) else weight.t()

    def is_cast_in_blocks(self, layer: nn.Module, dtype: torch.dtype) -> bool:
        """Whether a weight is large and is cast for each product, block by block."""
        weight = layer.get_parameter("weight")
        is_cast = packing_of(layer) is None and weight.dtype not in (dtype, torch.float32)
        return is_cast and weight.numel() * dtype.itemsize > LARGE_BYTES

    def is_in_blocks(self, layer: nn.Module, x: Tensor) -> bool:
        """Whether outputs are computed in blocks, which is faster on CPUs for few rows."""
        weight = layer.get_parameter("weight")
        is_large = weight.dtype == x.dtype and weight.nbytes > LARGE_BYTES
        is_plain = packing_of(layer) is None and x.device.type == "cpu"
        return (is_large and is_plain) or self.is_cast_in_blocks(layer, x.dtype)

    @contextmanager
    def deferring(self, layer: nn.Module) -> Iterator[None]:
        """Defer the weight gradient of a layer whose weight has another role too."""
        is_plain = type(layer).forward is nn.Linear.forward
        if not is_plain or "forward" in vars(layer):
            yield
            return
        vars(layer)["forward"] = partial(self._forward, ref(layer))
        try:
            yield
        finally:
            del vars(layer)["forward"]

    def add_product(self, product: WeightProduct) -> None:
        """Defer or compute a product of a backward pass."""
        if self._at_once:
            product.accumulate()
        else:
            self._left.append(product)

    def _forward(self, weak: ref[nn.Module], x: Tensor) -> Tensor:
        layer = _layer_of(weak)
        # The cast precedes the layer, as in autocast, so that the copy is kept for the backward.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output: Tensor = _Deferred.apply(x, layer.weight, layer, self)  # type: ignore[no-untyped-call]
        return output


class _Context(Protocol):
    """Values that torch and `_Deferred.forward` store for the backward pass."""

    layer: nn.Module
    owner: DeferredLinears
    shape: torch.Size
    is_transposed: bool
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Deferred(torch.autograd.Function):
    """A layer whose backward pass computes the input gradient alone.

    The weight is an input of the function, so that the output has a gradient even if the layer's
    input has none, and none if neither has.
    """

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, _weight: Tensor, layer: nn.Module, owner: DeferredLinears
    ) -> Tensor:
        x_ni = x.detach().reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x_ni)
        ctx.layer, ctx.owner, ctx.shape = layer, owner, x.shape
        ctx.is_transposed = x_ni.stride() == (1, len(x_ni))
        bias = None if layer.bias is None else owner.cast(layer.get_parameter("bias"), x.dtype)
        if owner.is_in_blocks(layer, x):
            output_no = _linear_in_blocks(x_ni, _outputs_first(layer), bias)
        else:
            output_no = linear(x_ni, owner.weight_oi(layer, x.dtype), bias)
        # The result is no view, because some families modify it in place.
        shape = (*x.shape[:-1], output_no.shape[-1])
        output: Tensor = torch.ops.aten._unsafe_view(output_no, shape)  # noqa: SLF001
        return output

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        gradient_no = gradients[0].reshape(-1, gradients[0].shape[-1])
        if ctx.needs_input_grad[1]:
            (x_ni,) = ctx.saved_tensors
            ctx.owner.add_product(WeightProduct(ctx.layer, x_ni, gradient_no))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        if ctx.owner.is_cast_in_blocks(ctx.layer, gradient_no.dtype):
            gradient_ni = _product_in_blocks(gradient_no, _outputs_first(ctx.layer))
            return gradient_ni.view(ctx.shape), None, None, None
        weight_oi = ctx.owner.weight_oi(ctx.layer, gradient_no.dtype)
        if ctx.is_transposed:  # the gradient keeps its layout, on which later rounding may depend
            gradient_ni = weight_oi.t().mm(gradient_no.t()).t()
        else:
            gradient_ni = gradient_no.mm(weight_oi)
        return gradient_ni.view(ctx.shape), None, None, None


def _outputs_first(layer: nn.Module) -> Tensor:
    """Return a layer's weight [O, I] as it is stored."""
    weight = layer.get_parameter("weight").detach()
    return weight if isinstance(layer, nn.Linear) else weight.t()


def _blocks(weight_oi: Tensor, by_output_no: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split a weight by its outputs, and a tensor with a column for each output."""
    num_rows = max(1, BLOCK_BYTES // (weight_oi.shape[1] * by_output_no.element_size()))
    parts = torch.split(weight_oi, num_rows), torch.split(by_output_no, num_rows, dim=1)
    return zip(*parts, strict=True)


def _linear_in_blocks(x_ni: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """Compute `linear` for some outputs at a time, whose weight is cast if necessary."""
    output_no = x_ni.new_empty(len(x_ni), len(weight_oi))
    for rows, part in _blocks(weight_oi, output_no):
        torch.mm(x_ni, rows.to(x_ni.dtype).t(), out=part)
    return output_no if bias_o is None else output_no.add_(bias_o)


def _product_in_blocks(gradient_no: Tensor, weight_oi: Tensor) -> Tensor:
    """Compute the input gradient of `_linear_in_blocks`."""
    gradient_ni = gradient_no.new_zeros(len(gradient_no), weight_oi.shape[1])
    for rows, part in _blocks(weight_oi, gradient_no):
        gradient_ni.addmm_(part, rows.to(gradient_no.dtype))
    return gradient_ni


def _layer_of(layer: ref[nn.Module]) -> nn.Module:
    found = layer()
    if found is None:
        raise OutOfTurn("a layer cannot compute: its stage was released")
    return found


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
    """Add a product to a gradient; in place if it is large, such as a head's of hundreds of MiB."""
    if parameter.nbytes <= LARGE_BYTES:
        _add(parameter, left.mm(right))
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if left.dtype == parameter.dtype:
        parameter.grad.addmm_(left, right)
        return
    num_rows = max(1, BLOCK_BYTES // parameter.grad[0].nbytes)
    for rows, factor in zip(
        *(torch.split(one, num_rows) for one in (parameter.grad, left)), strict=True
    ):
        rows.add_(factor.mm(right))


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
