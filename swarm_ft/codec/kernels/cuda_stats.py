"""Triton kernels that look at values and symbols as a whole: moments, errors, counts, rotations.

Programs add up what they see, in an order of their own but always the same: an encoder's bytes do
not change from run to run. Knows no codes and no bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swarm_ft.codec.kernels.cuda_grid import (
    EXACT,
    load_change,
    lowest_of,
    nearest,
    tile_of,
    tile_place,
    tiles,
)

_MOMENTS_TILE = 4096
_ERRORS_TILE = 2048
_CHUNK = 4096
_CHUNKS = 4
_CONTEXTS_AT_ONCE = 16
"""Contexts whose counts fit into a program's registers."""
_ROTATED = 1024
_MOST_ROTATED = 4096
"""Values that a program holds to rotate them."""


@triton.jit
def _peaks(bits: tl.tensor, axis: tl.constexpr) -> tl.tensor:
    """Largest magnitudes from their bits: in the order of the numbers, and NaN beyond infinity."""
    return tl.max(bits, axis=axis).to(tl.float32, bitcast=True)


@triton.jit
def _moments(
    x: tl.tensor,
    base: tl.tensor,
    by_token: tl.tuple,
    by_channel: tl.tuple,
    tokens: tl.tensor,
    channels: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """One tile's sums and peaks, to [tiles across, tokens] and to [tiles downward, channels]."""
    t, c = tile_place(height, width)
    change = load_change(x, base, t * channels + c, (t < tokens) & (c < channels))
    sizes = change.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    wide = change.to(tl.float64)
    squares = wide * wide
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    place = tl.program_id(1) * tl.cast(tokens, tl.int64) + row
    tl.store(by_token[0] + place, tl.sum(squares, axis=1), mask=row < tokens)
    tl.store(by_token[1] + place, _peaks(sizes, 1), mask=row < tokens)
    col = tl.program_id(1) * width + tl.arange(0, width)
    place = tl.program_id(0).to(tl.int64) * channels + col
    tl.store(by_channel[0] + place, tl.sum(squares, axis=0), mask=col < channels)
    tl.store(by_channel[1] + place, _peaks(sizes, 0), mask=col < channels)


@triton.jit
def _grid_errors(
    errors: tl.tensor,
    x: tl.tensor,
    base: tl.tensor,
    covering: tl.tensor,
    multiples: tl.tensor,
    num_multiples: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    bits: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """One tile's sums for all multiples, to errors [tiles downward, multiples, channels]."""
    t, c = tile_place(height, width)
    is_there = (t < tokens) & (c < channels)
    change = load_change(x, base, t * channels + c, is_there)
    change = tl.div_rn(change, tl.load(covering + c, mask=c < channels, other=1.0))
    col = tl.program_id(1) * width + tl.arange(0, width)
    for k in range(num_multiples):
        multiple = tl.load(multiples + k)
        size = tl.abs(multiple)
        low = lowest_of(multiple, bits).to(tl.float32) * (1.0 / 32)
        above = tl.minimum(change * (1.0 / size) - low, -2 * low)
        codes = nearest(tl.maximum(above, 0.0)).to(tl.float32)
        error = tl.where(is_there, (codes + low) * size - change, 0.0)
        place = (tl.program_id(0).to(tl.int64) * num_multiples + k) * channels + col
        tl.store(errors + place, tl.sum(error * error, axis=0), mask=col < channels)


@triton.jit
def _histogram(
    counts: tl.tensor,
    codes: tl.tensor,
    contexts: tl.tensor,
    count: tl.tensor,
    num_contexts: tl.tensor,
    bins: tl.constexpr,
    chunk: tl.constexpr,
    chunks: tl.constexpr,
) -> None:
    """Counts of some chunks, for as many contexts as `bins` has room for."""
    first = tl.program_id(1) * bins
    begin = tl.program_id(0).to(tl.int64) * chunk * chunks
    seen = tl.zeros([bins], tl.int32)
    for k in range(chunks):
        at = begin + k * chunk + tl.arange(0, chunk)
        code = tl.load(codes + at, mask=at < count, other=0).to(tl.int32)
        place = tl.load(contexts + at, mask=at < count, other=0).to(tl.int32) * 256 + code - first
        seen += tl.histogram(place, bins, mask=(at < count) & (place >= 0) & (place < bins))
    place = first + tl.arange(0, bins)
    is_some = (seen > 0) & (place < num_contexts * 256)
    tl.atomic_add(counts + place, seen.to(tl.int64), mask=is_some, sem="relaxed")


@triton.jit
def _hadamard(
    y: tl.tensor, x: tl.tensor, count: tl.tensor, stages: tl.constexpr, log_block: tl.constexpr
) -> None:
    """Butterflies of strides 1 to 2^(stages - 1), in a block seen as a cube of two each way."""
    block: tl.constexpr = 1 << log_block
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    cube = tl.reshape(tl.load(x + at, mask=at < count, other=0.0), [2] * log_block)
    for i in tl.static_range(stages):
        bits = cube.to(tl.int32, bitcast=True)
        both = tl.sum(bits, axis=log_block - 1 - i, keep_dims=True)
        other = (both - bits).to(tl.float32, bitcast=True)
        is_second = tl.reshape(tl.arange(0, 2), [1] * (log_block - 1 - i) + [2] + [1] * i) == 1
        cube = tl.where(is_second, other - cube, cube + other)
    tl.store(y + at, tl.reshape(cube, [block]), mask=at < count)


def moments(x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `Kernels.moments`."""
    tokens, channels = x.shape
    tile = tile_of(x.shape, _MOMENTS_TILE)
    grid = downward, across = tiles(x.shape, tile)
    shapes = (across, tokens), (downward, channels)
    sums = [torch.empty(shape, dtype=torch.float64, device=x.device) for shape in shapes]
    peaks = [torch.empty(shape, device=x.device) for shape in shapes]
    by_token, by_channel = zip(sums, peaks, strict=True)
    base = None if base is None else base.contiguous()
    _moments[grid](x.contiguous(), base, by_token, by_channel, tokens, channels, **tile, **EXACT)
    return sums[0].sum(0), sums[1].sum(0), peaks[0].amax(0), peaks[1].amax(0)


def grid_errors(
    x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
) -> Tensor:
    """See `Kernels.grid_errors`."""
    tile = tile_of(x.shape, _ERRORS_TILE)
    grid = tiles(x.shape, tile)
    errors = torch.empty((grid[0], len(multiples), x.shape[1]), device=x.device)
    x, base = x.contiguous(), None if base is None else base.contiguous()
    table = covering.contiguous(), multiples.contiguous(), len(multiples)
    _grid_errors[grid](errors, x, base, *table, *x.shape, bits, **tile, **EXACT)
    return errors.sum(0)


def histogram(codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
    """See `Kernels.histogram`."""
    counts = torch.zeros((num_contexts, 256), dtype=torch.int64, device=codes.device)
    at_once = min(triton.next_power_of_2(num_contexts), _CONTEXTS_AT_ONCE)
    grid = triton.cdiv(len(codes), _CHUNK * _CHUNKS), triton.cdiv(num_contexts, at_once)
    read = codes.contiguous(), contexts.contiguous(), len(codes), num_contexts
    _histogram[grid](counts, *read, at_once * 256, _CHUNK, _CHUNKS, **EXACT)
    return counts


def hadamard(x: Tensor, tile: int) -> Tensor:
    """See `Kernels.hadamard`; the strides that are too wide for a program are done by torch."""
    x = x.contiguous()
    y, inside = torch.empty_like(x), min(tile, _MOST_ROTATED)
    block = max(inside, _ROTATED)
    stages, log_block = inside.bit_length() - 1, block.bit_length() - 1
    _hadamard[(triton.cdiv(x.numel(), block),)](y, x, x.numel(), stages, log_block, **EXACT)
    while inside < tile:
        pairs = y.view(-1, 2, inside)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        inside *= 2
    return y.view(x.shape)
