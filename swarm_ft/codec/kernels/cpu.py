"""The Numba backend: kernels for one CPU thread, with tensors as arguments and results.

Checks shapes, because compiled loops check no bounds; the loops are in `cpu_*`. Large results are
in numpy's memory, which uses huge pages: page faults in torch's memory take several times as long
as the computation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.kernels import cpu_entropy, cpu_grid, cpu_trellis
from swarm_ft.codec.kernels.base import (
    PROBABILITY_BITS,
    Coded,
    Coding,
    Grid,
    Kernels,
    NarrowGrid,
    Scales,
    WideGrid,
    block_count,
    flip_of,
    last_code,
    packed_bytes,
    per_reach,
    planes_of,
    scale_of,
    segment_lengths,
)

_MAX_LANES = 32
_SYMBOLS = 256
_FOLD = 512


class NumbaKernels(Kernels):
    """Backend for CPU tensors; inconsistent sizes raise ValueError."""

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        packed = np.empty(packed_bytes(len(codes), bits), np.uint8)
        cpu_grid.pack(_array(codes), bits, packed)
        return torch.from_numpy(packed)

    def unpack(self, packed: Tensor, count: int, bits: int) -> Tensor:
        _check_shape("packed", packed, (packed_bytes(count, bits),))
        codes = np.zeros(count, np.uint8)
        start, source = 0, _array(packed)
        for width, shift in planes_of(bits):
            end = start + packed_bytes(count, width)
            cpu_grid.unpack_plane(source[start:end], width, shift, codes)
            start = end
        return torch.from_numpy(codes)

    def quantize(self, x: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        vectors, values, other = _vectors(scales, x.shape), _array(x), _base(base, x.shape)
        if isinstance(grid, NarrowGrid):
            codes = np.empty(x.shape, np.uint8)
            cpu_grid.quantize_narrow(values, other, vectors, grid.bits, grid.seed, codes)
            return torch.from_numpy(codes)
        wide = np.empty(x.shape, np.int16)
        cpu_grid.quantize_wide(values, other, vectors, grid.seed, wide)
        return torch.from_numpy(wide)

    def quantize_pack(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: NarrowGrid
    ) -> Tensor:
        vectors, values, other = _vectors(scales, x.shape), _array(x), _base(base, x.shape)
        packed = np.empty(packed_bytes(x.numel(), grid.bits), np.uint8)
        cpu_grid.quantize_pack(values, other, vectors, grid.bits, grid.seed, packed)
        return torch.from_numpy(packed)

    def dequantize(self, codes: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        vectors, whole = _vectors(scales, codes.shape), _array(codes)
        other, x = _base(base, codes.shape), np.empty(codes.shape, np.float32)
        if isinstance(grid, NarrowGrid):
            cpu_grid.dequantize_narrow(whole, other, vectors, grid.bits, grid.seed, x)
        else:
            dither = None if grid.seed is None else (grid.seed, _shifts(grid.shifts, codes))
            cpu_grid.dequantize_wide(whole, other, vectors, grid.shrink, dither, x)
        return torch.from_numpy(x)

    def flip_signs(self, codes: Tensor, seed: int, shifts: Tensor | None = None) -> Tensor:
        turned, where = np.empty(codes.shape, np.int16), _shifts(shifts, codes)
        cpu_grid.turn(_array(codes).reshape(-1), seed, where, turned.reshape(-1))
        return torch.from_numpy(turned)

    def slice_contexts(self, classes: Tensor, seed: int, slices: int) -> Tensor:
        contexts = np.empty(len(classes), np.uint8)
        cpu_grid.slice_contexts(_array(classes), seed, slices, contexts)
        return torch.from_numpy(contexts)

    def moments(self, x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, channels = x.shape
        squares = [torch.empty(n, dtype=torch.float64) for n in (tokens, channels)]
        peaks = [torch.empty(n) for n in (tokens, channels)]
        cpu_entropy.moments(
            _array(x),
            _base(base, x.shape),
            *(sums.numpy() for sums in squares),
            *(sizes.numpy().view(np.int32) for sizes in peaks),
        )
        return squares[0], squares[1], peaks[0], peaks[1]

    def balance(
        self, x: Tensor, base: Tensor | None, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.balanced_sample(x, base, inverse, len(x))[:3]

    def balanced_sample(
        self, x: Tensor, base: Tensor | None, inverse: Tensor, every: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, channels = x.shape
        _check_shape("inverse", inverse, (channels,))
        spreads, row_peaks, col_peaks = (torch.empty(n) for n in (tokens, tokens, channels))
        sample = torch.empty(-(-tokens // every), channels)
        cpu_entropy.balance(
            _array(x),
            _base(base, x.shape),
            _array(inverse),
            (spreads.numpy(), row_peaks.numpy().view(np.int32)),
            col_peaks.numpy().view(np.int32),
            (every, sample.numpy()),
        )
        return spreads, row_peaks, col_peaks, sample

    def grid_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        _check_shape("covering", covering, x.shape[1:])
        other = _base(base, x.shape)
        if x.shape[1] == 1 and len(x) > _FOLD:  # one long channel, and loops run along channels
            return self._folded_errors(x, base, covering, multiples, bits)
        errors = torch.empty(len(multiples), x.shape[1])
        cpu_entropy.grid_errors(
            _array(x), other, _array(covering), _array(multiples), bits, errors.numpy()
        )
        return errors

    def _folded_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        rows = len(x) // _FOLD
        folded, rest = slice(rows * _FOLD), slice(rows * _FOLD, None)
        wide = self.grid_errors(
            x[folded].reshape(rows, _FOLD),
            None if base is None else base[folded].reshape(rows, _FOLD),
            covering.expand(_FOLD),
            multiples,
            bits,
        )
        last = self.grid_errors(
            x[rest], None if base is None else base[rest], covering, multiples, bits
        )
        return wide.sum(1, keepdim=True) + last

    def symbols(self, codes: Tensor, low_bits: int) -> Tensor:
        symbols = np.empty(len(codes), np.uint8)
        cpu_grid.to_symbols(_array(codes), low_bits, symbols)
        return torch.from_numpy(symbols)

    def quantize_symbols(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: WideGrid, coding: Coding
    ) -> tuple[Tensor, Tensor, Tensor]:
        _check_shape("row_classes", coding.row_classes, x.shape[:1])
        _check_shape("col_classes", coding.col_classes, x.shape[1:])
        classes = _array(coding.row_classes), _array(coding.col_classes)
        codes = np.empty(x.shape, np.int16)
        symbols, contexts = (np.empty(x.shape, np.uint8) for _ in range(2))
        of, out = (*classes, coding.slices, coding.low_bits), (codes, symbols, contexts)
        other, vectors = _base(base, x.shape), _vectors(scales, x.shape)
        cpu_grid.quantize_symbols(_array(x), other, vectors, grid.seed, of, out)
        flat = [torch.from_numpy(part.reshape(-1)) for part in (codes, symbols, contexts)]
        return flat[0], flat[1], flat[2]

    def trellis_symbols(
        self,
        x: Tensor,
        base: Tensor | None,
        scales: Scales,
        seed: int,
        coding: Coding,
        lanes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _check_lanes(lanes)
        _check_shape("row_classes", coding.row_classes, x.shape[:1])
        _check_shape("col_classes", coding.col_classes, x.shape[1:])
        codes = np.empty(x.numel(), np.int16)
        symbols, contexts, shifts = (np.empty(x.numel(), np.uint8) for _ in range(3))
        of = _array(coding.row_classes), _array(coding.col_classes), coding.slices
        coder, out = (seed, flip_of(coding.slices), lanes), (codes, symbols, contexts, shifts)
        other, vectors = _base(base, x.shape), _vectors(scales, x.shape)
        cpu_trellis.trellis_symbols(_array(x), other, vectors, coder, of, out)
        found = [torch.from_numpy(part) for part in out]
        return found[0], found[1], found[2], found[3]

    def shifts_of(self, symbols: Tensor, lanes: int) -> Tensor:
        _check_lanes(lanes)
        shifts = np.empty(len(symbols), np.uint8)
        cpu_trellis.shifts_of(_array(symbols), lanes, shifts)
        return torch.from_numpy(shifts)

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        counts = torch.empty(num_contexts, _SYMBOLS, dtype=torch.int64)
        of = _contexts(contexts, len(codes), num_contexts)
        cpu_entropy.histogram(_array(codes), of, counts.numpy())
        return counts

    def encode_symbols(
        self, symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int
    ) -> Coded:
        _check_lanes(lanes)
        of, table = _tables(contexts, len(symbols), frequencies)
        segments = len(segment_lengths(len(symbols)))
        states = torch.empty(segments, lanes, dtype=torch.int64)
        counts = torch.empty(segments, dtype=torch.int64)
        words = torch.empty(len(symbols), dtype=torch.int32)  # pages that stay unused cost nothing
        total = cpu_entropy.encode(
            _array(symbols),
            of,
            cpu_entropy.symbol_table(table),
            states.numpy(),
            counts.numpy(),
            words.numpy(),
        )
        return Coded(states, counts, words[:total].clone())

    def decode_symbols(
        self, coded: Coded, contexts: Tensor, frequencies: Tensor, flip: int = 0
    ) -> tuple[Tensor, bool]:
        segments = len(segment_lengths(len(contexts)))
        _check_shape("states", coded.states, (segments, coded.states.shape[1]))
        _check_shape("counts", coded.counts, (segments,))
        of, table = _tables(contexts | flip, len(contexts), frequencies)
        of = _array(contexts)
        slots = np.zeros(len(table) << PROBABILITY_BITS, np.uint32)
        cpu_entropy.slot_table(table, slots)
        symbols = np.empty(len(contexts), np.uint8)
        states = coded.states.clone()  # decoding uses them up
        of_coder = _array(states), _array(coded.counts), _array(coded.words)
        is_intact = cpu_entropy.decode(of_coder, of, slots, flip, symbols)
        return torch.from_numpy(symbols), bool(is_intact)

    def magnitudes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sums, counts = (np.zeros(x.shape[1], np.int32) for _ in range(2))
        largest = np.zeros(1, np.int32)
        cpu_grid.magnitudes(_array(x).view(np.int32), sums, counts, largest)
        peak = torch.from_numpy(largest).view(torch.float32)
        return torch.from_numpy(sums).long(), torch.from_numpy(counts).long(), peak

    def quantize_blocks(self, x: Tensor, channels: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        _check_shape("channels", channels, x.shape[1:])
        blocks = np.empty((len(x), block_count(x.shape[1])), np.int32)
        codes = np.empty(x.shape, np.uint8)
        inverse, reach = _array(1 / scale_of(channels)), np.float32(per_reach(bits))
        cpu_grid.quantize_blocks(_array(x), inverse, reach, last_code(bits), blocks, codes)
        return torch.from_numpy(blocks), torch.from_numpy(codes)

    def dequantize_blocks(
        self, codes: Tensor, blocks: Tensor, channels: Tensor, bits: int
    ) -> Tensor:
        _check_shape("channels", channels, codes.shape[1:])
        _check_shape("blocks", blocks, (len(codes), block_count(codes.shape[1])))
        x = np.empty(codes.shape, np.float32)
        scales = _array(scale_of(blocks)), _array(scale_of(channels))
        cpu_grid.dequantize_blocks(_array(codes), *scales, last_code(bits) + 1, x)
        return torch.from_numpy(x)


def _array(x: Tensor) -> NDArray[Any]:
    """Return the values of x in C order, without a copy if possible."""
    return x.detach().contiguous().numpy()


def _base(base: Tensor | None, shape: torch.Size) -> NDArray[Any] | None:
    if base is None:
        return None
    _check_shape("base", base, shape)
    return _array(base)


def _check_lanes(lanes: int) -> None:
    if lanes < 1 or lanes > _MAX_LANES or lanes & (lanes - 1):
        raise ValueError(f"lanes: expected a power of two up to {_MAX_LANES}, got {lanes}")


def _shifts(shifts: Tensor | None, codes: Tensor) -> NDArray[np.uint8]:
    """Return shifts flat; empty for None."""
    if shifts is None:
        return np.empty(0, np.uint8)
    flat = shifts.reshape(-1)
    _check_shape("shifts", flat, (codes.numel(),))
    return _array(flat)


def _vectors(scales: Scales, shape: torch.Size) -> cpu_grid.ScaleVectors:
    tokens, channels = shape
    if len(scales.rows) not in (1, tokens) or len(scales.cols) not in (1, channels):
        got = f"{len(scales.rows)} rows and {len(scales.cols)} columns"
        raise ValueError(f"scales: {got} do not fit values of [{tokens}, {channels}]")
    return _array(scales.rows), _array(scales.cols.expand(channels))


def _contexts(contexts: Tensor, count: int, num_contexts: int) -> NDArray[np.uint8]:
    _check_shape("contexts", contexts, (count,))
    of = _array(contexts)
    if count and of.max() >= num_contexts:
        raise ValueError(f"contexts: expected less than {num_contexts}, got {of.max()}")
    return of


def _tables(
    contexts: Tensor, count: int, frequencies: Tensor
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    _check_shape("frequencies", frequencies, (len(frequencies), _SYMBOLS))
    return _contexts(contexts, count, len(frequencies)), _array(frequencies)


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: expected {list(shape)}, got {list(x.shape)}")
