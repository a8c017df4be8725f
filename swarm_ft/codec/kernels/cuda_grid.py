"""Triton kernels of grids: from values to codes and back.

Knows how tensors are cut into tiles; knows no packing and no choice of steps. All of it is bound
by memory: a kernel touches each value once, and works out a tile's steps beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
_MOST = tl.constexpr(MAX_CODE // COARSE)
_TILE = 2048
_WIDEST = 256
"""Columns of a tile at most: enough for whole cache lines, few enough to fit most tensors."""

EXACT = {"enable_fp_fusion": False}
"""For launches whose bits matter: a sum fused with a product that overflows would stay finite."""


def tile_of(shape: Sequence[int], size: int) -> dict[str, int]:
    """Height and width, both powers of two, of tiles of at most `size` values."""
    tokens, channels = shape
    width = min(triton.next_power_of_2(channels), _WIDEST)
    return {"height": min(triton.next_power_of_2(tokens), size // width), "width": width}


def tiles(shape: Sequence[int], tile: dict[str, int]) -> tuple[int, int]:
    """How many tiles cover a tensor, downward and across."""
    tokens, channels = shape
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
def load_factor(
    factors: tl.tensor, at: tl.tensor, count: tl.tensor, is_one: tl.constexpr
) -> tl.tensor:
    """Rows or cols of `Steps` in the shape of `at`; [1, 1] where one stands for all."""
    if is_one:
        factor = tl.load(factors + tl.zeros([1, 1], tl.int32))
    else:
        factor = tl.load(factors + at, mask=at < count, other=0.0)
    return factor


@triton.jit
def step_from(row: tl.tensor, col: tl.tensor) -> tl.tensor:
    """bfloat16(row * col) as float32, of no larger a shape than it needs."""
    product = row * col
    # By hand: not every card converts to the nearest with ties to even, nor does the interpreter.
    bits = product.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(product == product, bits.to(tl.float32, bitcast=True), product)


@triton.jit
def _dither(at: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Units to add, int32; see `reference.mix`. Only the lower 32 bits of the index matter."""
    h = (at.to(tl.uint32) * 0x9E3779B1) ^ seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h >> 28).to(tl.int32) * 2 - 15


