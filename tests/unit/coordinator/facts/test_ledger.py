"""The ledger of buffers, against a dictionary that does the same."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarm_ft.coordinator.facts.ledger import CHUNK_SAMPLES, MAX_NUMBERED, Ledger, Side, change_of
from swarm_ft.ids import BlockIndex, PeerId, SampleId
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.messages.reports import SampleSet
from swarm_ft.protocol.spec.layers import LayerRange
from tests.draws import draws

NUM_SAMPLES = 2 * CHUNK_SAMPLES + 9
A, A2, B, B2, C = (PeerId(name) for name in ("a", "a2", "b", "b2", "c"))
STAGES = ((A, A2), (B, B2), (C,))
BOUNDARIES = (BlockIndex(3), BlockIndex(5))
Model: TypeAlias = dict[tuple[BlockIndex, Side, SampleId], PeerId]

samples_drawn = st.lists(
    st.integers(0, NUM_SAMPLES - 1).map(SampleId), min_size=1, max_size=12, unique=True
)
routes_drawn = st.tuples(*(st.sampled_from(peers) for peers in STAGES))
ends = st.sampled_from(
    [
        (BOUNDARIES[0], Side.UPSTREAM, A),
        (BOUNDARIES[0], Side.UPSTREAM, A2),
        (BOUNDARIES[0], Side.DOWNSTREAM, B2),
        (BOUNDARIES[1], Side.UPSTREAM, B),
        (BOUNDARIES[1], Side.DOWNSTREAM, C),
    ]
)


def pipeline(peers: Sequence[tuple[PeerId, ...]] = STAGES) -> list[Stage]:
    edges = (0, *BOUNDARIES, 8)
    return [
        Stage(layers=LayerRange(edges[i], edges[i + 1]), peers=names)
        for i, names in enumerate(peers)
    ]


class LedgerMachine(RuleBasedStateMachine):
    """The ledger, a dictionary, and every earlier ledger."""

    @initialize()
    def begin(self) -> None:
        self.ledger = Ledger.empty(BOUNDARIES, NUM_SAMPLES)
        self.model: Model = {}
        self.older: list[tuple[Ledger, int]] = []

    def _becomes(self, ledger: Ledger) -> None:
        self.older.append((self.ledger, hash(self.ledger)))
        self.ledger = ledger

    @rule(samples=samples_drawn, routes=st.lists(routes_drawn, min_size=12, max_size=12))
    def commit(self, samples: list[SampleId], routes: list[tuple[PeerId, PeerId, PeerId]]) -> None:
        along = dict(zip(samples, routes, strict=False))
        self._becomes(self.ledger.after(along))
        for sample, route in along.items():
            for i, boundary in enumerate(BOUNDARIES):
                self.model[boundary, Side.UPSTREAM, sample] = route[i]
                self.model[boundary, Side.DOWNSTREAM, sample] = route[i + 1]

    @rule(end=ends, samples=samples_drawn)
    def lose(self, end: tuple[BlockIndex, Side, PeerId], samples: list[SampleId]) -> None:
        boundary, _, peer = end
        self._becomes(self.ledger.without(peer, boundary, SampleSet.of(samples)))
        self._forget(peer, lambda where, sample: where == boundary and sample in samples)

    @rule(peer=st.sampled_from([A, B, C, PeerId("stranger")]), samples=samples_drawn)
    def come_back(self, peer: PeerId, samples: list[SampleId]) -> None:
        inventory = {BOUNDARIES[1 if peer != A else 0]: SampleSet.of(samples)}
        self._becomes(self.ledger.with_inventory(peer, inventory))
        self._forget(peer, lambda where, sample: where not in inventory or sample not in samples)

    def _forget(self, peer: PeerId, is_gone: Callable[[BlockIndex, SampleId], bool]) -> None:
        self.model = {
            (boundary, side, sample): holder
            for (boundary, side, sample), holder in self.model.items()
            if holder != peer or not is_gone(boundary, sample)
        }

    @invariant()
    def entries_are_those_of_the_model(self) -> None:
        entries = self.ledger.all_entries()
        assert entries.shape == (NUM_SAMPLES, len(BOUNDARIES), 2)
        known = {
            (BOUNDARIES[column], Side(side), sample): self.ledger.peers[int(number) - 1]
            for (sample, column, side), number in np.ndenumerate(entries)
            if number
        }
        assert known == self.model
        assert (self.ledger.entries([SampleId(70), SampleId(1)]) == entries[[70, 1]]).all()

    @invariant()
    def what_was_kept_is_as_it_was(self) -> None:
        assert all(hash(ledger) == before for ledger, before in self.older)

    @invariant()
    def a_change_makes_one_of_the_other(self) -> None:
        before = self.older[-1][0] if self.older else None
        change = change_of(before, self.ledger)
        chunks = list((before or Ledger.empty(BOUNDARIES, NUM_SAMPLES)).chunks)
        for place, chunk in change.chunks:
            chunks[place] = chunk
        assert tuple(chunks) == self.ledger.chunks
        assert (change.peers or (before and before.peers) or ()) == self.ledger.peers


LedgerMachine.TestCase.settings = settings(
    derandomize=True, max_examples=draws(60), stateful_step_count=20, deadline=None
)
TestLedgerAgainstADictionary = LedgerMachine.TestCase


@pytest.fixture
def ledger() -> Ledger:
    return Ledger.empty(BOUNDARIES, NUM_SAMPLES)


def test_a_sample_is_buffered_where_both_ends_are_in_the_pipeline(ledger: Ledger) -> None:
    ledger = ledger.after(
        {SampleId(0): (A, B, C), SampleId(1): (A2, B, C), SampleId(2): (A, B2, C)}
    )
    assert ledger.buffered(pipeline()) == {3: 3, 5: 3}
    assert ledger.buffered(pipeline(((A,), (B, PeerId("new")), (C,)))) == {3: 1, 5: 2}
    lost = ledger.without(B, BOUNDARIES[1], SampleSet.of([SampleId(0)]))
    assert lost.buffered(pipeline()) == {3: 3, 5: 2}


def test_a_commit_copies_no_more_than_the_chunks_of_its_samples(ledger: Ledger) -> None:
    after = ledger.after({SampleId(0): (A, B, C), SampleId(1): (A, B, C)})
    assert [old is new for old, new in zip(ledger.chunks, after.chunks, strict=True)] == [
        False,
        True,
        True,
    ]
    assert change_of(ledger, after).chunks == ((0, after.chunks[0]),)


def test_who_finds_no_number_is_nobody(ledger: Ledger) -> None:
    peers = {
        sample: (PeerId(f"a{sample}"), PeerId(f"b{sample}"), C)
        for sample in map(SampleId, range(2))
    }
    crowd = tuple(PeerId(f"peer-{i}") for i in range(MAX_NUMBERED - 2))
    full = Ledger(
        boundaries=BOUNDARIES, num_samples=NUM_SAMPLES, peers=crowd, chunks=ledger.chunks
    ).after(peers)
    assert len(full.peers) == MAX_NUMBERED
    assert full.entries([SampleId(0)])[0].tolist() == [
        [MAX_NUMBERED - 1, MAX_NUMBERED],
        [MAX_NUMBERED, 0],
    ]
    assert full.entries([SampleId(1)])[0].tolist() == [[0, 0], [0, 0]]


def test_other_boundaries_are_another_ledger(ledger: Ledger) -> None:
    before = ledger.after({SampleId(0): (A, B, C)})
    change = change_of(before, Ledger.empty((BlockIndex(4),), NUM_SAMPLES))
    assert change.is_new
    assert change.chunks == ()
    assert change.peers == ()


def test_nothing_changes_where_nobody_lost_anything(ledger: Ledger) -> None:
    before = ledger.after({SampleId(0): (A, B, C)})
    assert before.without(A2, BOUNDARIES[0], SampleSet.of([SampleId(0)])) == before
    samples = SampleSet.of([SampleId(0), SampleId(5)])
    assert before.with_inventory(A, {BOUNDARIES[0]: samples}) is before
