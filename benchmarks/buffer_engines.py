"""Engines for buffers: a memory-mapped file, files of slots, LMDB, SQLite.

The figures are in benchmarks/reports/buffers.md.

    python -m benchmarks.buffer_engines [--gigabytes 1] [--kilobytes 256]

Records of one size are put, put again and got, all of them in order; gigabytes a second. LMDB is
measured where it is installed. Nothing is synced to the device, by none of them.
"""

from __future__ import annotations

import argparse
import mmap
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from swarm_ft.buffers import BufferKey, BufferRecord, End
from swarm_ft.buffers.slab import Broken, Slab, SlabIdentity
from swarm_ft.digest import digest_of
from swarm_ft.ids import BlockIndex, RunId, SampleId

Put = Callable[[int, bytes], None]
Get = Callable[[int], bytes]
_RUN = RunId("bench")


def mapped(folder: Path, size: int, count: int) -> tuple[Put, Get]:
    """Map a file into memory: nothing is verified, and a truncated file kills the process."""
    with (folder / "mapped").open("wb+") as file:
        file.truncate(size * count)
        view = mmap.mmap(file.fileno(), size * count)

    def put(i: int, payload: bytes) -> None:
        view[i * size : (i + 1) * size] = payload

    return put, lambda i: view[i * size : (i + 1) * size]


def slots(folder: Path, size: int, _: int) -> tuple[Put, Get]:
    """Use this project's files of slots, which checksum each record at put and at get."""
    slab = Slab(folder / "slab", size, SlabIdentity(_RUN, bytes(16)))

    def key(i: int) -> BufferKey:
        return BufferKey(_RUN, BlockIndex(1), End.SENT, SampleId(i))

    def put(i: int, payload: bytes) -> None:
        slab.write(i, key(i), 1, BufferRecord(payload[:16], 1, 1, payload))

    def get(i: int) -> bytes:
        record = slab.read(i, key(i), 1)
        if isinstance(record, Broken):
            sys.exit(f"record {i}: {record.reason}")
        return record.payload

    return put, get


def lmdb_of(
    lmdb: ModuleType, folder: Path, size: int, count: int, *, writemap: bool
) -> tuple[Put, Get]:
    """LMDB, one transaction a record, without syncs."""
    path = folder / f"lmdb-{writemap}"
    env = lmdb.open(str(path), map_size=4 * size * count, sync=False, writemap=writemap)

    def put(i: int, payload: bytes) -> None:
        with env.begin(write=True) as transaction:
            transaction.put(i.to_bytes(4, "big"), payload)

    def get(i: int) -> bytes:
        with env.begin() as transaction:
            return bytes(transaction.get(i.to_bytes(4, "big")))

    return put, get


def sqlite(folder: Path, _: int, __: int) -> tuple[Put, Get]:
    """SQLite with a write-ahead log, one transaction a record, without syncs."""
    db = sqlite3.connect(folder / "sqlite", isolation_level=None)
    db.execute("pragma journal_mode=wal")
    db.execute("pragma synchronous=off")
    db.execute("create table records (id integer primary key, payload blob)")

    def put(i: int, payload: bytes) -> None:
        db.execute("insert or replace into records values (?, ?)", (i, payload))

    def get(i: int) -> bytes:
        (payload,) = db.execute("select payload from records where id = ?", (i,)).fetchone()
        return bytes(payload)

    return put, get


def measure(name: str, put: Put, get: Get, size: int, count: int) -> None:
    """Print one engine's row."""
    payloads = [random.Random(i).randbytes(size) for i in range(4)]
    digests = [digest_of(payload) for payload in payloads]

    def speed(work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return size * count / (time.perf_counter() - start) / 1e9

    def put_all(shift: int) -> None:
        for i in range(count):
            put(i, payloads[(i + shift) % 4])

    def get_all() -> None:
        for i in range(count):
            get(i)

    first = speed(lambda: put_all(0))
    again = max(speed(partial(put_all, shift)) for shift in (1, 2, 3))
    got = max(speed(get_all) for _ in range(3))
    for i in range(count):
        if digest_of(get(i)) != digests[(i + 3) % 4]:
            sys.exit(f"{name}: record {i} is another one")
    print_line(f"{name:24} {first:8.2f} {again:8.2f} {got:8.2f}")


def print_line(line: str) -> None:
    """Print it at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--kilobytes", type=int, default=256)
    options = parser.parse_args()
    size = options.kilobytes * 1024
    count = max(1, int(options.gigabytes * 1e9) // size)
    print_line(f"{count} records of {size} bytes, GB/s: put first, put again, get")
    with tempfile.TemporaryDirectory(prefix="swarm-ft-engines-") as folder:
        root = Path(folder)
        measure("memory-mapped file", *mapped(root, size, count), size, count)
        measure("files of slots", *slots(root, size, count), size, count)
        try:
            import lmdb
        except ImportError:
            print_line("LMDB is not installed here: pip install lmdb")
        else:
            for writemap in (False, True):
                name = f"LMDB{', writemap' if writemap else ''}"
                made = lmdb_of(lmdb, root, size, count, writemap=writemap)
                measure(name, *made, size, count)
        measure("SQLite", *sqlite(root, size, count), size, count)


if __name__ == "__main__":
    main()
