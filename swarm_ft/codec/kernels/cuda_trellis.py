"""Triton kernels of `Kernels.trellis_symbols`: Viterbi's algorithm, and the codes on its path.

A program of one warp finds the path of a segment, with one thread for each lane of the symbol
coder. The chain of costs bounds the speed, so a thread keeps its four costs in registers, and other
kernels do all work that does not depend on them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.base import (
    LARGEST_SYMBOL,
    MAX_CODE,
    SEGMENT,
    UNITS,
    Coding,
    Scales,
)
from swarm_ft.codec.kernels.cuda_grid import (
    EXACT,
    TritonGrids,
    device_of,
    drawn,
    factors_of,
    load_change,
    load_class,
    load_factor,
    nearest,
    over_scale,
    scale_from,
    signed,
    store_symbols,
    tile_of,
    tile_place,
    tiles,
    wide_codes,
)

_SEGMENT = tl.constexpr(SEGMENT)
_UNITS = tl.constexpr(UNITS)
_MOST = tl.constexpr(MAX_CODE)
_LARGEST = tl.constexpr(LARGEST_SYMBOL)
_NEVER = tl.constexpr(1e4)
"""Cost above the squared errors, in scales, that another path can save."""
_TILE = 2048


@triton.jit
def _ratio(change: tl.tensor, scale: tl.tensor) -> tl.tensor:
    return tl.clamp(over_scale(change, scale), -1.0 * _MOST, 1.0 * _MOST)


@triton.jit
def _off_even(way: tl.tensor) -> tl.tensor:
    return tl.abs(way - 2.0 * nearest(way * 0.5).to(tl.float32))


@triton.jit
def _end_of(costs: tl.tuple) -> tl.tensor:
    """Return the state of least cost: its next shift, and its last one in the lower bit."""
    state, least = tl.zeros_like(costs[0]).to(tl.int32), costs[0]
    for k in tl.static_range(1, 4):
        state = tl.where(costs[k] < least, k, state)
        least = tl.minimum(costs[k], least)
    return state


@triton.jit(do_not_specialize=["seed"])
def _path(
    shifts: tl.tensor,
    lowest: tl.tensor,
    x: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    seed: tl.tensor,
    count: tl.tensor,
    channels: tl.tensor,
    lanes: tl.constexpr,
    one_row: tl.constexpr,
    one_col: tl.constexpr,
) -> None:
    """Find the shifts and lowest bits of a segment's codes.

    Until the way back, `lowest` holds the shift before the last one, one bit for each state.
    """
    first = tl.program_id(0).to(tl.int64) * _SEGMENT
    end = tl.minimum(first + _SEGMENT, count)
    place = first + tl.arange(0, lanes)
    c00, c01 = tl.zeros([lanes], tl.float32), tl.full([lanes], _NEVER, tl.float32)
    c10, c11 = c01, c01
    for _ in range(tl.cdiv(end - first, lanes)):
        is_there = place < end
        t, c = place // channels, place % channels
        row = tl.load(rows + (t * 0 if one_row else t), mask=is_there, other=1.0)
        col = tl.load(cols + (c * 0 if one_col else c), mask=is_there, other=1.0)
        here = _ratio(load_change(x, base, place, is_there), scale_from(row, col))
        dither = (drawn(place, seed) * 2 - 15).to(tl.float32) * (1.0 / _UNITS)
        near = _off_even(here - dither)
        far = _off_even(here - (dither + tl.where(dither < 0, 0.5, -0.5)))
        large = tl.where(tl.abs(here) > _LARGEST - 1, _NEVER, 0.0)
        near_even, near_odd = near * near + large, (1 - near) * (1 - near)
        far_even, far_odd = far * far + large, (1 - far) * (1 - far)
        a00, b00 = c00 + near_even, c01 + near_odd
        a01, b01 = c10 + far_even, c11 + far_odd
        a10, b10 = c00 + near_odd, c01 + near_even
        a11, b11 = c10 + far_odd, c11 + far_even
        befores = (b00 < a00).to(tl.int32) | ((b01 < a01).to(tl.int32) << 1)
        befores |= ((b10 < a10).to(tl.int32) << 2) | ((b11 < a11).to(tl.int32) << 3)
        tl.store(lowest + place, befores.to(tl.uint8), mask=is_there)
        least = tl.minimum(a00, b00)
        c00 = tl.where(is_there, 0.0, c00)
        c01 = tl.where(is_there, tl.minimum(a01, b01) - least, c01)
        c10 = tl.where(is_there, tl.minimum(a10, b10) - least, c10)
        c11 = tl.where(is_there, tl.minimum(a11, b11) - least, c11)
        place += lanes
    state = _end_of((c00, c01, c10, c11))
    tl.debug_barrier()
    place -= lanes
    next_befores = tl.load(lowest + place, mask=place < end, other=0)
    for _ in range(tl.cdiv(end - first, lanes)):
        is_there, befores, at = place < end, next_befores.to(tl.int32), place
        place -= lanes
        next_befores = tl.load(lowest + place, mask=place >= first, other=0)
        before, shift = (befores >> state) & 1, state & 1
        tl.store(shifts + at, shift.to(tl.uint8), mask=is_there)
        tl.store(lowest + at, ((state >> 1) ^ before).to(tl.uint8), mask=is_there)
        state = tl.where(is_there, (shift << 1) | before, state)


@triton.jit(do_not_specialize=["seed", "slices"])
def _on_path(
    out: tl.tuple,
    path: tl.tuple,
    x: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    classes: tl.tuple,
    seed: tl.tensor,
    slices: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    one_row: tl.constexpr,
    one_col: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Store the codes with the path's shifts and lowest bits, folded, with symbols and contexts."""
    t, c = tile_place(height, width)
    at, is_there = t * channels + c, (t < tokens) & (c < channels)
    row, col = load_factor(rows, t, tokens, one_row), load_factor(cols, c, channels, one_col)
    ratio = _ratio(load_change(x, base, at, is_there), scale_from(row, col))
    shift = tl.load(path[0] + at, mask=is_there, other=0).to(tl.int32)
    odd = tl.load(path[1] + at, mask=is_there, other=0).to(tl.int32)
    r = drawn(at, seed) ^ (shift << 3)
    dither = (r * 2 - 15).to(tl.float32)
    code = nearest((ratio - dither * (1.0 / _UNITS) - odd.to(tl.float32)) * 0.5) * 2 + odd
    is_large = (tl.abs(ratio) > _LARGEST - 1) & (tl.abs(code) > _LARGEST)
    code = tl.where(is_large, wide_codes(ratio, ratio * _UNITS - dither), code)
    context = load_class(classes, t, c, tokens, channels)
    store_symbols(out, code, at, is_there, context, r, slices, 0)


