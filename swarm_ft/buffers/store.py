"""One peer's buffers by sample, in memory and on disk: the threads around what `Tiers` decides.

Knows bytes and steps' outcomes; knows no tensors and no wire.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

import numpy as np

from swarm_ft.buffers.disk import BufferDirectory, DiskTier
from swarm_ft.buffers.memory import MemoryTier, UnknownVisits, Visits
from swarm_ft.buffers.records import (
    BufferKey,
    BufferLimits,
    BufferRecord,
    End,
    Index,
    Samples,
    ShelfName,
)
from swarm_ft.buffers.slab import Broken, Owner, SlabError
from swarm_ft.buffers.tiers import ReadJob, Tiers
from swarm_ft.errors import InternalError
from swarm_ft.ids import BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.reports import BufferCounts
from swarm_ft.sealing import Sealer


class BufferStore:
    """Buffers as of the last committed step, and beside them those the open step made.

    Until a step commits it can be redone, and must then start from the same bases: so `get`
    never shows what the open step staged. Safe to use from several threads. `get`, `put`,
    `records` and `flush` may wait for the disk; nothing else does.

    Args:
        limits: of memory and disk. Without arguments the store is in memory and has no bounds.
        directory: of the disk tier; None is none. One process at a time uses it.
        run_id, identity: the run and its spec's digest; other runs' files are not used. Without
            them the run is that of the first record.
        sealer: encrypts what is on disk; None leaves it as it is.
        visits: the order to come: what is needed last goes first.
        threads: write behind and read ahead by themselves; without, `write_next` and `read_next`
            have to be called.

    Raises:
        BadOption: the directory cannot be used, or is in use.
    """

    def __init__(  # noqa: PLR0913 - a store by itself needs none of them
        self,
        limits: BufferLimits | None = None,
        *,
        directory: Path | None = None,
        run_id: RunId | None = None,
        identity: bytes = bytes(16),
        sealer: Sealer | None = None,
        visits: Visits | None = None,
        threads: bool = True,
    ) -> None:
        limits, visits = limits or BufferLimits(), visits or UnknownVisits()
        self._run_id = run_id
        self._index = Index()
        self._disk: DiskTier | None = None
        if directory is not None:
            owner = Owner(run_id or RunId(""), identity, sealer)
            opened = BufferDirectory(directory, owner)
            self._disk = DiskTier(
                opened, owner, limits.disk_bytes, visits=visits, index=self._index
            )
        memory = MemoryTier(limits.memory_bytes, visits)
        self._tiers = Tiers(memory, self._disk, self._index, visits)
        self._changed = threading.Condition()
        self._closing = False
        self._reads_under_way = self._writes_under_way = 0
        self._threads: list[threading.Thread] = []
        if self._disk is not None and threads:
            self._start("buffers-write", lambda: self._tiers.has_writes, self.write_next)
            self._start("buffers-read", lambda: self._tiers.has_reads, self.read_next)

    # ---- records

    def get(self, key: BufferKey) -> BufferRecord | None:
        """The committed record, if there is one; read from disk if need be, and verified.

        Until the next commit it is then here for certain, since a step may have to be redone.
        """
        record, event = self._look_up(key, lend=True)
        with self._changed:
            self._tiers.count(key, event)
        return record

    def put(self, key: BufferKey, record: BufferRecord) -> None:
        """Hold a committed record that came from elsewhere, in place of what there is.

        Waits for the disk where it would otherwise push out what is still to be written.
        """
        self._check(key)
        size = len(record.payload)
        while self._should_write_first(size) and self.write_next():
            pass
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._writes_under_way and self._tiers.should_write_first(size))
            )
            self._tiers.put(key, record)
            self._changed.notify_all()

    def stage(self, key: BufferKey, record: BufferRecord) -> None:
        """Keep what the open step made of a buffer; staged again, the last one counts."""
        self._check(key)
        with self._changed:
            self._tiers.stage(key, record)

    def commit(self, step: StepNumber | None = None) -> None:
        """The step counts: all staged records take the place of the committed ones.

        A record that no later step visits is dropped.

        Args:
            step: which; the one after the last if it is not said.
        """
        with self._changed:
            self._tiers.commit(self._tiers.step + 1 if step is None else step)
            self._changed.notify_all()

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """The step is to be redone, but for these samples: all other staged records vanish."""
        with self._changed:
            self._tiers.rollback(but)

    def lose_staged(self) -> None:
        """The step counts, but what it staged cannot be kept: of these there is no record now."""
        with self._changed:
            self._tiers.lose_staged()

    def drop(self, keys: Iterable[BufferKey]) -> None:
        """Let go of committed records that are out of date."""
        with self._changed:
            self._tiers.drop(keys)

    def resume_at(self, step: StepNumber) -> None:
        """The run goes on with this step, wherever it was: visits from here on are to come."""
        with self._changed:
            self._tiers.move_to(step - 1)

    def prefetch(self, keys: Iterable[BufferKey]) -> None:
        """Soon these will be asked for, in this order: read what is on disk, while there is room.

        Room is made only for a record that is needed earlier than what goes for it.
        """
        with self._changed:
            if self._disk is not None:
                self._tiers.want(keys)
                self._changed.notify_all()

    # ---- what there is

    def samples(self, boundary: BlockIndex, end: End) -> Samples:
        """Samples of which there is a committed record, rising; int64 [n]."""
        with self._changed:
            if self._run_id is None:
                return np.empty(0, np.int64)
            return self._index.samples(ShelfName(self._run_id, boundary, end))

    def keys(self) -> list[BufferKey]:
        """Of all committed records."""
        with self._changed:
            return list(self._index.keys())

    def records(self) -> Iterator[tuple[BufferKey, BufferRecord]]:
        """All committed records, one after the other, as they are when their turn comes."""
        for key in self.keys():
            record, _ = self._look_up(key)
            if record is not None:
                yield key, record

    def take_lost(self) -> list[BufferKey]:
        """Keys of committed records that were evicted or found broken since the last call."""
        with self._changed:
            return self._tiers.take_lost()

    def take_stats(self) -> dict[BlockIndex, BufferCounts]:
        """By boundary; events are counted since the last call."""
        with self._changed:
            return self._tiers.take_stats()

    def __len__(self) -> int:
        """How many committed records there are."""
        with self._changed:
            return self._index.num_held

    # ---- the whole

    def forget(self) -> None:
        """Drop all records, committed and staged, and this run's files."""
        with self._changed:
            self._tiers.forget()

    def flush(self) -> None:
        """Wait until all that is committed is written, or cannot be."""
        while self.write_next():
            pass
        with self._changed:
            self._changed.wait_for(
                lambda: not self._tiers.has_writes and not self._writes_under_way
            )

    def close(self) -> None:
        """Write what is to be written, end the threads and let the directory go."""
        self.flush()
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._reads_under_way)
            if self._disk is not None:
                self._disk.close()

    # ---- reads and writes

    @property
    def tiers(self) -> Tiers:
        """What decides, for whoever does its reads and writes by hand: without threads only."""
        return self._tiers

    @property
    def disk(self) -> DiskTier | None:
        """What lies on disk, if anything may; to be looked at without threads only."""
        return self._disk

    def write_next(self) -> bool:
        """Write one record that waits for it; False if none does."""
        with self._changed:
            job = None if self._closing else self._tiers.start_write()
            if job is None:
                self._changed.notify_all()
                return False
            self._writes_under_way += 1
        error: OSError | SlabError | None = OSError("the writer failed")
        try:
            error = job.run()
        finally:
            with self._changed:
                self._writes_under_way -= 1
                self._tiers.finish_write(job, error)
                self._changed.notify_all()
        return True

    def read_next(self) -> bool:
        """Read one record that will be asked for; False if there is none to read."""
        with self._changed:
            job = None if self._closing else self._tiers.start_read()
            if job is None:
                return False
            self._reads_under_way += 1
        result = self._run(job)
        with self._changed:
            self._tiers.finish_read(job, result)
        return True

    def _look_up(self, key: BufferKey, *, lend: bool = False) -> tuple[BufferRecord | None, str]:
        while True:
            with self._changed:
                found = self._tiers.find(key)
                if isinstance(found, BufferRecord):
                    if lend:
                        self._tiers.lend(key, found)
                    return found, "memory_hits"
                if found is None or self._closing:
                    return None, "misses"
                self._reads_under_way += 1
            result = self._run(found)
            with self._changed:
                if not self._tiers.is_current(found):
                    continue  # a newer version came meanwhile, or it was moved or dropped
                if isinstance(result, BufferRecord):
                    if lend:
                        self._tiers.lend(key, result)
                    return result, "disk_hits"
                self._tiers.found_broken(found, result)
                return None, "misses"

    def _run(self, job: ReadJob) -> BufferRecord | Broken:
        try:
            return job.run()
        finally:
            with self._changed:
                self._reads_under_way -= 1
                self._changed.notify_all()

    def _start(self, name: str, has_work: Callable[[], bool], work: Callable[[], bool]) -> None:
        def run() -> None:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or has_work())
                    if self._closing:
                        return
                work()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _should_write_first(self, num_bytes: int) -> bool:
        with self._changed:
            return self._tiers.should_write_first(num_bytes)

    def _check(self, key: BufferKey) -> None:
        self._run_id = self._run_id or key.run_id
        if key.run_id != self._run_id:
            raise InternalError(f"a buffer of run {key.run_id} in the store of {self._run_id}")
