"""Triton kernels between values and codes.

Memory bounds all of them: a kernel reads each value once and computes the scales of a tile along
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.base import (
    COARSE,
    EXACT_CODE,
    LARGEST_SYMBOL,
    MAX_CODE,
    SLICES,
    UNITS,
    Coding,
    Grid,
    Kernels,
    NarrowGrid,
    Scales,
    WideGrid,
    packed_bytes,
)

_UNITS = tl.constexpr(UNITS)
_SLICES = tl.constexpr(SLICES)
_LARGEST = tl.constexpr(LARGEST_SYMBOL)
_EXACT_CODE = tl.constexpr(EXACT_CODE)
_COARSE = tl.constexpr(COARSE)
_MOST = tl.constexpr(MAX_CODE // COARSE)
_TILE = 2048
_WIDEST = 256
"""Maximum width of a tile: enough for whole cache lines, few enough to fit most tensors."""

EXACT = {"enable_fp_fusion": False}
"""Launch options for bit-exact kernels: a fused sum could hide the overflow of a product."""


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x the current one, on which kernels are launched."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def tile_of(shape: Sequence[int], size: int) -> dict[str, int]:
    """Return the height and width, both powers of two, of tiles of at most `size` values."""
    tokens, channels = shape
    width = min(triton.next_power_of_2(channels), _WIDEST)
    return {"height": min(triton.next_power_of_2(tokens), size // width), "width": width}


def tiles(shape: Sequence[int], tile: dict[str, int]) -> tuple[int, int]:
    """Return the number of tiles that cover a tensor, downward and across."""
    tokens, channels = shape
    return triton.cdiv(tokens, tile["height"]), triton.cdiv(channels, tile["width"])


@triton.jit
def tile_place(height: tl.constexpr, width: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return this program's tokens, int64 [height, 1], and channels, [1, width]."""
    t = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    return t[:, None], (tl.program_id(1) * width + tl.arange(0, width))[None, :]


@triton.jit
def load_change(x: tl.tensor, base: tl.tensor, at: tl.tensor, is_there: tl.tensor) -> tl.tensor:
    """Load the values of x, or of x - base; zeros outside of the tensor."""
    change = tl.load(x + at, mask=is_there, other=0.0)
    if base is not None:
        change -= tl.load(base + at, mask=is_there, other=0.0)
    return change


@triton.jit
def nearest(x: tl.tensor) -> tl.tensor:
    """Round |x| < 2^22 to int32, ties to even.

    After the addition of 1.5 * 2^23 a float32 has no bits below one, so its bits hold the integer.
    """
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def load_factor(
    factors: tl.tensor, at: tl.tensor, count: tl.tensor, is_one: tl.constexpr
) -> tl.tensor:
    """Load rows or cols of `Scales` in the shape of `at`; [1, 1] if one is shared by all."""
    if is_one:
        factor = tl.load(factors + tl.zeros([1, 1], tl.int32))
    else:
        factor = tl.load(factors + at, mask=at < count, other=0.0)
    return factor


@triton.jit
def scale_from(row: tl.tensor, col: tl.tensor) -> tl.tensor:
    """Return bfloat16(row * col) as float32, in the smallest shape."""
    product = row * col
    # Neither all GPUs nor the interpreter round conversions to nearest even, hence the bit
    # arithmetic.
    bits = product.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(product == product, bits.to(tl.float32, bitcast=True), product)


