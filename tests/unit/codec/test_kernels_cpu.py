"""Checks of the Numba backend alone: sizes, because compiled loops check no bounds."""

from typing import Any

import numpy as np
import pytest
import torch

from swarm_ft.codec.kernels import cpu_plan
from swarm_ft.codec.kernels.base import Coded, Coding, NarrowGrid, Scales, WideGrid
from swarm_ft.codec.kernels.cpu import NumbaKernels
from swarm_ft.codec.kernels.cpu_grid import compiled

ONE = torch.ones(1)
X = torch.ones(3, 4)
CODES = torch.zeros(5, dtype=torch.uint8)
FREQUENCIES = torch.full((2, 256), 16, dtype=torch.int32)
CODED = Coded(torch.full((1, 4), 1 << 16), torch.tensor([0]), torch.zeros(0, dtype=torch.int32))
WIDE = Scales(ONE, ONE), WideGrid()
CODING = Coding(CODES[:3], CODES[:4], 4, 0)
UNFIT = {
    "packed bytes": ("unpack", CODES, 41, 1),
    "a base": ("quantize", X, X[:2], Scales(ONE, ONE), NarrowGrid(2)),
    "rows of scales": ("quantize", X, None, Scales(torch.ones(2), ONE), NarrowGrid(2)),
    "columns of scales": ("dequantize", X.byte(), None, Scales(ONE, torch.ones(3)), NarrowGrid(2)),
    "inverse spreads": ("balanced_sample", X, None, torch.ones(3), 2),
    "covering scales": ("grid_errors", X, None, torch.ones(3), ONE, 2),
    "a context": ("histogram", CODES, CODES + 2, 2),
    "contexts": ("histogram", CODES, CODES[:4], 2),
    "a context to encode": ("encode_symbols", CODES, CODES + 2, FREQUENCIES, 4),
    "a context to decode": ("decode_symbols", CODED, CODES + 2, FREQUENCIES),
    "a changed context": ("decode_symbols", CODED, CODES, FREQUENCIES, 7),
    "frequencies": ("encode_symbols", CODES, CODES, FREQUENCIES[:, :8], 4),
    "lanes": ("encode_symbols", CODES, CODES, FREQUENCIES, 3),
    "states": ("decode_symbols", CODED, CODES.repeat(1 << 14), FREQUENCIES),
    "classes of tokens": ("quantize_symbols", X, None, *WIDE, Coding(CODES, CODES[:4], 0, 0)),
    "classes of channels": ("quantize_symbols", X, None, *WIDE, Coding(CODES[:3], CODES, 0, 0)),
    "lanes of a trellis": ("trellis_symbols", X, None, WIDE[0], 1, CODING, 3),
    "classes of a trellis": ("trellis_symbols", X[:2], None, WIDE[0], 1, CODING, 4),
    "lanes of shifts": ("shifts_of", CODES, 3),
    "shifts": ("dequantize", X.short(), None, WIDE[0], WideGrid(seed=1, shifts=CODES)),
    "shifts of a turn": ("flip_signs", X.short(), 1, CODES),
}


@pytest.mark.parametrize("kernel_and_args", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused(kernel_and_args: tuple[Any, ...]) -> None:
    kernel, *args = kernel_and_args
    with pytest.raises(ValueError, match=r"expected|do not fit"):
        getattr(NumbaKernels(), kernel)(*args)


def test_the_multiple_that_errs_least_is_taken_penalties_included() -> None:
    scales, multiples = np.array([1, 2, 4], np.float32), np.array([1, 0.5, -1], np.float32)
    errors = np.array([[3, 1, 2], [1, 2, 9], [2, 2, 1.5]], np.float32)
    cpu_plan.fit(scales, errors, np.array([0, 1, 0], np.float32), multiples)
    assert scales.tolist() == [0.5, 2, -4]  # of two that err alike, the first


def test_scales_become_the_nearest_bfloat16_within_the_range_of_scales() -> None:
    scales = np.array([1 + 2**-9, -(1 + 3 * 2**-9), 3e38, -3e38, 2.0**-121, -(2.0**-121), 0])
    narrowed = scales.astype(np.float32)
    cpu_plan.to_bfloat16(narrowed, np.float32(2.0**100))
    assert narrowed.tolist() == [1, -(1 + 2**-7), 2.0**100, -(2.0**100), 0, 0, 0]
    assert not np.signbit(narrowed[4:]).any()


def test_a_channels_spread_is_that_of_tokens_brought_to_one() -> None:
    x = np.outer([1, 100], [1, 2, 0, -4]).astype(np.float32)
    inverse = np.empty(4, np.float32)
    cpu_plan.inverse_spreads(x, inverse)
    assert inverse[2] == 0
    np.testing.assert_allclose(inverse[[1, 3]] / inverse[0], [1 / 2, 1 / 4], rtol=1e-6)


def test_counts_beyond_the_words_read_zeros() -> None:
    counts = torch.tensor([1 << 40])
    coded = Coded(CODED.states, counts, CODED.words)
    symbols, is_intact = NumbaKernels().decode_symbols(coded, CODES, FREQUENCIES)
    assert not is_intact
    assert len(symbols) == len(CODES)


def test_decoding_leaves_the_states_as_they_were() -> None:
    coded = NumbaKernels().encode_symbols(CODES, CODES, FREQUENCIES, 4)
    before = coded.states.clone()
    assert NumbaKernels().decode_symbols(coded, CODES, FREQUENCIES)[1]
    assert torch.equal(coded.states, before)


def test_loops_are_compiled_where_no_machine_code_can_be_kept() -> None:
    of_no_file: dict[str, Any] = {}
    exec("def twice(x):\n    return 2 * x", of_no_file)
    twice = compiled(of_no_file["twice"])
    assert twice(21) == 42
    assert twice.signatures  # it is machine code that answered
