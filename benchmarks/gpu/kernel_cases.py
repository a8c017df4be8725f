"""Calls of every kernel, with odd shapes and strangers' bytes, and how near results have to be.

Tensors are on the CPU. What a decoder calls, and what both ends must do alike, is held to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from swarm_ft.codec.kernels.base import (
    SEGMENT,
    SLICES,
    Coded,
    Coding,
    NarrowGrid,
    Scales,
    WideGrid,
    flip_of,
    packed_bytes,
)
from swarm_ft.codec.kernels.reference import ReferenceKernels

Shapes = tuple[tuple[int, int], ...]
SHAPES: Shapes = ((1, 1), (5, 7), (16, 130), (1, 4097), (1024, 33), (257, 1601))
"""Two have tokens in eights: their codes are packed in one pass with the grid."""
AXES = ("rows", "cols", "both", "frame")
NARROW, FEW = range(1, 9), (2, 3, 8)
SEED = 20261126
Difference = Callable[[object, object], str]


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        difference: between what it returned and what it should; empty if there is none.
    """

    kernel: str
    name: str
    args: tuple[Any, ...]
    difference: Difference


@dataclass(frozen=True, slots=True)
class Group:
    """Calls that have something in common.

    Attributes:
        kernels: that are called.
        made: by a generator of numbers that no other group uses.
    """

    kernels: tuple[str, ...]
    made: Callable[[torch.Generator], Iterator[Case]]

    def cases(self, kernel: str = "") -> Iterator[Case]:
        """All, or those of one kernel."""
        for case in self.made(torch.Generator().manual_seed(SEED)):
            if kernel in ("", case.kernel):
                yield case


def groups(*, few: bool) -> dict[str, Group]:
    """All of them by what they have in common; a few small ones, for an interpreter."""
    shapes, axes = (SHAPES[:3], AXES[:2]) if few else (SHAPES, AXES)
    narrow = {
        f"{bits} bits": _narrow(bits, shapes, axes) for bits in NARROW if not few or bits in FEW
    }
    return {
        **dict(sorted(narrow.items(), reverse=True)),  # what takes longest to compile comes first
        "shapes": Group(("moments", "balance", "grid_errors"), partial(_measures, shapes)),
        "wide": Group(("dequantize",), partial(_wide, shapes, axes)),
        "symbols": Group(
            ("decode_symbols", "encode_symbols", "histogram"), partial(_symbols, few=few)
        ),
        "trellis": Group(
            ("trellis_symbols", "shifts_of", "flip_signs", "dequantize", "decode_symbols"),
            partial(_trellis, shapes),
        ),
    }


def cases(*, few: bool) -> Iterator[Case]:
    """Yield the cases of all groups, one after the other."""
    for group in groups(few=few).values():
        yield from group.cases()


def _narrow(bits: int, shapes: Shapes, axes: tuple[str, ...]) -> Group:
    def made(generator: torch.Generator) -> Iterator[Case]:
        for shape in shapes:
            yield from _bytes(bits, shape, generator)
            for axis in axes:
                yield from _grids(bits, shape, axis, generator)

    kernels = "quantize_pack", "unpack_dequantize", "quantize", "dequantize", "pack", "unpack"
    return Group(kernels, made)


def _bytes(bits: int, shape: tuple[int, int], generator: torch.Generator) -> Iterator[Case]:
    count = shape[0] * shape[1]
    name, size = f"{count} of {bits} bits", (packed_bytes(count, bits),)
    packed = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    yield Case("unpack", name, (packed, count, bits), same)
    codes = torch.randint(0, 1 << bits, (count,), generator=generator).to(torch.uint8)
    yield Case("pack", name, (codes, bits), same)


def _grids(
    bits: int, shape: tuple[int, int], axis: str, generator: torch.Generator
) -> Iterator[Case]:
    scales = some_scales(axis, shape, 40 * (bits % 3) - 40, generator)
    base = None if bits % 2 else torch.randn(shape, generator=generator)
    grid = NarrowGrid(bits, 0x9ABCDEF0 + bits if (bits - 1) % 3 else None)
    name = f"{list(shape)}, {bits} bits, scales by {axis}"
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    yield Case("dequantize", name, (codes, base, scales, grid), same)
    size = (packed_bytes(codes.numel(), bits),)
    packed = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    yield Case("unpack_dequantize", name, (packed, shape, base, scales, grid), same)
    x = 4 * torch.randn(shape, generator=generator)
    args = x, base, scales, grid
    yield Case("quantize", name, args, neighbours)
    yield Case("quantize_pack", name, args, partial(packed_neighbours, codes.numel(), bits))