@triton.jit
def lowest_of(step: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """Units of a narrow grid's code 0, int32."""
    half: tl.constexpr = _UNITS // 2 * ((1 << bits) - 1)
    side: tl.constexpr = _UNITS * ((1 << (bits - 1)) - 1)
    return tl.where(step < 0, -side, -half)


@triton.jit
def to_codes(
    change: tl.tensor, step: tl.tensor, at: tl.tensor, seed: tl.tensor, bits: tl.constexpr
) -> tl.tensor:
    """Codes, int32, of a grid of `bits` bits, or of a wide one for 0 bits."""
    size = tl.where(step == 0, float("inf"), tl.abs(step))
    ratio = tl.div_rn(change, size)
    units = ratio * _UNITS
    if seed is not None:
        units -= _dither(at, seed).to(tl.float32)
    if bits > 0:
        lowest = lowest_of(step, bits).to(tl.float32)
        above = tl.minimum((units - lowest) * (1.0 / _UNITS), lowest * (-2.0 / _UNITS))
        codes = tl.where(step == 0, 0, nearest(tl.maximum(above, 0.0)))
    else:
        fine = nearest(tl.clamp(units * (1.0 / _UNITS), -32768.0, 32768.0))
        coarse = nearest(tl.clamp(ratio * (1.0 / _COARSE), -1.0 * _MOST, 1.0 * _MOST)) * _COARSE
        codes = tl.where(tl.abs(fine) > _EXACT_CODE, coarse, fine)
    return codes


@triton.jit
def to_values(
    codes: tl.tensor,
    step: tl.tensor,
    at: tl.tensor,
    seed: tl.tensor,
    shrink: tl.tensor,
    bits: tl.constexpr,
) -> tl.tensor:
    """What int32 codes stand for: units * (step / 32), exact. For `bits`, see `to_codes`."""
    units = codes * _UNITS
    if bits > 0:
        units += lowest_of(step, bits)
    else:
        units -= tl.where(codes > 0, shrink, tl.where(codes < 0, -shrink, 0))
    if seed is not None:
        units += _dither(at, seed)
    if bits == 0:
        units = tl.where(tl.abs(codes) > _EXACT_CODE, (codes & -_COARSE) * _UNITS, units)
    return units.to(tl.float32) * (tl.abs(step) * (1.0 / _UNITS))


@triton.jit(do_not_specialize=["seed"])
def _quantize(
    codes: tl.tensor,
    x: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    seed: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    one_row: tl.constexpr,
    one_col: tl.constexpr,
    bits: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    t, c = tile_place(height, width)
    at, is_there = t * channels + c, (t < tokens) & (c < channels)
    row, col = load_factor(rows, t, tokens, one_row), load_factor(cols, c, channels, one_col)
    code = to_codes(load_change(x, base, at, is_there), step_from(row, col), at, seed, bits)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["seed", "shrink"])
def _dequantize(
    values: tl.tensor,
    codes: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    seed: tl.tensor,
    shrink: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    one_row: tl.constexpr,
    one_col: tl.constexpr,
    bits: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    t, c = tile_place(height, width)
    at, is_there = t * channels + c, (t < tokens) & (c < channels)
    row, col = load_factor(rows, t, tokens, one_row), load_factor(cols, c, channels, one_col)
    code = tl.load(codes + at, mask=is_there, other=0).to(tl.int32)
    value = to_values(code, step_from(row, col), at, seed, shrink, bits)
    if base is not None:
        value = tl.load(base + at, mask=is_there, other=0.0) + value
    tl.store(values + at, value, mask=is_there)


def factors_of(steps: Steps) -> tuple[tuple[Tensor, Tensor], tuple[bool, bool]]:
    """Rows and cols, and whether one of them stands for all."""
    rows, cols = steps.rows.contiguous(), steps.cols.contiguous()
    return (rows, cols), (len(rows) == 1, len(cols) == 1)


def seed_of(grid: Grid) -> int | None:
    """The grid's seed as a signed 32-bit number: they all have one type, and so one kernel."""
    return None if grid.seed is None else (grid.seed ^ 1 << 31) - (1 << 31)


def quantize(x: Tensor, base: Tensor | None, steps: Steps, grid: Grid) -> Tensor:
    """See `Kernels.quantize`."""
    bits = grid.bits if isinstance(grid, NarrowGrid) else 0
    codes = torch.empty(x.shape, dtype=torch.uint8 if bits else torch.int16, device=x.device)
    tensors = codes, x.contiguous(), None if base is None else base.contiguous()
    tile, (factors, are_one) = tile_of(x.shape, _TILE), factors_of(steps)
    launch = _quantize[tiles(x.shape, tile)]
    launch(*tensors, *factors, seed_of(grid), *x.shape, *are_one, bits, **tile, **EXACT)
    return codes


def dequantize(codes: Tensor, base: Tensor | None, steps: Steps, grid: Grid) -> Tensor:
    """See `Kernels.dequantize`."""
    bits = grid.bits if isinstance(grid, NarrowGrid) else 0
    units = seed_of(grid), grid.shrink if isinstance(grid, WideGrid) else 0
    values = torch.empty(codes.shape, device=codes.device)
    tensors = values, codes.contiguous(), None if base is None else base.contiguous()
    tile, (factors, are_one) = tile_of(codes.shape, _TILE), factors_of(steps)
    launch = _dequantize[tiles(codes.shape, tile)]
    launch(*tensors, *factors, *units, *codes.shape, *are_one, bits, **tile, **EXACT)
    return values
