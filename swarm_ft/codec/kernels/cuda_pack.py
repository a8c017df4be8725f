"""Triton kernels that pack codes: alone, or in one pass with the grid.

Knows the planes of `Kernels.pack`: with s = n / 8 they turn eight streams of codes, [8, s], into
[bits, s] bytes, column by column. In a plane of w bits, row r holds the codes of the streams r,
r + w, r + 2 w and so on. Knows nothing of what codes mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.base import NarrowGrid, Steps, packed_bytes
from swarm_ft.codec.kernels.cuda_grid import (
    EXACT,
    dequantize,
    factors_of,
    load_change,
    load_factor,
    quantize,
    seed_of,
    step_from,
    tile_of,
    tile_place,
    tiles,
    to_codes,
    to_values,
)

_STREAMS = 8
_BLOCK = 512
"""Codes of each stream, in a program."""


@triton.jit
def _store_plane(
    packed: tl.tensor,
    codes: tl.tuple,
    at: tl.tensor,
    is_there: tl.tensor,
    stride: tl.tensor,
    w: tl.constexpr,
    bits: tl.constexpr,
) -> None:
    """Store the w rows of bytes of the plane of w bits, w a power of two that is in `bits`."""
    row: tl.constexpr = bits - (bits & (2 * w - 1))  # the wider planes' rows come first
    shift: tl.constexpr = bits & (w - 1)  # the narrower planes have the code's lower bits
    for r in tl.static_range(w):
        byte = tl.zeros_like(codes[0])
        for k in tl.static_range(r, 8, w):
            byte = (byte << w) | ((codes[k] >> shift) & ((1 << w) - 1))
        tl.store(packed + (row + r) * stride + at, byte.to(tl.uint8), mask=is_there)


@triton.jit
def _store_rows(
    packed: tl.tensor,
    codes: tl.tuple,
    at: tl.tensor,
    is_there: tl.tensor,
    stride: tl.tensor,
    bits: tl.constexpr,
) -> None:
    """Store the rows of bytes of eight streams of int32 codes."""
    for i in tl.static_range(4):
        if bits & (1 << i):
            _store_plane(packed, codes, at, is_there, stride, 1 << i, bits)


@triton.jit
def _load_rows(
    packed: tl.tensor, at: tl.tensor, is_there: tl.tensor, stride: tl.tensor, bits: tl.constexpr
) -> tl.tuple:
    """The rows of bytes, as int32."""
    rows: tl.tuple = ()
    for r in tl.static_range(bits):
        row = tl.load(packed + r * stride + at, mask=is_there, other=0)
        rows += (row.to(tl.int32),)
    return rows


@triton.jit
def _part_of(rows: tl.tuple, k: tl.constexpr, w: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """What the plane of w bits has of the codes of stream k."""
    byte = rows[bits - (bits & (2 * w - 1)) + k % w]
    return ((byte >> (8 - w - k // w * w)) & ((1 << w) - 1)) << (bits & (w - 1))


@triton.jit
def _code_of(rows: tl.tuple, k: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """The codes of stream k, from the rows of bytes."""
    code = tl.zeros_like(rows[0])
    for i in tl.static_range(4):
        if bits & (1 << i):
            code |= _part_of(rows, k, 1 << i, bits)
    return code


@triton.jit
def _pack(
    packed: tl.tensor,
    codes: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    bits: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    streams: tl.tuple = ()
    for k in tl.static_range(8):
        place = k * tl.cast(stride, tl.int64) + at
        code = tl.load(codes + place, mask=place < count, other=0)
        streams += (code.to(tl.int32),)
    _store_rows(packed, streams, at, at < stride, tl.cast(stride, tl.int64), bits)


@triton.jit
def _unpack(
    codes: tl.tensor,
    packed: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    bits: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    rows = _load_rows(packed, at, at < stride, tl.cast(stride, tl.int64), bits)
    for k in tl.static_range(8):
        place = k * tl.cast(stride, tl.int64) + at
        is_there = (at < stride) & (place < count)
        tl.store(codes + place, _code_of(rows, k, bits).to(tl.uint8), mask=is_there)


@triton.jit(do_not_specialize=["seed"])
def _quantize_pack(
    packed: tl.tensor,
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
    tokens_each = tokens // 8
    is_there = (t < tokens_each) & (c < channels)
    streams: tl.tuple = ()
    col = load_factor(cols, c, channels, one_col)
    for k in tl.static_range(8):
        token = t + k * tokens_each
        at = token * channels + c
        step = step_from(load_factor(rows, token, tokens, one_row), col)
        code = to_codes(load_change(x, base, at, is_there), step, at, seed, bits)
        streams += (code,)
    stride = tl.cast(tokens_each, tl.int64) * channels
    _store_rows(packed, streams, t * channels + c, is_there, stride, bits)


@triton.jit(do_not_specialize=["seed"])
def _unpack_dequantize(
    values: tl.tensor,
    packed: tl.tensor,
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
    tokens_each = tokens // 8
    is_there = (t < tokens_each) & (c < channels)
    stride = tl.cast(tokens_each, tl.int64) * channels
    col = load_factor(cols, c, channels, one_col)
    lines = _load_rows(packed, t * channels + c, is_there, stride, bits)
    for k in tl.static_range(8):
        token = t + k * tokens_each
        at = token * channels + c
        step = step_from(load_factor(rows, token, tokens, one_row), col)
        value = to_values(_code_of(lines, k, bits), step, at, seed, 0, bits)
        if base is not None:
            value = tl.load(base + at, mask=is_there, other=0.0) + value
        tl.store(values + at, value, mask=is_there)


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `Kernels.pack`."""
    packed = torch.empty(packed_bytes(len(codes), bits), dtype=torch.uint8, device=codes.device)
    sizes = len(codes), len(packed) // bits
    launch = _pack[(triton.cdiv(sizes[1], _BLOCK),)]
    launch(packed, codes.contiguous(), *sizes, bits, _BLOCK, **EXACT)
    return packed


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """See `Kernels.unpack`."""
    codes = torch.empty(count, dtype=torch.uint8, device=packed.device)
    sizes = count, packed_bytes(count, bits) // bits
    launch = _unpack[(triton.cdiv(sizes[1], _BLOCK),)]
    launch(codes, packed.contiguous(), *sizes, bits, _BLOCK, **EXACT)
    return codes