def _wide(shapes: Shapes, axes: tuple[str, ...], generator: torch.Generator) -> Iterator[Case]:
    for shape, axis, (shrink, seed) in product(shapes, axes, ((0, None), (15, None), (0, 77))):
        scales = some_scales(axis, shape, 0, generator)
        codes = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
        args = codes, None, scales, WideGrid(shrink, seed)
        yield Case("dequantize", f"{list(shape)}, wide, {shrink}, {seed}", args, same)


def _trellis(shapes: Shapes, generator: torch.Generator) -> Iterator[Case]:
    for shape, slices in product(shapes, (1, SLICES)):
        name, lanes = f"{list(shape)}, {slices} slices", 1 if shape == (1, 1) else 32
        scales = Scales(torch.ones(1), torch.ones(1))
        x = 3 * torch.randn(shape, generator=generator)
        x.view(-1)[::97] *= 1000
        rows, cols = (torch.randint(0, 8, (n,), generator=generator).to(torch.uint8) for n in shape)
        coding = Coding(rows, cols, slices, 0)
        args = x, None, scales, 77, coding, lanes
        yield Case("trellis_symbols", name, args, paths)
        codes, symbols, contexts, shifts = ReferenceKernels().trellis_symbols(*args)
        yield Case("shifts_of", name, (symbols, lanes), same)
        yield Case("flip_signs", name, (codes, 77, shifts), same)
        grid = WideGrid(seed=77, shifts=shifts)
        yield Case("dequantize", f"{name}, shifted", (codes.view(shape), None, scales, grid), same)
        frequencies, flip = torch.full((15 << slices - 1, 256), 16).int(), flip_of(slices)
        coded = ReferenceKernels().encode_symbols(symbols, contexts, frequencies, lanes)
        unchanged = contexts ^ shifts * flip
        yield Case("decode_symbols", name, (coded, unchanged, frequencies, flip), same)


def _measures(shapes: Shapes, generator: torch.Generator) -> Iterator[Case]:
    for shape in shapes:
        yield from _measures_of(shape, generator)


def _measures_of(shape: tuple[int, int], generator: torch.Generator) -> Iterator[Case]:
    x = torch.randn(shape, generator=generator)
    base = torch.randn(shape, generator=generator)
    covering = (torch.rand(shape[1], generator=generator) + 0.5).bfloat16().float()
    multiples = torch.tensor([1.0, 0.5, -1.0, -0.625])
    for name, other in (("", None), (", base", base)):
        label = f"{list(shape)}{name}"
        yield Case("moments", label, (x, other), near)
        yield Case("balance", label, (x, other, 1 / covering), near)
        yield Case("grid_errors", label, (x, other, covering, multiples, 3), near)


def _symbols(generator: torch.Generator, *, few: bool) -> Iterator[Case]:
    layouts = [(1, 1, 1), (40, 3, 1), (40, 3, 32)]
    if not few:
        layouts += [(SEGMENT + 13, 5, 32), (3 * SEGMENT, 16, 32)]
    for count, num_contexts, lanes in layouts:
        frequencies = some_frequencies(num_contexts, generator)
        contexts = torch.randint(0, num_contexts, (count,), generator=generator).to(torch.uint8)
        ends = frequencies.cumsum(1)[contexts.long()]
        slots = torch.randint(0, 4096, (count, 1), generator=generator).int()
        symbols = torch.searchsorted(ends, slots, right=True)[:, 0].to(torch.uint8)
        name = f"{count} symbols, {lanes} lanes"
        yield Case("histogram", name, (symbols, contexts, num_contexts), same)
        args = symbols, contexts, frequencies, lanes
        yield Case("encode_symbols", name, args, same)
        coded = ReferenceKernels().encode_symbols(*args)
        for damage, hostile in (("intact", coded), *damages(coded, generator)):
            yield Case(
                "decode_symbols", f"{name}, {damage}", (hostile, contexts, frequencies), same
            )


