"""Triton kernels of grids: from values to codes and back.

Knows how tensors are cut into tiles; knows no packing and no choice of steps. All of it is bound
by memory: a kernel touches each value once, and works out a tile's steps beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.base import (
    COARSE,
    EXACT_CODE,
    MAX_CODE,
    UNITS,
    Grid,
    NarrowGrid,
    Steps,
    WideGrid,
)

_UNITS = tl.constexpr(UNITS)
_EXACT_CODE = tl.constexpr(EXACT_CODE)
_COARSE = tl.constexpr(COARSE)
_MAX_COARSE = tl.constexpr(MAX_CODE // COARSE)
_TILE = 2048
_WIDEST = 256
"""Columns of a tile at most: enough for whole cache lines, few enough to fit most tensors."""

EXACT = {"enable_fp_fusion": False}
"""Launches whose bits matter: a sum fused with a product that overflows would stay finite."""


def tile_of(tokens: int, channels: int, size: int) -> dict[str, int]:
    """Rows and columns, both powers of two, of tiles of at most `size` values."""
    width = min(triton.next_power_of_2(channels), _WIDEST)
    return {"height": min(triton.next_power_of_2(tokens), size // width), "width": width}


def tiles(tokens: int, channels: int, tile: dict[str, int]) -> tuple[int, int]:
    """How many tiles cover a tensor, downward and across."""
    return triton.cdiv(tokens, tile["height"]), triton.cdiv(channels, tile["width"])


@triton.jit
def tile_place(height: tl.constexpr, width: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """This program's tokens, int64 [height, 1], and channels, [1, width]."""
    t = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    return t[:, None], (tl.program_id(1) * width + tl.arange(0, width))[None, :]


@triton.jit
def load_change(x: tl.tensor, base: tl.tensor, at: tl.tensor, is_there: tl.tensor) -> tl.tensor:
    """The values of x, or of x - base, at `at`; zeros where there are none."""
    change = tl.load(x + at, mask=is_there, other=0.0)
    if base is not None:
        change -= tl.load(base + at, mask=is_there, other=0.0)
    return change


@triton.jit
def nearest(x: tl.tensor) -> tl.tensor:
    """The whole number nearest to x, as int32, ties to even, for |x| < 2^22.

    After 1.5 * 2^23 is added, a float32 has no bit below one: its own bits are that number.
    """
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def step_at(
    steps: tuple[tl.tensor, tl.tensor],
    axes: tl.constexpr,
    t: tl.tensor,
    c: tl.tensor,
    is_there: tl.tensor,
) -> tl.tensor:
    """bfloat16(rows[t] * cols[c]) as float32, as small as can be: [height or 1, width or 1].

    Args:
        steps: rows and cols.
        axes: whether rows has a value for each token, and cols one for each channel.
    """
    first = tl.zeros([1, 1], tl.int32)
    if axes[0]:
        t_is_there = tl.max(is_there.to(tl.int32), axis=1, keep_dims=True) > 0