def quantize_pack(x: Tensor, base: Tensor | None, steps: Steps, grid: NarrowGrid) -> Tensor:
    """`quantize`, then `pack`: the same bytes, in one pass where tokens come in eights."""
    tokens, channels = x.shape
    if tokens % _STREAMS:
        return pack(quantize(x, base, steps, grid).view(-1), grid.bits)
    size = packed_bytes(x.numel(), grid.bits)
    packed = torch.empty(size, dtype=torch.uint8, device=x.device)
    tensors = packed, x.contiguous(), None if base is None else base.contiguous()
    each, (factors, are_one) = (tokens // _STREAMS, channels), factors_of(steps)
    tile = tile_of(each, _BLOCK)
    launch = _quantize_pack[tiles(each, tile)]
    launch(*tensors, *factors, seed_of(grid), *x.shape, *are_one, grid.bits, **tile, **EXACT)
    return packed


def unpack_dequantize(
    packed: Tensor, shape: tuple[int, int], base: Tensor | None, steps: Steps, grid: NarrowGrid
) -> Tensor:
    """`unpack`, then `dequantize`: the same values, in one pass where tokens come in eights."""
    tokens, channels = shape
    if tokens % _STREAMS:
        codes = unpack(packed, tokens * channels, grid.bits).view(shape)
        return dequantize(codes, base, steps, grid)
    values = torch.empty(shape, device=packed.device)
    tensors = values, packed.contiguous(), None if base is None else base.contiguous()
    each, (factors, are_one) = (tokens // _STREAMS, channels), factors_of(steps)
    tile = tile_of(each, _BLOCK)
    launch = _unpack_dequantize[tiles(each, tile)]
    launch(*tensors, *factors, seed_of(grid), *shape, *are_one, grid.bits, **tile, **EXACT)
    return values