def damages(coded: Coded, generator: torch.Generator) -> Iterator[tuple[str, Coded]]:
    """Yield damaged coded forms whose sizes fit each other, as a stranger might send them."""
    states = torch.randint(0, 2**32, coded.states.shape, generator=generator)
    yield "other states", Coded(states, coded.counts, coded.words)
    words = torch.randint(0, 2**16, (len(coded.words),), generator=generator).int()
    yield "other words", Coded(coded.states, coded.counts, words)
    none = torch.zeros_like(coded.counts)
    yield "no words", Coded(coded.states, none, coded.words[:0])


def some_scales(
    axis: str, shape: tuple[int, int], exponent: int, generator: torch.Generator
) -> Scales:
    """Draw scales of either sign, some of them zero, around 2^exponent."""

    def vector(count: int, power: int) -> Tensor:
        is_nonzero = torch.rand(count, generator=generator) > 0.15
        return (
            (torch.randn(count, generator=generator) * is_nonzero * 2.0**power).bfloat16().float()
        )

    one = torch.ones(1)
    if axis == "both":
        half = exponent // 2
        return Scales(vector(shape[0], half), vector(shape[1], half))
    if axis == "rows":
        return Scales(vector(shape[0], exponent), one)
    return Scales(one, vector(1 if axis == "frame" else shape[1], exponent))


def some_frequencies(num_contexts: int, generator: torch.Generator) -> Tensor:
    """4096 a row over 1 to 256 symbols, often a few that dominate."""
    table = torch.zeros(num_contexts, 256, dtype=torch.int32)
    for row in table:
        used = 1 << int(torch.randint(0, 9, (), generator=generator))
        weights = torch.rand(used, generator=generator).pow(4) + 1e-3
        shares = 1 + (weights / weights.sum() * (4096 - used)).floor().int()
        shares[shares.argmax()] += 4096 - int(shares.sum())
        row[torch.randperm(256, generator=generator)[:used]] = shares
    return table


# ---- how near is near


def same(found: object, expected: object) -> str:
    """Compare to the bit; return the difference, empty if there is none."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if one != other:
                return f"{one}, not {other}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
        elif not torch.equal(_bits(one), _bits(other)):
            return f"{int((_bits(one) != _bits(other)).sum())} of {one.numel()} differ"
    return ""


def near(found: object, expected: object) -> str:
    """Compare within the rounding of another order of sums."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        try:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, check_dtype=False)
        except AssertionError as error:
            return str(error).splitlines()[0]
    return ""


def neighbours(found: object, expected: object) -> str:
    """Codes of the reference, or the next one where a value lies between the two."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return f"{found}, not codes"
    away = (found.int() - expected.int()).abs()
    if int(away.max()) > 1:
        return f"a code is {int(away.max())} away"
    return f"{int(away.sum())} of {away.numel()} codes differ" if away.float().mean() > 0.02 else ""


def paths(found: object, expected: object) -> str:
    """Compare paths of the trellis, which may differ where two choices have equal errors."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return f"{one}, not tensors"
        away = (one.int() - other.int()).count_nonzero() / one.numel()
        if away > 0.02:
            return f"{float(away):.0%} of {one.numel()} differ"
    return ""


def packed_neighbours(count: int, bits: int, found: object, expected: object) -> str:
    """Compare like `neighbours`, for packed codes."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return f"{found}, not bytes"
    if found.shape != expected.shape:
        return f"{list(found.shape)} bytes, not {list(expected.shape)}"
    unpack = ReferenceKernels().unpack
    return neighbours(unpack(found, count, bits), unpack(expected, count, bits))


def flat(x: object) -> Iterator[object]:
    """Yield the tensors and values of a nested result, one after the other."""
    if isinstance(x, tuple):
        for part in x:
            yield from flat(part)
    elif is_dataclass(x):
        yield from (getattr(x, f.name) for f in fields(x))
    else:
        yield x


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32) if x.dtype is torch.float32 else x
