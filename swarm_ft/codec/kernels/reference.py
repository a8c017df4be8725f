"""The specification of all kernels, in plain torch: clear and slow, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_ft.codec.kernels.base import (
    COARSE,
    EXACT_CODE,
    LARGEST_SYMBOL,
    MAX_CODE,
    MIN_STATE,
    PROBABILITY_BITS,
    SLICES,
    UNITS,
    Coded,
    Coding,
    Grid,
    Kernels,
    NarrowGrid,
    Scales,
    WideGrid,
    flip_of,
    lanes_of,
    planes_of,
)

_MASK = 0xFFFFFFFF
_TOTAL = 1 << PROBABILITY_BITS
_NEVER = 1e4
"""Cost above the squared errors, in scales, that another path can save."""


def mix(index: Tensor, seed: int) -> Tensor:
    """Return 32 well-mixed bits of an index below 2^32, as int64 (the finaliser of MurmurHash3)."""
    h = ((index * 0x9E3779B1) & _MASK) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def drawn(like: Tensor, seed: int, shifts: Tensor | None = None) -> Tensor:
    """Return the r of the dither, 0 to 15: uint8 of like's shape."""
    index = torch.arange(like.numel(), device=like.device).view(like.shape)
    r = (mix(index, seed) >> 28).to(torch.uint8)
    return r if shifts is None else r ^ shifts.view(like.shape) << 3


def scale_table(scales: Scales) -> Tensor:
    """Return the scale of each value, float32, of a shape that broadcasts to [tokens, channels]."""
    return (scales.rows[:, None] * scales.cols[None, :]).to(torch.bfloat16).float()


def grid_limits(bits: int, on_zero: Tensor) -> tuple[Tensor, Tensor]:
    """Return the units of the first and last code of narrow grids, by zero on the grid."""
    half, side = UNITS // 2 * ((1 << bits) - 1), UNITS * ((1 << bits - 1) - 1)
    lowest = torch.where(on_zero, -side, -half)
    return lowest, -lowest


