"""Sets of samples are sets, and only their shortest bitmap counts as one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.ids import SampleId
from swarm_ft.protocol.messages.reports import Bitmap, SampleSet

some_samples = st.frozensets(st.integers(0, 300), max_size=40)


@given(some_samples)
def test_it_holds_what_it_was_made_of(samples: frozenset[SampleId]) -> None:
    made = SampleSet.of(samples)
    assert list(made) == sorted(samples)
    assert len(made) == len(samples)
    assert {s for s in range(-1, 400) if s in made} == samples
    assert made == SampleSet.of(np.array(sorted(samples, reverse=True), np.int64))
    assert Bitmap(301).refusal(made.bitmap) is None


@given(some_samples.filter(bool))
def test_samples_that_there_are_not_are_refused(samples: frozenset[SampleId]) -> None:
    made = SampleSet.of(samples)
    words = Bitmap(max(samples)).refusal(made.bitmap)
    assert words is not None
    assert f"last sample of {max(samples)}" in words


@given(some_samples)
def test_a_longer_bitmap_of_the_same_set_is_refused(samples: frozenset[SampleId]) -> None:
    words = Bitmap(1 << 24).refusal(SampleSet.of(samples).bitmap + b"\0")
    assert words is not None
    assert "without zeros" in words


def test_a_million_samples_take_an_eighth_of_a_megabyte() -> None:
    assert len(SampleSet.of(np.arange(10**6)).bitmap) == 125_000
