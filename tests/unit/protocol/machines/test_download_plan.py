"""Assignment of chunks to sources that may be slow or die."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.download import MAX_RANGE_CHUNKS, DownloadPlan
from tests.draws import draws

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def bring(plan: DownloadPlan, source: PeerId, wanted: Iterable[int]) -> None:
    for index in wanted:
        assert plan.wants(source, index)
        plan.received(index)


def test_one_source_brings_all_of_it_in_order() -> None:
    plan = DownloadPlan(100, [A])
    brought: list[int] = []
    while wanted := plan.next_range(A):
        assert len(wanted) <= MAX_RANGE_CHUNKS
        bring(plan, A, wanted)
        brought += wanted
    assert plan.is_complete
    assert brought == list(range(100))


def test_sources_get_different_chunks_and_less_towards_the_end() -> None:
    plan = DownloadPlan(64, [A, B])
    sizes: list[int] = []
    seen: list[int] = []
    while not plan.is_complete:
        for source in (A, B):
            wanted = plan.next_range(source)
            sizes.append(len(wanted))
            seen += wanted
            bring(plan, source, wanted)
    assert sorted(seen) == list(range(64))
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_here_already_is_not_asked_for() -> None:
    plan = DownloadPlan(10, [A], present=[0, 1, 4, 9])
    requested: list[int] = []
    while wanted := plan.next_range(A):
        requested += wanted
        bring(plan, A, wanted)
    assert requested == [2, 3, 5, 6, 7, 8]
    assert plan.is_complete


@pytest.mark.parametrize("present", [range(3), []])
def test_nothing_is_asked_for_when_nothing_is_missing(present: Collection[int]) -> None:
    plan = DownloadPlan(len(present), [A], present=present)
    assert plan.is_complete
    assert not plan.next_range(A)


def test_a_free_source_takes_over_the_second_half_of_the_longest_range() -> None:
    plan = DownloadPlan(40, [A, B])
    first = plan.next_range(A)
    second: range | None = plan.next_range(B)
    while second:
        bring(plan, B, second)
        second = plan.next_range(B) if plan.num_missing > len(first) else None
    assert (first, plan.num_missing) == (range(10), 10)
    plan.received(0)
    stolen = plan.next_range(B)
    assert stolen == range(6, 10)
    assert [index for index in first if plan.wants(A, index)] == [1, 2, 3, 4, 5]
    bring(plan, B, stolen)
    assert plan.next_range(B) == range(4, 6)


def test_of_a_single_chunk_the_first_to_bring_it_counts() -> None:
    plan = DownloadPlan(1, [A, B, C])
    assert plan.next_range(A) == plan.next_range(B) == range(1)
    assert not plan.next_range(C)
    plan.received(0)
    assert plan.is_complete
    assert not plan.wants(A, 0)
    plan.received(0)
    assert not plan.next_range(A)


def test_a_dropped_sources_chunks_are_for_the_others() -> None:
    plan = DownloadPlan(8, [A, B])
    lost = plan.next_range(A)
    plan.received(lost[0])
    plan.drop(A)
    assert not plan.wants(A, lost[1])
    brought: list[int] = []
    while wanted := plan.next_range(B):
        bring(plan, B, wanted)
        brought += wanted
    assert sorted(brought) == list(range(1, 8))


def test_a_chunk_that_another_one_brings_too_is_not_given_out_a_third_time() -> None:
    plan = DownloadPlan(1, [A, B, C])
    plan.next_range(A)
    plan.next_range(B)
    plan.drop(A)
    assert plan.next_range(C) == range(1)
    plan.drop(B)
    plan.drop(C)
    assert plan.num_missing == 1


def test_who_asks_again_before_all_was_brought_gets_the_rest() -> None:
    plan = DownloadPlan(8, [A, B])
    wanted = plan.next_range(A)
    plan.received(wanted[0])
    assert plan.next_range(A) == wanted[1:]


class Race:
    """Sources of several speeds on a virtual clock; some die, after so many chunks."""

    def __init__(
        self,
        num_chunks: int,
        present: Collection[int],
        seconds_per_chunk: Sequence[float],
        deaths: Sequence[int | None],
    ) -> None:
        self.sources = [PeerId(f"source {i}") for i in range(len(seconds_per_chunk))]
        self.plan = DownloadPlan(num_chunks, self.sources, present=present)
        self.speed = dict(zip(self.sources, seconds_per_chunk, strict=True))
        self.deaths = dict(zip(self.sources, deaths, strict=True))
        self.brought = dict.fromkeys(self.sources, 0)
        self.now_s = 0.0
        self.events: list[tuple[float, int, PeerId, int]] = []
        self.idle: set[PeerId] = set()

    def run(self) -> None:
        for source in self.sources:
            self.request(source)
        while self.events and not self.plan.is_complete:
            self.now_s, _, source, index = heapq.heappop(self.events)
            if self.brought[source] == self.deaths[source]:
                self.plan.drop(source)
            else:
                self.brought[source] += 1
                self.plan.received(index)
                self.request(source)
            for other in sorted(self.idle):
                self.request(other)

    def request(self, source: PeerId) -> None:
        self.idle.discard(source)
        wanted = self.plan.next_range(source)
        if not wanted:
            self.idle.add(source)
            return
        done_s = self.now_s + self.speed[source]
        heapq.heappush(self.events, (done_s, len(self.events), source, wanted[0]))


@settings(derandomize=True, deadline=None, max_examples=draws(150))
@given(
    num_chunks=st.integers(0, 120),
    present=st.sets(st.integers(0, 119)),
    sources=st.lists(
        st.tuples(st.floats(0.1, 100.0), st.none() | st.integers(0, 30)), min_size=1, max_size=6
    ),
)
def test_it_ends_well_while_one_source_lives_and_no_chunk_is_lost(
    num_chunks: int, present: set[int], sources: list[tuple[float, int | None]]
) -> None:
    race = Race(num_chunks, present, *zip(*sources, strict=True))
    race.run()
    if any(death is None for _, death in sources):
        assert race.plan.is_complete
    # At most one chunk, which two sources fetched at once, arrived twice.
    missing = len(set(range(num_chunks)) - present)
    twice = sum(race.brought.values()) - (missing - race.plan.num_missing)
    assert 0 <= twice <= 2 * len(sources)


def test_a_slow_source_holds_nobody_up() -> None:
    draw = random.Random(3)
    speeds = [1.0, 1.0, 50.0]
    draw.shuffle(speeds)
    race = Race(200, (), speeds, [None] * 3)
    race.run()
    # Two fast sources alone would need 100 s.
    assert race.now_s <= 102.0


def test_a_source_twice_as_fast_brings_twice_as_much() -> None:
    race = Race(300, (), [1.0, 2.0], [None, None])
    race.run()
    fast, slow = race.brought.values()
    assert fast / slow == pytest.approx(2.0, rel=0.05)
    assert race.now_s <= 203.0
