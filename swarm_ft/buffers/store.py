"""A peer's buffers by sample, in memory and on disk: the threads and locks around `Tiers`.

The store handles bytes and the outcomes of steps; it imports no tensors and no network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

import numpy as np

from swarm_ft.base.sealing import Sealer
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
from swarm_ft.buffers.slab import Broken, SlabError, SlabIdentity
from swarm_ft.buffers.tiers import ReadJob, Tiers
from swarm_ft.errors import InternalError
from swarm_ft.ids import BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.reports import BufferCounts


class BufferStore:
    """Buffers as of the last committed step, beside those that the open step staged.

    A step can be redone until it commits, and must then start from the same buffers. So `get` never
    returns what the open step staged. The store is safe to use from several threads. `get`, `put`,
    `records` and `flush` may wait for the disk; other methods do not.

    Args:
        limits: Limits of memory and disk. Without arguments the store is in memory and has no
            limits.
        directory: Directory of the disk tier, used by one process at a time; None: no disk tier.
        run_id: Run of the records; None takes the run of the first record.
        identity: Digest of the run's spec, 16 bytes. Files of other runs and specs are not used.
        sealer: Encrypts records on disk; None stores them in plain.
        visits: Order in which samples are needed; records that are needed last are evicted first.
        threads: Whether threads write behind and read ahead. Otherwise the caller calls
            `write_next` and `read_next`.

    Raises:
        BadOption: The directory cannot be used, or is in use.
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
            owner = SlabIdentity(run_id or RunId(""), identity, sealer)
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
        """Return the committed record, read from disk and verified if necessary; None if missing.

        The record then stays available until the next commit, since a step may have to be redone.
        """
        record, event = self._look_up(key, pin=True)
        with self._changed:
            self._tiers.count(key, event)
        return record

    def put(self, key: BufferKey, record: BufferRecord) -> None:
        """Insert a committed record that came from another peer, in place of an older one.

        The call waits for the disk where it would otherwise evict records that are not written yet.
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
        """Store a buffer of the open step; a second record of a key replaces the first."""
        self._check(key)
        with self._changed:
            self._tiers.stage(key, record)

    def commit(self, step: StepNumber | None = None) -> None:
        """Commit the open step: staged records replace the committed ones.

        A record that no later step visits is dropped.

        Args:
            step: Number of the committed step; None: the one after the last.
        """
        with self._changed:
            self._tiers.commit(self._tiers.step + 1 if step is None else step)
            self._changed.notify_all()

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """Discard all staged records except those of the samples in `but`, to redo the step."""
        with self._changed:
            self._tiers.rollback(but)

    def lose_staged(self) -> None:
        """Drop the staged records and the committed ones that they would replace.

        This is for a step that committed, but whose staged records cannot be kept.
        """
        with self._changed:
            self._tiers.lose_staged()

    def drop(self, keys: Iterable[BufferKey]) -> None:
        """Drop committed records that are out of date."""
        with self._changed:
            self._tiers.drop(keys)

    def resume_at(self, step: StepNumber) -> None:
        """Continue the run with `step`, wherever it was before, and look up later visits again."""
        with self._changed:
            self._tiers.seek(step - 1)

    def prefetch(self, keys: Iterable[BufferKey]) -> None:
        """Read records ahead that will be requested soon, in this order, while memory has room.

        Only records that are needed later are evicted for them.
        """
        with self._changed:
            if self._disk is not None:
                self._tiers.prefetch(keys)
                self._changed.notify_all()

    # ---- inventory

    def samples(self, boundary: BlockIndex, end: End) -> Samples:
        """Return the samples that have a committed record at this end, rising; int64 [n]."""
        with self._changed:
            if self._run_id is None:
                return np.empty(0, np.int64)
            return self._index.samples(ShelfName(self._run_id, boundary, end))

    def keys(self) -> list[BufferKey]:
        """Return the keys of all committed records."""
        with self._changed:
            return list(self._index.keys())

    def records(self) -> Iterator[tuple[BufferKey, BufferRecord]]:
        """Yield all committed records, each as it is when the iteration reaches it."""
        for key in self.keys():
            record, _ = self._look_up(key)
            if record is not None:
                yield key, record

    def take_lost(self) -> list[BufferKey]:
        """Return the keys of records that were evicted or found damaged since the last call."""
        with self._changed:
            return self._tiers.take_lost()

    def take_stats(self) -> dict[BlockIndex, BufferCounts]:
        """Return counts by boundary; events are counted since the last call."""
        with self._changed:
            return self._tiers.take_stats()

    def __len__(self) -> int:
        with self._changed:
            return self._index.num_records

    # ---- the whole

    def forget(self) -> None:
        """Drop all records, committed and staged, and delete this run's files."""
        with self._changed:
            self._tiers.forget()

    def flush(self) -> None:
        """Wait until all committed records are on disk, or cannot be written."""
        while self.write_next():
            pass
        with self._changed:
            self._changed.wait_for(
                lambda: not self._tiers.has_writes and not self._writes_under_way
            )

    def close(self) -> None:
        """Flush, end the threads and release the directory."""
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
        """The decisions behind the store, for callers that run without threads."""
        return self._tiers

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier, if any, for callers that run without threads."""
        return self._disk

    def write_next(self) -> bool:
        """Write one waiting record; return False if none waits."""
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
        """Read one prefetched record; return False if there is none to read."""
        with self._changed:
            job = None if self._closing else self._tiers.start_read()
            if job is None:
                return False
            self._reads_under_way += 1
        result = self._run(job)
        with self._changed:
            self._tiers.finish_read(job, result)
        return True

    def _look_up(self, key: BufferKey, *, pin: bool = False) -> tuple[BufferRecord | None, str]:
        while True:
            with self._changed:
                found = self._tiers.find(key)
                if isinstance(found, BufferRecord):
                    if pin:
                        self._tiers.pin(key, found)
                    return found, "memory_hits"
                if found is None or self._closing:
                    return None, "misses"
                self._reads_under_way += 1
            result = self._run(found)
            with self._changed:
                if not self._tiers.is_current(found):
                    continue  # a newer version came meanwhile, or it was moved or dropped
                if isinstance(result, BufferRecord):
                    if pin:
                        self._tiers.pin(key, result)
                    return result, "disk_hits"
                self._tiers.on_damaged(found, result)
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