class ReferenceKernels(Kernels):
    """Backend in plain torch."""

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        padded = torch.nn.functional.pad(codes, (0, -len(codes) % 8))
        planes = []
        for width, shift in planes_of(bits):
            parts = ((padded >> shift) & ((1 << width) - 1)).view(8 // width, -1)
            plane = torch.zeros_like(parts[0])
            for part in parts:
                plane = (plane << width if width < 8 else plane) | part
            planes.append(plane)
        return torch.cat(planes)

    def unpack(self, packed: Tensor, count: int, bits: int) -> Tensor:
        padded = -(-count // 8) * 8
        codes = torch.zeros(padded, dtype=torch.uint8, device=packed.device)
        start = 0
        for width, shift in planes_of(bits):
            plane = packed[start : start + padded * width // 8]
            start += len(plane)
            parts = [plane >> (8 - width * (k + 1)) for k in range(8 // width)]
            codes |= (torch.cat(parts) & ((1 << width) - 1)) << shift
        return codes[:count]

    def quantize(self, x: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        change = x if base is None else x - base
        table = scale_table(scales)
        size = torch.where(table == 0, torch.inf, table.abs())
        units = change / size * UNITS - self._units(x, grid)
        if isinstance(grid, NarrowGrid):
            lowest, _ = grid_limits(grid.bits, table < 0)
            codes = ((units - lowest) / UNITS).round().clamp(0, (1 << grid.bits) - 1)
            codes = torch.minimum(codes, -2 * torch.where(table < 0, lowest, -(2**20)) / UNITS)
            return torch.where(table == 0, 0, codes).to(torch.uint8)
        nearest = (units / UNITS).round()
        coarse = ((change / size) / COARSE).round() * COARSE
        codes = torch.where(nearest.abs() > EXACT_CODE, coarse, nearest)
        return codes.clamp(-MAX_CODE, MAX_CODE).to(torch.int16)

    def dequantize(self, codes: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        table = scale_table(scales)
        whole = codes.to(torch.int32)
        dither = self._units(codes, grid).to(torch.int32)
        if isinstance(grid, NarrowGrid):
            lowest, _ = grid_limits(grid.bits, table < 0)
            units = whole * UNITS + lowest.to(torch.int32) + dither
        else:
            units = whole * UNITS - grid.shrink * whole.sign() + dither
            coarse = UNITS * (whole & -COARSE)
            units = torch.where(whole.abs() > EXACT_CODE, coarse, units)
        values = units.float() * (table.abs() / UNITS)
        return values if base is None else base + values

    def flip_signs(self, codes: Tensor, seed: int, shifts: Tensor | None = None) -> Tensor:
        return torch.where(drawn(codes, seed, shifts) < 8, -codes, codes)

    def slice_contexts(self, classes: Tensor, seed: int, slices: int) -> Tensor:
        far = drawn(classes, seed)
        far = torch.minimum(far, 15 - far) >> (SLICES - slices)
        return (classes << slices - 1) + far

    def moments(self, x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        change = x if base is None else x - base
        squares, sizes = change.double().square(), change.abs()
        return squares.sum(1), squares.sum(0), sizes.amax(1), sizes.amax(0)

    def grid_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        change = (x if base is None else x - base) / covering
        errors = []
        for multiple in multiples:
            lowest, _ = grid_limits(bits, multiple < 0)
            low, size = lowest / UNITS, multiple.abs()
            codes = (change / size - low).round().clamp(torch.zeros_like(low), -2 * low)
            errors.append((((codes + low) * size) - change).square().sum(0))
        return torch.stack(errors)

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        bins = contexts.long() * 256 + codes
        return torch.bincount(bins, minlength=num_contexts * 256).view(num_contexts, 256)

    def encode_symbols(
        self, symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int
    ) -> Coded:
        starts = frequencies.cumsum(1) - frequencies
        rows, is_there = (
            lanes_of(symbols, lanes).long(),
            _is_there(len(symbols), lanes, symbols.device),
        )
        of = (lanes_of(contexts, lanes).long(), rows)
        frequency, start = frequencies[of].long(), starts[of].long()
        states = torch.full_like(frequency[:, 0], MIN_STATE)
        words, emits = torch.zeros_like(frequency), torch.zeros_like(is_there)
        for row in reversed(range(rows.shape[1])):
            f, is_active = frequency[:, row].clamp(min=1), is_there[:, row]
            emits[:, row] = is_active & (states >= f << (32 - PROBABILITY_BITS))
            words[:, row] = states & 0xFFFF
            states = torch.where(emits[:, row], states >> 16, states)
            coded = (states // f << PROBABILITY_BITS) + states % f + start[:, row]
            states = torch.where(is_active, coded, states)
        return Coded(states, emits.sum((1, 2)), words[emits].to(torch.int32))

    def decode_symbols(
        self, coded: Coded, contexts: Tensor, frequencies: Tensor, flip: int = 0
    ) -> tuple[Tensor, bool]:
        lanes, device = coded.states.shape[1], contexts.device
        ends, states = coded.counts.cumsum(0)[:, None], coded.states
        at, words = ends - coded.counts[:, None], torch.cat([coded.words, coded.words.new_zeros(1)])
        rows, is_there = lanes_of(contexts, lanes).long(), _is_there(len(contexts), lanes, device)
        starts, symbol_of = (frequencies.cumsum(1) - frequencies).long(), _slots(frequencies)
        symbols = torch.zeros_like(rows)
        shift = before = torch.zeros_like(states)
        for row in range(rows.shape[1]):
            context, is_active = rows[:, row] ^ shift * flip, is_there[:, row]
            slot = states & (_TOTAL - 1)
            symbol = symbol_of[context, slot]
            shift, before = before ^ symbol & 1, shift
            symbols[:, row] = symbol
            f, start = frequencies[context, symbol].long(), starts[context, symbol]
            states = torch.where(is_active, f * (states >> PROBABILITY_BITS) + slot - start, states)
            reads = is_active & (states < MIN_STATE)
            position = at + reads.cumsum(1) - reads.long()
            word = words[position.where(position < ends, len(words) - 1)].long()
            states = torch.where(reads, states << 16 | word, states)
            at = at + reads.sum(1, keepdim=True)
        is_intact = bool((at == ends).all()) and bool((states == MIN_STATE).all())
        return symbols[is_there].to(torch.uint8), is_intact

    def trellis_symbols(
        self,
        x: Tensor,
        base: Tensor | None,
        scales: Scales,
        seed: int,
        coding: Coding,
        lanes: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        change = x if base is None else x - base
        ratio = (change / scale_table(scales)).clamp(-MAX_CODE, MAX_CODE).reshape(-1)
        r = drawn(ratio, seed)
        dithers = torch.stack([(2.0 * (r ^ shift << 3) - 15) / UNITS for shift in (0, 1)])
        ways = ratio - dithers
        off_even = (ways - 2 * (ways / 2).round()).abs()
        errors = torch.stack((off_even, 1 - off_even), 1).square()  # [shift, lowest bit, n]
        is_large = ratio.abs() > LARGEST_SYMBOL - 1
        errors[:, 0, is_large] = _NEVER  # the symbols of all larger codes are odd
        of_lanes = torch.stack([lanes_of(e, lanes) for e in errors.view(4, -1)])
        exists = _is_there(len(ratio), lanes, x.device)
        path = _best_path(of_lanes.view(2, 2, *exists.shape), exists)
        shifts, lowest = (part[exists].to(torch.uint8) for part in path)
        chosen = ways.gather(0, shifts.long()[None])[0]
        codes = ((chosen - lowest) / 2).round() * 2 + lowest
        apart = self.quantize(x, base, scales, WideGrid(seed=seed, shifts=shifts)).reshape(-1)
        is_apart = is_large & (codes.abs() > LARGEST_SYMBOL)
        codes = self.flip_signs(torch.where(is_apart, apart, codes.to(torch.int16)), seed, shifts)
        contexts = self.slice_contexts(coding.classes(), seed, coding.slices)
        flips = shifts * flip_of(coding.slices)
        return codes, self.symbols(codes, 0), contexts ^ flips, shifts

    def _units(self, like: Tensor, grid: Grid) -> Tensor:
        if grid.seed is None:
            return torch.zeros((1, 1), device=like.device)
        shifts = grid.shifts if isinstance(grid, WideGrid) else None
        return drawn(like, grid.seed, shifts).float() * 2 - 15


def _best_path(errors: Tensor, is_there: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shifts and lowest bits, int64 [segments, rows, lanes], with the least total error.

    A state is the shift of a value and that of the value before it in the lane.

    Args:
        errors: [shift, lowest bit, segments, rows, lanes].
        is_there: Mask of existing values, [segments, rows, lanes].
    """
    costs = torch.full((2, 2, *is_there[:, 0].shape), _NEVER, device=errors.device)
    costs[0, 0] = 0
    befores = []
    for row in range(errors.shape[3]):
        is_active, of_row = is_there[:, row], errors[:, :, :, row]
        # The axes are [next, shift, before]; the lowest bit is the difference of next and before.
        ways = torch.stack((costs + of_row, costs + of_row.flip(1)))
        least, before = ways.min(2)
        befores.append(before)
        costs = torch.where(is_active, least - least.amin((0, 1)), costs)
    shifts, bits = (torch.zeros_like(is_there, dtype=torch.int64) for _ in range(2))
    ends = costs.flatten(0, 1).argmin(0)
    after, shift = ends >> 1, ends & 1
    for row in reversed(range(errors.shape[3])):
        is_active, states = is_there[:, row], befores[row].flatten(0, 1)
        before = states.gather(0, (after * 2 + shift)[None])[0]
        shifts[:, row], bits[:, row] = shift, before ^ after
        after, shift = torch.where(is_active, shift, after), torch.where(is_active, before, shift)
    return shifts, bits


def _is_there(count: int, lanes: int, device: torch.device) -> Tensor:
    return lanes_of(torch.ones(count, dtype=torch.uint8, device=device), lanes).bool()


def _slots(frequencies: Tensor) -> Tensor:
    """Return the symbol of each of the 4096 slots: int64 [contexts, 4096]."""
    ends = frequencies.cumsum(1)
    slots = torch.arange(_TOTAL, device=frequencies.device).expand(len(ends), -1).contiguous()
    return torch.searchsorted(ends.long(), slots, right=True).clamp(max=255)
