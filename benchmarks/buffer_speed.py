"""The speed of buffers on this machine, against a raw memory-mapped file in the same run.

    python -m benchmarks.buffer_speed [--shape 1024x1600] [--gigabytes 1] [--directory DIR] [--json]

Counts hits, too: of a store that drops what the plan needs last, and of a cache that drops what was
used longest ago. See docs/explanation/buffers.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swarm_ft.base.sealing import Sealer, new_key
from swarm_ft.buffers import BufferKey, BufferLimits, BufferRecord, BufferStore, End
from swarm_ft.codec.stored import buffer_bytes
from swarm_ft.digest import fingerprint_of
from swarm_ft.ids import BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.protocol.spec.run_spec import LrSchedule, TrainSpec
from swarm_ft.protocol.spec.training_plan import VisitOrder, step_samples

BITS = (16, 8, 4)
BUDGETS = (0.1, 0.5, 1.0)
_RUN = RunId("bench")
_GIGA = 1e9
_EPOCHS = 3
"""The first fills the buffers; hits are those of the others, but for what the last one drops."""
_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """One tier at one precision; gigabytes of payload a second, the median of the repeats.

    Attributes:
        tier: `memory` (which keeps references and copies nothing), `disk`, `sealed`, a disk tier
            that is encrypted, or `mapped`, the raw memory-mapped file.
        sample_bytes: of one record's payload.
        first_gb_s: putting records where there were none, done once.
        put_gb_s: putting new versions of them; on disk, until they are written.
        get_gb_s: getting them; from disk, read and verified.
        synced_gb_s: putting them until the device has them, as nobody here waits for it to.
        first_ratio, put_ratio, get_ratio, synced_ratio: of the mapped file's speed.
    """

    tier: str
    bits: int
    sample_bytes: int
    first_gb_s: float
    put_gb_s: float
    get_gb_s: float
    synced_gb_s: float
    first_ratio: float
    put_ratio: float
    get_ratio: float
    synced_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HitRow:
    """The share of visits that find their record in memory, over epochs of shuffled access.

    Attributes:
        budget: of the whole set.
        needed_last: by this store, which drops what the plan needs last.
        least_recently_used: by a cache that drops what was used longest ago.
    """

    budget: float
    needed_last: float
    least_recently_used: float


def measure_speed(
    shape: tuple[int, int], *, total_bytes: int, repeats: int, directory: Path | None
) -> Iterator[SpeedRow]:
    """Rows of all tiers at each precision.

    Args:
        shape: (tokens, channels) of a sample.
        total_bytes: of all records; they stay in the page cache if that is large enough.
        directory: where files are made, and deleted in the end.
    """
    for bits in BITS:
        sample_bytes = buffer_bytes(*shape, bits)
        count = max(2, total_bytes // sample_bytes)
        with tempfile.TemporaryDirectory(dir=directory, prefix="swarm-ft-bench-") as folder:
            tiers: tuple[_Tier, ...] = (
                _Mapped(Path(folder) / "mapped", sample_bytes, count),
                _Stored(None, shape, sample_bytes, count),
                _Stored(Path(folder) / "store", shape, sample_bytes, count),
                _Stored(Path(folder) / "sealed", shape, sample_bytes, count, is_sealed=True),
            )
            first = [_gb_s(tier, tier.put_all) for tier in tiers]
            rounds = [_again(tiers) for _ in range(repeats)]
            for tier in tiers:
                tier.close()
        again = [
            [statistics.median(s) for s in zip(*each, strict=True)]
            for each in zip(*rounds, strict=True)
        ]
        speeds = [(f, *puts_gets) for f, puts_gets in zip(first, again, strict=True)]
        for tier, speed in zip(tiers, speeds, strict=True):
            yield _row(tier, bits, speed, speeds[0])


class _Mapped:
    """Records in a memory-mapped file: no checksum, no index, no second copy."""

    name = "mapped"

    def __init__(self, path: Path, sample_bytes: int, count: int) -> None:
        self.sample_bytes, self.count = sample_bytes, count
        self._payloads = _payloads(sample_bytes)
        with path.open("wb+") as file:
            file.truncate(sample_bytes * count)
            self._map = mmap.mmap(file.fileno(), sample_bytes * count)

    def put_all(self) -> None:
        for i in range(self.count):
            start = i * self.sample_bytes
            self._map[start : start + self.sample_bytes] = self._payloads[i % 4]

    def get_all(self) -> None:
        for i in range(self.count):
            start = i * self.sample_bytes
            _ = self._map[start : start + self.sample_bytes]

    def put_all_and_sync(self) -> None:
        self.put_all()
        self._map.flush()

    def close(self) -> None:
        self._map.close()


class _Stored:
    """Records in a store, all in memory or all on disk."""

    def __init__(
        self,
        directory: Path | None,
        shape: tuple[int, int],
        sample_bytes: int,
        count: int,
        *,
        is_sealed: bool = False,
    ) -> None:
        self.name = "memory" if directory is None else "sealed" if is_sealed else "disk"
        self.sample_bytes, self.count = sample_bytes, count
        self._directory = directory
        self._records = [
            BufferRecord(fingerprint_of(p), *shape, p) for p in _payloads(sample_bytes)
        ]
        limits = BufferLimits(memory_bytes=None if directory is None else 0)
        sealer = Sealer(new_key(), "buffers") if is_sealed else None
        self._store = BufferStore(
            limits, directory=directory, run_id=_RUN, sealer=sealer, threads=False
        )

    def put_all(self) -> None:
        for i in range(self.count):
            self._store.put(_key(i), self._records[i % 4])
            self._store.write_next()

    def get_all(self) -> None:
        for _ in self._store.records():
            pass

    def put_all_and_sync(self) -> None:
        self.put_all()
        if self._directory is not None:
            for path in self._directory.glob("*/*.slab"):
                _sync(path)

    def close(self) -> None:
        self._store.close()


_Tier = _Mapped | _Stored


def _key(sample: int) -> BufferKey:
    return BufferKey(_RUN, BlockIndex(1), End.SENT, SampleId(sample))


def _payloads(sample_bytes: int) -> list[bytes]:
    return [random.Random(i).randbytes(sample_bytes) for i in range(4)]


def _gb_s(tier: _Tier, work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return tier.count * tier.sample_bytes / (time.perf_counter() - start) / _GIGA


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _again(tiers: tuple[_Tier, ...]) -> list[tuple[float, ...]]:
    """Measure puts and gets of all tiers in turn, so that noise meets all alike."""
    puts = [_gb_s(tier, tier.put_all) for tier in tiers]
    gets = [_gb_s(tier, tier.get_all) for tier in tiers]
    synced = [_gb_s(tier, tier.put_all_and_sync) for tier in tiers]
    return list(zip(puts, gets, synced, strict=True))


def _row(tier: _Tier, bits: int, speed: tuple[float, ...], mapped: tuple[float, ...]) -> SpeedRow:
    first, put, get, synced = speed
    return SpeedRow(
        tier=tier.name,
        bits=bits,
        sample_bytes=tier.sample_bytes,
        first_gb_s=first,
        put_gb_s=put,
        get_gb_s=get,
        synced_gb_s=synced,
        first_ratio=first / mapped[0],
        put_ratio=put / mapped[1],
        get_ratio=get / mapped[2],
        synced_ratio=synced / mapped[3],
    )


def measure_hits(num_samples: int) -> Iterator[HitRow]:
    """Rows for each budget: the share of visits after the first epoch that hit."""
    train = _plan(num_samples)
    for budget in BUDGETS:
        room = max(1, int(budget * num_samples))
        yield HitRow(
            budget=budget,
            needed_last=_hits_of_store(train, room),
            least_recently_used=_hits_of_lru(train, room),
        )


def _plan(num_samples: int) -> TrainSpec:
    steps = -(-num_samples // _BATCH) * _EPOCHS
    return TrainSpec(
        num_samples=num_samples,
        seq_length=2,
        batch_size=_BATCH,
        micro_batch_size=1,
        num_steps=steps,
        learning_rate=0.0,
        lr_schedule=LrSchedule.CONSTANT,
        clip_grad_norm=0.0,
        seed=0,
        shuffle=True,
        forward_codec="aq4",
        backward_codec="q8",
        key_codec="fp16",
    )


def _hits_of_store(train: TrainSpec, room: int) -> float:
    record = BufferRecord(fingerprint_of(b"x"), 1, 1, b"x")
    store = BufferStore(BufferLimits(memory_bytes=room), visits=VisitOrder(train))
    for step in map(StepNumber, range(train.num_steps)):
        for sample in step_samples(train, step):
            store.get(_key(sample))
            store.stage(_key(sample), record)
        store.commit(step)
    return store.take_stats()[BlockIndex(1)].memory_hits / (train.num_samples * (_EPOCHS - 1))


def _hits_of_lru(train: TrainSpec, room: int) -> float:
    cache: OrderedDict[SampleId, None] = OrderedDict()
    hits = 0
    for step in map(StepNumber, range(train.num_steps)):
        for sample in step_samples(train, step):
            hits += sample in cache
            cache[sample] = None
            cache.move_to_end(sample)
        while len(cache) > room:
            cache.popitem(last=False)
    return hits / (train.num_samples * (_EPOCHS - 1))


# ---- what is shown


def _short(number: float) -> str:
    """Two digits of it, or all before the point."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _speed_table(shape: str, rows: list[SpeedRow]) -> Table:
    """GB/s of all tiers, and of the mapped file's."""
    title = f"Records of {shape}: GB/s of payload (and times the mapped file's)"
    table = Table("bits", "bytes", "tier", title=title, box=SIMPLE_HEAD)
    for name in ("first put", "put again", "and sync", "get"):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = (row.first_ratio, row.put_ratio, row.synced_ratio, row.get_ratio)
        speeds = (row.first_gb_s, row.put_gb_s, row.synced_gb_s, row.get_gb_s)
        pairs = zip(speeds, ratios, strict=True)
        cells = [f"{_short(speed)} ({_short(ratio)})" for speed, ratio in pairs]
        table.add_row(str(row.bits), f"{row.sample_bytes:,}", row.tier, *cells)
    return table


