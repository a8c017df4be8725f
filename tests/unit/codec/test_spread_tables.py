"""Tables derived from a spread: their sums, their fit to dithered codes, their stability."""

import hashlib

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm_ft.codec.entropy import SYMBOLS
from swarm_ft.codec.kernels.base import LARGEST_SYMBOL, SYMBOL_ZERO, Scales, WideGrid
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.codec.spread_tables import (
    SLICES,
    SPREADS,
    UNDITHERED,
    frequencies,
    nearest_spreads,
    spread_of,
)

ALL_SPREADS = np.repeat(np.arange(SPREADS), SLICES + 1)
ALL_SLICES = np.tile(np.arange(SLICES + 1), SPREADS)


def every_table(largest: int) -> NDArray[np.int32]:
    return frequencies(ALL_SPREADS, ALL_SLICES, np.full(len(ALL_SPREADS), largest))


@pytest.mark.parametrize("largest", [0, 1, 5, 60, LARGEST_SYMBOL])
def test_every_table_adds_up_and_has_just_the_codes_that_occur(largest: int) -> None:
    found = every_table(largest)
    assert (found.sum(1) == 1 << 12).all()
    sizes = np.abs(np.arange(SYMBOLS) - SYMBOL_ZERO)
    assert (found[:, sizes <= largest] >= 1).all()
    assert not found[:, sizes > largest].any()


def test_the_tables_are_the_same_numbers_for_ever() -> None:
    """The reader of a frame computes the tables by itself."""
    tables = every_table(LARGEST_SYMBOL), every_table(3)
    data = b"".join(table.astype("<i4").tobytes() for table in tables)
    assert hashlib.sha256(data).hexdigest()[:16] == "bfededaf6bddf160"


def test_without_dither_a_table_is_symmetric_and_with_it_leans_to_one_side() -> None:
    found = every_table(20).reshape(SPREADS, SLICES + 1, SYMBOLS)
    plain = found[:, UNDITHERED, 1:]
    assert (np.abs(plain - plain[:, ::-1]) <= 1).all()
    narrow = found[0]
    assert (np.diff(narrow[:SLICES, SYMBOL_ZERO - 1]) >= 0).all(), (
        "a dither of a half makes codes of -1"
    )


@pytest.mark.parametrize("number", [2, 8, 14, 20, 30])
def test_codes_of_a_spread_take_about_what_their_entropy_is(number: int) -> None:
    """The most likely spread is also the true one."""
    values = spread_of(number) * torch.randn(4000, 30, generator=torch.Generator().manual_seed(1))
    kernels, grid, one = ReferenceKernels(), WideGrid(seed=5), torch.ones(1)
    units = kernels.dequantize(torch.zeros_like(values).short(), None, Scales(one, 32 * one), grid)
    codes = kernels.quantize(values, None, Scales(one, one), grid)
    turned = torch.where(units < 0, -codes, codes).numpy().astype(np.int64)
    slices = (units.abs().int() // 2).numpy()
    counts = np.zeros((1, SLICES, SYMBOLS), np.int64)
    np.add.at(
        counts[0], (slices, np.clip(turned, -LARGEST_SYMBOL, LARGEST_SYMBOL) + SYMBOL_ZERO), 1
    )
    (found,) = nearest_spreads(counts)
    assert abs(found - number) <= 1
    by = frequencies(np.full(SLICES, found), np.arange(SLICES), np.full(SLICES, LARGEST_SYMBOL))
    coded = -(counts[0] * np.log2(np.maximum(by, 1) / (1 << 12))).sum()
    shares = counts[0] / counts[0].sum(1, keepdims=True)
    entropy = -(counts[0] * np.log2(np.where(shares > 0, shares, 1))).sum()
    escape = 0.15 * counts.sum()  # codes that occur nowhere have a share of the table, too
    assert coded < 1.02 * entropy + escape