@triton.jit
def drawn(at: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Return the r of `Kernels.dequantize`, int32; only the lower 32 bits of the index matter."""
    h = (at.to(tl.uint32) * 0x9E3779B1) ^ seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h >> 28).to(tl.int32)


@triton.jit
def _shifted(at: tl.tensor, seed: tl.tensor, shifts: tl.tensor, is_there: tl.tensor) -> tl.tensor:
    """Return the r of `Kernels.dequantize`, with shifts applied if there are any."""
    r = drawn(at, seed)
    if shifts is not None:
        r = r ^ (tl.load(shifts + at, mask=is_there, other=0).to(tl.int32) << 3)
    return r


@triton.jit(do_not_specialize=["seed"])
def _turn(
    turned: tl.tensor,
    codes: tl.tensor,
    shifts: tl.tensor,
    seed: tl.tensor,
    count: tl.tensor,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    code = tl.load(codes + at, mask=at < count, other=0).to(tl.int32)
    code = tl.where(_shifted(at, seed, shifts, at < count) < 8, -code, code)
    tl.store(turned + at, code.to(tl.int16), mask=at < count)


@triton.jit(do_not_specialize=["seed"])
def _slice_contexts(
    contexts: tl.tensor,
    classes: tl.tensor,
    seed: tl.tensor,
    count: tl.tensor,
    slices: tl.constexpr,
    block: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    wide = tl.load(classes + at, mask=at < count, other=0).to(tl.int32) << (slices - 1)
    r = drawn(at, seed)
    far = tl.minimum(r, 15 - r) >> (_SLICES - slices)
    tl.store(contexts + at, (wide + far).to(tl.uint8), mask=at < count)


@triton.jit
def lowest_of(scale: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """Return the units of code 0 of a narrow grid, int32."""
    half: tl.constexpr = _UNITS // 2 * ((1 << bits) - 1)
    side: tl.constexpr = _UNITS * ((1 << (bits - 1)) - 1)
    return tl.where(scale < 0, -side, -half)


@triton.jit
def wide_codes(ratio: tl.tensor, units: tl.tensor) -> tl.tensor:
    """Return the codes of a wide grid, int32, from values in scales without and with dither."""
    fine = nearest(tl.clamp(units * (1.0 / _UNITS), -32768.0, 32768.0))
    coarse = nearest(tl.clamp(ratio * (1.0 / _COARSE), -1.0 * _MOST, 1.0 * _MOST)) * _COARSE
    return tl.where(tl.abs(fine) > _EXACT_CODE, coarse, fine)


@triton.jit
def over_scale(change: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return values in scales; zeros where the scale is 0."""
    return tl.div_rn(change, tl.where(scale == 0, float("inf"), tl.abs(scale)))


@triton.jit
def to_codes(
    change: tl.tensor, scale: tl.tensor, at: tl.tensor, seed: tl.tensor, bits: tl.constexpr
) -> tl.tensor:
    """Return the codes, int32, of a grid of `bits` bits, or of a wide grid for 0 bits."""
    ratio = over_scale(change, scale)
    units = ratio * _UNITS
    if seed is not None:
        units -= (drawn(at, seed) * 2 - 15).to(tl.float32)
    if bits > 0:
        lowest = lowest_of(scale, bits).to(tl.float32)
        above = tl.minimum((units - lowest) * (1.0 / _UNITS), lowest * (-2.0 / _UNITS))
        codes = tl.where(scale == 0, 0, nearest(tl.maximum(above, 0.0)))
    else:
        codes = wide_codes(ratio, units)
    return codes


@triton.jit
def to_values(
    codes: tl.tensor,
    scale: tl.tensor,
    r: tl.tensor,
    shrink: tl.tensor,
    bits: tl.constexpr,
) -> tl.tensor:
    """Return the values of int32 codes: units * (scale / 32), exact. See `to_codes` for `bits`.

    Args:
        codes: Codes.
        scale: Scales of the values.
        r: Dither; None without one.
        shrink: Shift toward zero in units.
        bits: See `to_codes`.
    """
    units = codes * _UNITS
    if bits > 0:
        units += lowest_of(scale, bits)
    else:
        units -= tl.where(codes > 0, shrink, tl.where(codes < 0, -shrink, 0))
    if r is not None:
        units += r * 2 - 15
    if bits == 0:
        units = tl.where(tl.abs(codes) > _EXACT_CODE, (codes & -_COARSE) * _UNITS, units)
    return units.to(tl.float32) * (tl.abs(scale) * (1.0 / _UNITS))


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
    code = to_codes(load_change(x, base, at, is_there), scale_from(row, col), at, seed, bits)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=is_there)


@triton.jit
def load_class(
    classes: tl.tuple, t: tl.tensor, c: tl.tensor, tokens: tl.tensor, channels: tl.tensor
) -> tl.tensor:
    """Load the class of a tile's values, int32: the sum of token's and channel's."""
    of_token = tl.load(classes[0] + t, mask=t < tokens, other=0).to(tl.int32)
    return of_token + tl.load(classes[1] + c, mask=c < channels, other=0).to(tl.int32)


@triton.jit
def store_symbols(
    out: tl.tuple,
    code: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    context: tl.tensor,
    r: tl.tensor,
    slices: tl.tensor,
    low_bits: tl.tensor,
) -> None:
    """Store codes, folded by r if there is dither, with their symbols and contexts."""
    if r is not None:
        code = tl.where(r < 8, -code, code)
        far = tl.minimum(r, 15 - r) >> (_SLICES - slices)
        context = (context << tl.maximum(slices - 1, 0)) + far
    symbol = tl.minimum(tl.maximum(code >> low_bits, -_LARGEST), _LARGEST) + 128
    tl.store(out[0] + at, code.to(tl.int16), mask=is_there)
    tl.store(out[1] + at, symbol.to(tl.uint8), mask=is_there)
    tl.store(out[2] + at, context.to(tl.uint8), mask=is_there)