def _hit_table(samples: int, rows: list[HitRow]) -> Table:
    """Hit rates by budget."""
    title = f"Visits that find their record, of {samples:,} samples in shuffled epochs"
    table = Table("budget, of the set", title=title)
    for name in ("needed last goes", "least recently used goes"):
        table.add_column(name, justify="right")
    for row in rows:
        rates = (row.needed_last, row.least_recently_used)
        table.add_row(f"{row.budget:.0%}", *(f"{rate:.1%}" for rate in rates))
    return table


def main() -> None:
    """Print two tables, or the same as JSON."""
    parser = argparse.ArgumentParser(description="How fast buffers are kept, and how many hit.")
    parser.add_argument("--shape", type=_shape, default="1024x1600", help="TOKENSxCHANNELS")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of records")
    parser.add_argument("--directory", type=Path, help="where files are made for a while")
    parser.add_argument("--samples", type=int, default=4000, help="of the epochs that count hits")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    total_bytes = int(args.gigabytes * _GIGA)
    speeds = list(
        measure_speed(
            args.shape, total_bytes=total_bytes, repeats=args.repeats, directory=args.directory
        )
    )
    hits = list(measure_hits(args.samples))
    if args.json:
        document = {"speeds": [asdict(row) for row in speeds], "hits": [asdict(r) for r in hits]}
        print(json.dumps(document))  # noqa: T201
        return
    Console().print(_speed_table("x".join(map(str, args.shape)), speeds))
    Console().print(_hit_table(args.samples, hits))


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected TOKENSxCHANNELS, such as 1024x1600, got {text}")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    main()
