"""What is of the Numba backend alone: sizes are checked, since compiled loops look at no bounds."""

from typing import Any

import pytest
import torch

from swarm_ft.codec.kernels.base import Coded, Coding, NarrowGrid, Scales, WideGrid
from swarm_ft.codec.kernels.cpu import NumbaKernels
from swarm_ft.codec.kernels.cpu_grid import compiled

ONE = torch.ones(1)
X = torch.ones(3, 4)
CODES = torch.zeros(5, dtype=torch.uint8)
FREQUENCIES = torch.full((2, 256), 16, dtype=torch.int32)
CODED = Coded(torch.full((1, 4), 1 << 16), torch.tensor([0]), torch.zeros(0, dtype=torch.int32))
WIDE = Scales(ONE, ONE), WideGrid()
UNFIT = {
    "packed bytes": ("unpack", CODES, 41, 1),
    "a base": ("quantize", X, X[:2], Scales(ONE, ONE), NarrowGrid(2)),
    "rows of scales": ("quantize", X, None, Scales(torch.ones(2), ONE), NarrowGrid(2)),
    "columns of scales": ("dequantize", X.byte(), None, Scales(ONE, torch.ones(3)), NarrowGrid(2)),
    "covering scales": ("grid_errors", X, None, torch.ones(3), ONE, 2),
    "a context": ("histogram", CODES, CODES + 2, 2),
    "contexts": ("histogram", CODES, CODES[:4], 2),
    "a context to encode": ("encode_symbols", CODES, CODES + 2, FREQUENCIES, 4),
    "a context to decode": ("decode_symbols", CODED, CODES + 2, FREQUENCIES),
    "frequencies": ("encode_symbols", CODES, CODES, FREQUENCIES[:, :8], 4),
    "lanes": ("encode_symbols", CODES, CODES, FREQUENCIES, 3),
    "states": ("decode_symbols", CODED, CODES.repeat(1 << 14), FREQUENCIES),
    "classes of tokens": ("quantize_symbols", X, None, *WIDE, Coding(CODES, CODES[:4], 0, 0)),
    "classes of channels": ("quantize_symbols", X, None, *WIDE, Coding(CODES[:3], CODES, 0, 0)),
    "tiles": ("hadamard", X, 3),
}


@pytest.mark.parametrize("kernel_and_args", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_refused(kernel_and_args: tuple[Any, ...]) -> None:
    kernel, *args = kernel_and_args
    with pytest.raises(ValueError, match=r"expected|do not fit"):
        getattr(NumbaKernels(), kernel)(*args)


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
