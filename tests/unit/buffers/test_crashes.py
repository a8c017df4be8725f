"""A process that writes is killed again and again; what is found is used, and never wrong."""

import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from swarm_ft.buffers import BufferLimits, BufferRecord, BufferStore, slab
from swarm_ft.ids import SampleId, StepNumber
from tests.forks import FORKED

from .conftest import RUN, SPEC, CyclicVisits, key, record

logger = logging.getLogger(__name__)

NUM_SAMPLES = 12
PAYLOAD_BYTES = 150_000


def version(sample: int, visit: int) -> BufferRecord:
    """Return the record of a sample's visit; its bytes differ all over."""
    pattern = random.Random(f"{sample}/{visit}").randbytes(997)
    text = f"{sample}/{visit} " + pattern.hex() * 80
    return record(text[:PAYLOAD_BYTES], PAYLOAD_BYTES)


def visit_of(found: BufferRecord) -> int:
    return int(found.payload[:30].split()[0].split(b"/")[1])


def open_store(folder: Path) -> BufferStore:
    return BufferStore(
        BufferLimits(memory_bytes=3 * PAYLOAD_BYTES, disk_bytes=10 * PAYLOAD_BYTES),
        directory=folder,
        run_id=RUN,
        identity=SPEC,
        visits=CyclicVisits(NUM_SAMPLES),
    )


def write_on(folder: Path, first_visit: int, pipe: Connection, dies_at_byte: int | None) -> None:
    """Commit version after version until killed, or kill itself at a byte of a write."""
    signal.alarm(30)  # the parent would wait for ever for one that does not die
    if dies_at_byte is not None:
        pytest.MonkeyPatch().setattr(slab, "write_all", dying(dies_at_byte))
    store = open_store(folder)
    for step in itertools.count():
        visit, sample = divmod(step, NUM_SAMPLES)
        store.stage(key(sample), version(sample, first_visit + visit))
        store.commit(StepNumber(step))
        store.prefetch([key((sample + 2) % NUM_SAMPLES)])
        pipe.send_bytes(b".")


def dying(at_byte: int) -> Callable[[int, list[bytes], int], None]:
    """Writes that go well until so many bytes are written in all, and then the end."""
    left = at_byte

    def write_all(file: int, parts: list[bytes], offset: int) -> None:
        nonlocal left
        data = b"".join(parts)
        if len(data) > left:
            os.pwrite(file, data[:left], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwrite(file, data, offset)
        left -= len(data)

    return write_all


def run_and_kill(folder: Path, first_visit: int, rng: random.Random) -> None:
    """One process's life, which ends at a random byte that it writes or at a random moment."""
    dies_at_byte = rng.randrange(20 * PAYLOAD_BYTES) if rng.random() < 0.5 else None
    num_commits, extra_s = rng.randrange(1, 30), rng.random() / 1000
    reader, writer = FORKED.Pipe(duplex=False)
    child = FORKED.Process(target=write_on, args=(folder, first_visit, writer, dies_at_byte))
    child.start()
    writer.close()
    with reader:
        if dies_at_byte is None:
            for _ in range(num_commits):
                reader.recv_bytes()
            end = time.perf_counter() + extra_s
            while time.perf_counter() < end:
                pass
            child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_kills", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_moment_leaves_no_wrong_record(
    tmp_path: Path, num_kills: int
) -> None:
    rng = random.Random(0)
    survivors, newer, first_visit = 0, 0, 0
    before: dict[SampleId, BufferRecord] = {}
    for _ in range(num_kills):
        run_and_kill(tmp_path, first_visit, rng)
        store = open_store(tmp_path)
        found = {name.sample: value for name, value in store.records()}
        store.close()
        for sample, value in found.items():
            assert value == version(sample, visit_of(value)), "it is one that was committed"
            newer += sample not in before or visit_of(value) > visit_of(before[sample])
        survivors += len(found)
        before = found
        first_visit = 1 + max((visit_of(value) for value in found.values()), default=first_visit)
    logger.info("%d kills: %d records survived, %d of them new", num_kills, survivors, newer)
    # How many depends on how fast the disk and the processor are; not none.
    assert survivors > num_kills
    assert newer > num_kills