@triton.jit(do_not_specialize=["seed", "slices", "low_bits"])
def _quantize_symbols(
    out: tl.tuple,
    x: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    classes: tl.tuple,
    seed: tl.tensor,
    slices: tl.tensor,
    low_bits: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    one_row: tl.constexpr,
    one_col: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    t, c = tile_place(height, width)
    at, is_there = t * channels + c, (t < tokens) & (c < channels)
    row, col = load_factor(rows, t, tokens, one_row), load_factor(cols, c, channels, one_col)
    code = to_codes(load_change(x, base, at, is_there), scale_from(row, col), at, seed, 0)
    r = None
    if seed is not None:
        r = drawn(at, seed)
    context = load_class(classes, t, c, tokens, channels)
    store_symbols(out, code, at, is_there, context, r, slices, low_bits)


@triton.jit(do_not_specialize=["seed", "shrink"])
def _dequantize(
    values: tl.tensor,
    codes: tl.tensor,
    base: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    shifts: tl.tensor,
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
    r = None
    if seed is not None:
        r = _shifted(at, seed, shifts, is_there)
    value = to_values(code, scale_from(row, col), r, shrink, bits)
    if base is not None:
        value = tl.load(base + at, mask=is_there, other=0.0) + value
    tl.store(values + at, value, mask=is_there)


def factors_of(scales: Scales) -> tuple[tuple[Tensor, Tensor], tuple[bool, bool]]:
    """Return rows and cols, and whether each of them is shared by all."""
    rows, cols = scales.rows.contiguous(), scales.cols.contiguous()
    return (rows, cols), (len(rows) == 1, len(cols) == 1)


def _seed_of(grid: Grid) -> int | None:
    """Return the grid's seed as a signed number."""
    return None if grid.seed is None else signed(grid.seed)


def signed(seed: int) -> int:
    """Return a seed as a signed 32-bit number, so that all seeds share one compiled kernel."""
    return (seed ^ 1 << 31) - (1 << 31)


# ---- Triton kernels that pack codes: alone, or in one pass with the grid
#
# Knows the planes of `Kernels.pack`: with s = n / 8 they turn eight streams of codes, [8, s],
# into [bits, s] bytes, column by column. In a plane of w bits, row r holds the codes of the
# streams r, r + w, r + 2 w and so on. Knows nothing of what codes mean.

_STREAMS = 8
_BLOCK = 256
"""Codes of each stream in a program; on an H200 packing takes two thirds of the time of 512
(benchmarks/reports/gpu.md)."""


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
    """Load the rows of bytes as int32."""
    rows: tl.tuple = ()
    for r in tl.static_range(bits):
        row = tl.load(packed + r * stride + at, mask=is_there, other=0)
        rows += (row.to(tl.int32),)
    return rows


@triton.jit
def _part_of(rows: tl.tuple, k: tl.constexpr, w: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """Return the bits of stream k's codes in the plane of w bits."""
    byte = rows[bits - (bits & (2 * w - 1)) + k % w]
    return ((byte >> (8 - w - k // w * w)) & ((1 << w) - 1)) << (bits & (w - 1))


@triton.jit
def _code_of(rows: tl.tuple, k: tl.constexpr, bits: tl.constexpr) -> tl.tensor:
    """Return the codes of stream k from the rows of bytes."""
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
        scale = scale_from(load_factor(rows, token, tokens, one_row), col)
        code = to_codes(load_change(x, base, at, is_there), scale, at, seed, bits)
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
        scale = scale_from(load_factor(rows, token, tokens, one_row), col)
        r = None
        if seed is not None:
            r = drawn(at, seed)
        value = to_values(_code_of(lines, k, bits), scale, r, 0, bits)
        if base is not None:
            value = tl.load(base + at, mask=is_there, other=0.0) + value
        tl.store(values + at, value, mask=is_there)


class TritonGrids(Kernels):
    """Part of the backend between values and codes."""

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        packed = torch.empty(packed_bytes(len(codes), bits), dtype=torch.uint8, device=codes.device)
        sizes = len(codes), len(packed) // bits
        launch = _pack[(triton.cdiv(sizes[1], _BLOCK),)]
        with device_of(codes):
            launch(packed, codes.contiguous(), *sizes, bits, _BLOCK, **EXACT)
        return packed

    def unpack(self, packed: Tensor, count: int, bits: int) -> Tensor:
        codes = torch.empty(count, dtype=torch.uint8, device=packed.device)
        sizes = count, packed_bytes(count, bits) // bits
        launch = _unpack[(triton.cdiv(sizes[1], _BLOCK),)]
        with device_of(packed):
            launch(codes, packed.contiguous(), *sizes, bits, _BLOCK, **EXACT)
        return codes

    def quantize(self, x: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        bits = grid.bits if isinstance(grid, NarrowGrid) else 0
        codes = torch.empty(x.shape, dtype=torch.uint8 if bits else torch.int16, device=x.device)
        tensors = codes, x.contiguous(), None if base is None else base.contiguous()
        tile, (factors, are_one) = tile_of(x.shape, _TILE), factors_of(scales)
        launch = _quantize[tiles(x.shape, tile)]
        with device_of(x):
            launch(*tensors, *factors, _seed_of(grid), *x.shape, *are_one, bits, **tile, **EXACT)
        return codes

    def dequantize(self, codes: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        bits = grid.bits if isinstance(grid, NarrowGrid) else 0
        shrink, shifts = (grid.shrink, grid.shifts) if isinstance(grid, WideGrid) else (0, None)
        units = None if shifts is None else shifts.contiguous(), _seed_of(grid), shrink
        values = torch.empty(codes.shape, device=codes.device)
        tensors = values, codes.contiguous(), None if base is None else base.contiguous()
        tile, (factors, are_one) = tile_of(codes.shape, _TILE), factors_of(scales)
        launch = _dequantize[tiles(codes.shape, tile)]
        with device_of(codes):
            launch(*tensors, *factors, *units, *codes.shape, *are_one, bits, **tile, **EXACT)
        return values

    def quantize_symbols(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: WideGrid, coding: Coding
    ) -> tuple[Tensor, Tensor, Tensor]:
        codes = torch.empty(x.numel(), dtype=torch.int16, device=x.device)
        symbols, contexts = (torch.empty_like(codes, dtype=torch.uint8) for _ in range(2))
        values = x.contiguous(), None if base is None else base.contiguous()
        classes = coding.row_classes.contiguous(), coding.col_classes.contiguous()
        numbers = _seed_of(grid), coding.slices, coding.low_bits, *x.shape
        tile, (factors, are_one) = tile_of(x.shape, _TILE), factors_of(scales)
        launch, out = _quantize_symbols[tiles(x.shape, tile)], (codes, symbols, contexts)
        with device_of(x):
            launch(out, *values, *factors, classes, *numbers, *are_one, **tile, **EXACT)
        return out

    def flip_signs(self, codes: Tensor, seed: int, shifts: Tensor | None = None) -> Tensor:
        codes, numbers = codes.contiguous(), (signed(seed), codes.numel())
        turned, launch = torch.empty_like(codes), _turn[(triton.cdiv(codes.numel(), _BLOCK),)]
        where = None if shifts is None else shifts.contiguous()
        with device_of(codes):
            launch(turned, codes, where, *numbers, _BLOCK, **EXACT)
        return turned

    def slice_contexts(self, classes: Tensor, seed: int, slices: int) -> Tensor:
        classes, numbers = classes.contiguous(), (signed(seed), len(classes), slices)
        contexts = torch.empty_like(classes)
        launch = _slice_contexts[(triton.cdiv(len(classes), _BLOCK),)]
        with device_of(classes):
            launch(contexts, classes, *numbers, _BLOCK, **EXACT)
        return contexts

    def quantize_pack(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: NarrowGrid
    ) -> Tensor:
        tokens, channels = x.shape
        if tokens % _STREAMS:
            return super().quantize_pack(x, base, scales, grid)
        size = packed_bytes(x.numel(), grid.bits)
        packed = torch.empty(size, dtype=torch.uint8, device=x.device)
        tensors = packed, x.contiguous(), None if base is None else base.contiguous()
        each, (factors, are_one) = (tokens // _STREAMS, channels), factors_of(scales)
        tile, numbers = tile_of(each, _BLOCK), (_seed_of(grid), *x.shape)
        launch = _quantize_pack[tiles(each, tile)]
        with device_of(x):
            launch(*tensors, *factors, *numbers, *are_one, grid.bits, **tile, **EXACT)
        return packed

    def unpack_dequantize(
        self,
        packed: Tensor,
        shape: tuple[int, int],
        base: Tensor | None,
        scales: Scales,
        grid: NarrowGrid,
    ) -> Tensor:
        tokens, channels = shape
        if tokens % _STREAMS:
            return super().unpack_dequantize(packed, shape, base, scales, grid)
        values = torch.empty(shape, device=packed.device)
        tensors = values, packed.contiguous(), None if base is None else base.contiguous()
        each, (factors, are_one) = (tokens // _STREAMS, channels), factors_of(scales)
        tile, numbers = tile_of(each, _BLOCK), (_seed_of(grid), *shape)
        launch = _unpack_dequantize[tiles(each, tile)]
        with device_of(packed):
            launch(*tensors, *factors, *numbers, *are_one, grid.bits, **tile, **EXACT)
        return values
