"""Permutation computed element by element: one to one, both ways, pinned, and fair."""

import math
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.digest import digest_of
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES
from swarm_ft.protocol.spec.training_plan import Permutation


@given(size=st.integers(1, 3000), salt=st.binary(max_size=4))
@settings(derandomize=True, deadline=None)
def test_every_element_comes_once_and_its_place_is_found_again(size: int, salt: bytes) -> None:
    permutation, places = Permutation(size, salt), np.arange(size)
    elements = permutation.at(places)
    assert np.array_equal(np.sort(elements), places)
    assert np.array_equal(permutation.places_of(elements), places)


@given(size=st.integers(1, MAX_SAMPLES), places=st.lists(st.integers(0), min_size=1, max_size=9))
@settings(derandomize=True, deadline=None)
def test_places_of_any_size_are_found_again(size: int, places: list[int]) -> None:
    indices = np.array([place % size for place in places])
    permutation = Permutation(size, b"any")
    elements = permutation.at(indices)
    assert ((elements >= 0) & (elements < size)).all()
    assert np.array_equal(permutation.places_of(elements), indices)


def test_an_element_does_not_depend_on_what_else_is_asked_for() -> None:
    permutation = Permutation(100_000, b"0/0")
    whole = permutation.at(np.arange(100_000))
    assert np.array_equal(whole[70_000:70_064], permutation.at(np.arange(70_000, 70_064)))


PINNED = {
    6: "0a04729a8db008050427e8aaf29311bc",
    1000: "515816715a2d9996551ee73ea343ecb7",
    MAX_SAMPLES - 77: "39bb1ce2832ac02d9816f1eab5219c39",
}


@pytest.mark.parametrize("size", PINNED)
def test_permutations_are_pinned(size: int) -> None:
    """All machines must draw the same with any numpy: otherwise raise RunSpec's VERSION."""
    first = Permutation(size, b"3/1").at(np.arange(min(size, 100_000)))
    assert digest_of(first.astype("<u4").tobytes()).hex() == PINNED[size]


def chi_squared(counts: list[float], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


def test_all_orders_of_a_few_samples_are_equally_likely() -> None:
    draws, size = 1_200, 4
    orders = (Permutation(size, b"%d" % draw).at(np.arange(size)) for draw in range(draws))
    seen = Counter(tuple(order.tolist()) for order in orders)
    freedom = math.factorial(size) - 1
    counts = [float(seen[order]) for order in permutations(range(size))]
    # Five standard deviations above the mean.
    assert chi_squared(counts, draws / (freedom + 1)) < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_in_the_file_are_no_neighbours_in_the_order() -> None:
    """Differences of successive elements are spread like random ones, by sixteenths."""
    size = 1 << 18
    order = Permutation(size, b"0/0").at(np.arange(size))
    steps = (np.diff(order) % size) * 16 // size
    counts = np.bincount(steps, minlength=16).astype(float).tolist()
    assert chi_squared(counts, (size - 1) / 16) < 15 + 5 * math.sqrt(30)


def test_memory_is_that_of_the_result() -> None:
    places = np.arange(1_000_000)
    tracemalloc.start()
    try:
        Permutation(MAX_SAMPLES, b"0/0").at(places)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < places.nbytes + (4 << 20)