class TritonTrellis(TritonGrids):
    """Part of the backend for trellis-coded quantisation, on top of `TritonGrids`."""

    def trellis_symbols(
        self,
        x: Tensor,
        base: Tensor | None,
        scales: Scales,
        seed: int,
        coding: Coding,
        lanes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        codes = torch.empty(x.numel(), dtype=torch.int16, device=x.device)
        bytes_each = torch.empty((4, len(codes)), dtype=torch.uint8, device=x.device)
        symbols, contexts, shifts, lowest = bytes_each.unbind()
        values = x.contiguous(), None if base is None else base.contiguous()
        classes = coding.row_classes.contiguous(), coding.col_classes.contiguous()
        factors, are_one = factors_of(scales)
        sizes, salt = (x.numel(), x.shape[1], lanes), signed(seed)
        tile, numbers = tile_of(x.shape, _TILE), (salt, coding.slices, *x.shape)
        find, put = _path[(triton.cdiv(x.numel(), SEGMENT),)], _on_path[tiles(x.shape, tile)]
        path, out = (shifts, lowest), (codes, symbols, contexts)
        with device_of(x):
            find(*path, *values, *factors, salt, *sizes, *are_one, num_warps=1, **EXACT)
            put(out, path, *values, *factors, classes, *numbers, *are_one, **tile, **EXACT)
        return codes, symbols, contexts, shifts
