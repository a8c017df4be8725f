"""The buffer store against a plain model of it."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.ids import BlockIndex, RunId, SampleId
from tests.draws import draws

keys = st.builds(
    BufferKey,
    run_id=st.just(RunId("a")),
    boundary=st.sampled_from([BlockIndex(1), BlockIndex(2)]),
    end=st.sampled_from(End),
    sample=st.sampled_from([SampleId(0), SampleId(1)]),
)
records = st.builds(
    BufferRecord,
    digest=st.binary(min_size=16, max_size=16),
    tokens=st.integers(1, 4),
    channels=st.integers(1, 4),
    payload=st.binary(max_size=20),
)


def key(sample: int = 0, run: str = "a") -> BufferKey:
    return BufferKey(RunId(run), BlockIndex(1), End.SENT, SampleId(sample))


def record(payload: bytes = b"xyz") -> BufferRecord:
    return BufferRecord(digest=b"d" * 16, tokens=1, channels=1, payload=payload)


class StoreMachine(RuleBasedStateMachine):
    """Two dicts model the store."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BufferStore()
        self.committed: dict[BufferKey, BufferRecord] = {}
        self.staged: dict[BufferKey, BufferRecord] = {}

    @rule(key=keys, record=records)
    def stage(self, key: BufferKey, record: BufferRecord) -> None:
        self.store.stage(key, record)
        self.staged[key] = record

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.committed |= self.staged
        self.staged = {}

    @rule()
    def rollback(self) -> None:
        self.store.rollback()
        self.staged = {}

    @rule()
    def lose_staged(self) -> None:
        self.store.lose_staged()
        self.committed = {k: r for k, r in self.committed.items() if k not in self.staged}
        self.staged = {}

    @rule()
    def forget(self) -> None:
        self.store.forget()
        self.committed, self.staged = {}, {}

    @rule(key=keys)
    def get(self, key: BufferKey) -> None:
        assert self.store.get(key) == self.committed.get(key)

    @invariant()
    def counts_are_those_of_the_committed_records(self) -> None:
        assert len(self.store) == len(self.committed)
        stats = self.store.take_stats()
        for boundary in stats:
            mine = {k: r for k, r in self.committed.items() if k.boundary == boundary}
            assert stats[boundary].memory_bytes == sum(len(r.payload) for r in mine.values())
            assert stats[boundary].samples == len({k.sample for k in mine})


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(derandomize=True, deadline=None, max_examples=draws(60))


def test_a_redone_step_starts_from_the_same_bases() -> None:
    store = BufferStore()
    store.stage(key(), record(b"base"))
    store.commit()
    store.stage(key(), record(b"half done"))
    assert store.get(key()) == record(b"base")
    store.rollback()
    store.commit()
    assert store.get(key()) == record(b"base")


def test_both_ends_of_a_boundary_are_kept_apart() -> None:
    store = BufferStore()
    store.stage(key(), record(b"sent"))
    store.stage(key()._replace(end=End.RECEIVED), record(b"received"))
    store.commit()
    assert store.get(key()) == record(b"sent")
    assert store.get(key()._replace(end=End.RECEIVED)) == record(b"received")


def test_threads_lose_no_record_and_no_byte() -> None:
    store = BufferStore()

    def work(thread: int) -> None:
        for i in range(200):
            store.stage(key(sample=1000 * thread + i), record(b"12345"))
            store.commit()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(store) == 800
    assert store.take_stats()[BlockIndex(1)].memory_bytes == 5 * 800


# ---- what a step was given stays until it commits


def test_what_the_open_step_builds_on_can_be_asked_for_again_whatever_goes() -> None:
    first, second = (record(bytes([i]) * 100) for i in (1, 2))
    with contextlib.closing(BufferStore(BufferLimits(memory_bytes=100))) as store:
        store.put(key(1), first)
        assert store.get(key(1)) == first
        store.put(key(2), second)
        assert [k.sample for k in store.take_lost()] in ([1], [2])
        assert store.get(key(1)) == first
        store.commit()
        stored = [sample for sample in (1, 2) if store.get(key(sample)) is not None]
        assert len(stored) == 1


def test_but_a_newer_one_takes_its_place() -> None:
    store = BufferStore(BufferLimits(memory_bytes=100))
    first, newer = (record(bytes([i]) * 100) for i in (1, 2))
    store.put(key(1), first)
    assert store.get(key(1)) == first
    store.put(key(1), newer)
    assert store.get(key(1)) == newer
    store.drop([key(1)])
    assert store.get(key(1)) is None
