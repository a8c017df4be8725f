"""The contract of the rANS coder in `Kernels`: every backend produces the same bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.kernels.base import MIN_STATE, SEGMENT, Coded
from tests.conformance.conftest import Backend
from tests.draws import draws

FEW = settings(max_examples=draws(25), deadline=None, derandomize=True)

SEEDS = st.integers(0, 2**32 - 1)
CODED = st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(0, 9), st.integers(1, 32))
"""Lanes, full rows of them, and symbols of the last row, if lanes are so many."""
INTERPRETED = pytest.param("triton", marks=[pytest.mark.slow, pytest.mark.variant])
"""A segment takes half a minute in the interpreter."""


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_frequencies(contexts: int, generator: torch.Generator) -> Tensor:
    """4096 a row over 1 to 256 symbols, often a few that dominate."""
    rows = []
    for _ in range(contexts):
        used = 1 << int(torch.randint(0, 9, (), generator=generator))
        weights = torch.rand(used, generator=generator).pow(4) + 1e-3
        shares = 1 + (weights / weights.sum() * (4096 - used)).floor().int()
        shares[shares.argmax()] += 4096 - int(shares.sum())
        row = torch.zeros(256, dtype=torch.int32)
        row[torch.randperm(256, generator=generator)[:used]] = shares
        rows.append(row)
    return torch.stack(rows)


def some_symbols(
    count: int, frequencies: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw symbols by their frequencies, and their contexts."""
    num = len(frequencies)
    contexts = torch.randint(0, num, (count,), generator=generator).to(torch.uint8)
    ends = frequencies.cumsum(1)[contexts.long()]
    slots = torch.randint(0, 4096, (count, 1), generator=generator).int()
    return torch.searchsorted(ends, slots, right=True)[:, 0].to(torch.uint8), contexts


def some_stream(
    seed: int, layout: tuple[int, int, int], num_contexts: int, coder: Backend
) -> tuple[Tensor, Tensor, Tensor, Coded]:
    generator, (lanes, rows, rest) = drawn(seed), layout
    count = lanes * rows + min(lanes, rest)
    frequencies = some_frequencies(num_contexts, generator)
    symbols, contexts = some_symbols(count, frequencies, generator)
    return (
        symbols,
        contexts,
        frequencies,
        coder("encode_symbols", symbols, contexts, frequencies, lanes),
    )


@FEW
@given(CODED, st.integers(1, 5), SEEDS)
def test_decode_reads_what_encode_wrote(
    backend: Backend, layout: tuple[int, int, int], num_contexts: int, seed: int
) -> None:
    symbols, contexts, frequencies, coded = some_stream(seed, layout, num_contexts, backend)
    decoded, is_intact = backend("decode_symbols", coded, contexts, frequencies)
    assert is_intact
    assert torch.equal(decoded, symbols)


@FEW
@given(CODED, st.sampled_from([0, 1, 3, 7]), SEEDS)
def test_decode_finds_the_contexts_that_symbols_before_change(
    backend: Backend, layout: tuple[int, int, int], flip: int, seed: int
) -> None:
    """A symbol's context follows from the symbols before it in its lane, as along a trellis."""
    symbols, contexts, frequencies, _ = some_stream(seed, layout, 8, backend)
    flips = backend("shifts_of", symbols, layout[0]) * flip
    changed = torch.where(frequencies[(contexts ^ flips).long(), symbols.long()] > 0, contexts, 8)
    sure = torch.zeros(16, 256, dtype=torch.int32)
    sure[:8] = frequencies
    sure[8:] = 16  # for symbols that the changed context has not
    coded = backend("encode_symbols", symbols, changed ^ flips, sure, layout[0])
    decoded, is_intact = backend("decode_symbols", coded, changed, sure, flip)
    assert is_intact
    assert torch.equal(decoded, symbols)


@FEW
@given(CODED, st.integers(1, 5), SEEDS)
def test_symbols_are_coded_alike(
    fast: Backend, reference: Backend, layout: tuple[int, int, int], num_contexts: int, seed: int
) -> None:
    *_, expected = some_stream(seed, layout, num_contexts, reference)
    *_, coded = some_stream(seed, layout, num_contexts, fast)
    assert torch.equal(coded.states, expected.states)
    assert torch.equal(coded.counts, expected.counts)
    assert torch.equal(coded.words, expected.words)


@pytest.mark.parametrize("fast", ["numba", INTERPRETED], indirect=True)
def test_segments_are_coded_alike(fast: Backend, reference: Backend) -> None:
    layout = (32, SEGMENT // 32 + 2, 13)
    symbols, contexts, frequencies, expected = some_stream(4, layout, 3, reference)
    coded = fast("encode_symbols", symbols, contexts, frequencies, 32)
    assert coded.counts.tolist() == expected.counts.tolist()
    assert torch.equal(coded.states, expected.states)
    assert torch.equal(coded.words, expected.words)
    decoded, is_intact = fast("decode_symbols", coded, contexts, frequencies)
    assert is_intact
    assert torch.equal(decoded, symbols)
    moved = coded.counts + torch.tensor([-1, 1])
    hostile = Coded(coded.states, moved, coded.words)
    assert not fast("decode_symbols", hostile, contexts, frequencies)[1]


DAMAGES = ["word", "state", "fewer words", "more words", "no words", "all random"]


def damaged(coded: Coded, damage: str, generator: torch.Generator) -> Coded:
    """The coded form as a stranger might send it; its sizes still fit each other."""
    states, words = coded.states.clone(), coded.words.clone()
    if damage == "word" and len(words):
        words[torch.randint(0, len(words), (), generator=generator)] ^= 1 << int(
            torch.randint(0, 16, (), generator=generator)
        )
    if damage in ("state", "all random"):
        states = torch.randint(0, 2**32, states.shape, generator=generator)
        states[0, 0] = [0, 1, MIN_STATE, 2**32 - 1][int(states[0, 0]) % 4]
    if damage == "all random":
        words = torch.randint(0, 2**16, (len(words),), generator=generator).int()
    num_words = {"fewer words": len(words) // 2, "no words": 0}.get(damage, len(words))
    words = words[:num_words]
    if damage == "more words":
        words = torch.cat([words, torch.zeros(3, dtype=torch.int32)])
    return Coded(states, torch.tensor([len(words)]), words)


@settings(FEW, max_examples=draws(40))
@given(CODED, st.sampled_from(DAMAGES), SEEDS)
def test_damage_gets_one_verdict(
    fast: Backend, reference: Backend, layout: tuple[int, int, int], damage: str, seed: int
) -> None:
    _, contexts, frequencies, coded = some_stream(seed, layout, 2, reference)
    hostile = damaged(coded, damage, drawn(seed))
    flip = seed & 1
    expected, was_intact = reference("decode_symbols", hostile, contexts, frequencies, flip)
    decoded, is_intact = fast("decode_symbols", hostile, contexts, frequencies, flip)
    assert is_intact == was_intact
    assert torch.equal(decoded, expected)
    assert not (is_intact and damage == "more words")
