"""After a kill of the writer at any moment, the newest snapshot is whole and no older."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

from swarm_ft.ids import RunId, StepNumber
from swarm_ft.snapshots.shard import read_shard, write_shard
from swarm_ft.snapshots.store import SnapshotStore
from tests.forks import FORKED

from .conftest import CUTS, SPEC, contents, latest_of, manifest_of, shard_name

RUN = RunId("run-1")
NUM_KILLS = 30
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"}


def save_next(folder: Path) -> None:
    """Save one more snapshot than the newest, then prune, like a resumed run."""
    store = SnapshotStore(str(folder / "snapshots"))
    latest = latest_of(store)
    step = StepNumber(latest.step + 1 if latest else 1)
    entries = []
    for layers in CUTS:
        name = shard_name(step, layers)
        # Each attempt has another content, like steps that another machine repeats.
        path = write_shard(folder, name, SPEC, contents(time.monotonic_ns() % 1000))
        entries.append(store.put_shard(name, path))
    store.commit(manifest_of(name, entries))
    store.prune(RUN, [latest.step, step] if latest else [step])


def save_until_killed(folder: Path, saved: Semaphore) -> None:
    while True:
        save_next(folder)
        saved.release()


def save_and_die_at(folder: Path, fatal: int) -> None:
    """Die by SIGKILL in front of the `fatal`-th operation on a file below `folder`."""
    seen = 0

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and str(folder) in str(args[0]):
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(on_event)
    save_next(folder)


def newest_whole_step(folder: Path) -> StepNumber:
    """Check every visible manifest; return the step of the newest."""
    store = SnapshotStore(str(folder / "snapshots"))
    snapshots = store.list_snapshots(RUN, SPEC)
    for manifest in snapshots:
        for entry in manifest.shards:
            path = store.fetch_shard(manifest, entry.layers, folder)
            read_shard(path, manifest.name_of(entry), SPEC)
    return snapshots[-1].step if snapshots else StepNumber(0)


def test_killed_at_any_time_the_newest_snapshot_is_whole(tmp_path: Path) -> None:
    draw, newest = random.Random(4), 0
    for _ in range(NUM_KILLS):
        saved = FORKED.Semaphore(0)
        writer = FORKED.Process(target=save_until_killed, args=(tmp_path, saved))
        writer.start()
        assert saved.acquire(timeout=60)
        begun_s = time.monotonic()
        assert saved.acquire(timeout=60)
        # This is the moment of the fault, somewhere in the next snapshot; the test waits for
        # nothing.
        time.sleep(draw.random() * (time.monotonic() - begun_s))
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        step = newest_whole_step(tmp_path)
        assert step >= newest + 2
        newest = step


def test_killed_before_any_of_its_file_operations_the_newest_snapshot_is_whole(
    tmp_path: Path,
) -> None:
    base, folder, fatal = tmp_path / "base", tmp_path / "at work", 0
    base.mkdir()
    for _ in range(3):
        save_next(base)
    exitcode: int | None = -signal.SIGKILL
    while exitcode == -signal.SIGKILL:
        shutil.copytree(base, folder)
        writer = FORKED.Process(target=save_and_die_at, args=(folder, fatal))
        writer.start()
        writer.join()
        exitcode = writer.exitcode
        assert newest_whole_step(folder) in (3, 4)
        # The next writer continues over any remains, and leaves two whole snapshots.
        save_next(folder)
        assert newest_whole_step(folder) in (4, 5)
        assert len([path for path in folder.rglob("snapshots/**/*") if path.is_file()]) == 2 * 3
        shutil.rmtree(folder)
        fatal += 1
    assert exitcode == 0
    assert fatal > 20
