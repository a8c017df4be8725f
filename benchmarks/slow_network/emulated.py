"""A stage that takes as long as a real one and computes next to nothing. Knows no framework.

Its time is waited out, so that stages which share a CPU do not slow each other down. Tensors are
real: each output is a new one, and what is sent costs what it costs.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn


def wait_out(since_s: float, seconds: float) -> None:
    """Return when `seconds` have passed since then, by the monotonic clock."""
    time.sleep(max(0.0, since_s + seconds - time.monotonic()))


class EmulatedStage(nn.Module):
    """Adds its one weight to its input, which it hands on in `dtype`.

    Casts are done within the time that is waited out: an accelerator does them on the way.
    """

    def __init__(
        self, forward_s: float, backward_s: float, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self._forward_s, self._backward_s, self._dtype = forward_s, backward_s, dtype

    def forward(self, hidden_btc: Tensor) -> Tensor:
        """Cast floats [B, T, C] of any dtype to `dtype`; gradients go back in their own."""
        output: Tensor = _Emulated.apply(
            hidden_btc, self.weight, self._forward_s, self._backward_s, self._dtype
        )
        return output


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        forward_s: float,
        backward_s: float,
        dtype: torch.dtype,
    ) -> Tensor:
        began_s = time.monotonic()
        ctx.backward_s, ctx.dtype = backward_s, hidden.dtype
        output = (hidden + weight).to(dtype)
        wait_out(began_s, forward_s)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        began_s = time.monotonic()
        (gradient,) = gradients
        of_input = gradient.to(ctx.dtype) if ctx.needs_input_grad[0] else None
        of_weight = gradient.sum(dtype=torch.float32)
        wait_out(began_s, ctx.backward_s)
        return of_input, of_weight, None, None, None
