"""Ranges of blocks: parsing, bounds and even shares."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.errors import BadLayers
from swarm_ft.protocol.spec.layers import (
    MAX_BLOCKS,
    LayerRange,
    parse_layers,
    parse_trained,
    split_evenly,
)


def test_a_range_is_half_open_and_prints_as_it_parses() -> None:
    layers = parse_layers("12-24")
    assert layers == LayerRange(12, 24)
    assert len(layers) == 12
    assert str(layers) == "12-24"


def test_auto_leaves_the_choice_to_the_coordinator() -> None:
    assert parse_layers("auto") is None


@pytest.mark.parametrize(
    "text", ["", "12", "12-", "-24", "a-b", "1-2-3", " 1-2", "1-2\n", "1234567-1234568", "١-٢"]
)
def test_other_texts_are_told_the_form(text: str) -> None:
    with pytest.raises(BadLayers, match="expected START-STOP, for example 12-24, or 'auto'"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["0-0", "3-3", "4-3", f"0-{MAX_BLOCKS + 1}"])
def test_empty_reversed_and_endless_ranges_are_refused(text: str) -> None:
    with pytest.raises(BadLayers, match=f"layers {text}: expected START-STOP with 0 <= START"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("", (0, 8)), ("0-", (0, 8)), ("3-", (3, 8)), ("3-5", (3, 5))]
)
def test_what_trains_may_go_to_the_end(text: str, expected: tuple[int, int]) -> None:
    assert parse_trained(text, 8) == LayerRange(*expected)


@pytest.mark.parametrize(
    "text", ["8-", "5-3", "3-3", "3-9", "3", "-3", "a-", "3-5-", " 3-", "1234567-"]
)
def test_what_cannot_train_is_told(text: str) -> None:
    with pytest.raises(BadLayers, match=r"expected START- or START-STOP|has blocks 0-8"):
        parse_trained(text, 8)


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(BadLayers):
        LayerRange(-1, 2)


@given(start=st.integers(0, 50), length=st.integers(1, 100), parts=st.integers(1, 100))
@settings(derandomize=True, deadline=None)
def test_even_shares_adjoin_cover_all_and_differ_by_at_most_one(
    start: int, length: int, parts: int
) -> None:
    whole = LayerRange(start, start + length)
    if parts > length:
        with pytest.raises(BadLayers, match=f"expected 1 to {length} stages, .* got {parts}"):
            split_evenly(whole, parts)
        return
    shares = split_evenly(whole, parts)
    assert (shares[0].start, shares[-1].stop) == (whole.start, whole.stop)
    assert all(a.stop == b.start for a, b in pairwise(shares))
    assert len(shares) == parts
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_no_parts_are_refused() -> None:
    with pytest.raises(BadLayers):
        split_evenly(LayerRange(0, 2), 0)
