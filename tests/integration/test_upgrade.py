"""A coordinator of today takes up what earlier commits left on the disk, with today's peers."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from swarm_ft.coordinator.journal.schema import VERSION
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from tests.earlier_files import ALL, BUFFERS, CANCELLED, LAYERS, NUM_STEPS, RUN, SEALED, Earlier
from tests.local_swarm import LocalSwarm, forget_opened

SNAPSHOT = 2
"""Steps that the newest snapshot has, at least."""
AFTER = tuple(map(StepNumber, range(SNAPSHOT, NUM_STEPS)))
EARLIER = pytest.mark.parametrize("earlier", [*ALL, SEALED], ids=lambda one: one.name)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where the model's relative path leads
    forget_opened()
    return tmp_path / "files"


@EARLIER
async def test_a_run_that_an_earlier_commit_began_is_finished(
    earlier: Earlier, tmp_path: Path, files: Path
) -> None:
    earlier.unpack(tmp_path)
    kept = f"SELECT step, loss, seconds, attempt FROM commits WHERE step < {SNAPSHOT}"
    before = _rows(files / "journal.db", kept)
    async with LocalSwarm(files, LAYERS, buffer_limits=BUFFERS, journal_key=earlier.key) as swarm:
        events = await swarm.watch(RUN)
        runs = {run.run_id: run for run in (await swarm.client.status()).runs}

    steps = {event.step: event for event in events if isinstance(event, StepCommitted)}
    assert list(steps) == list(range(NUM_STEPS))
    assert runs[RUN].phase is RunPhase.FINISHED
    assert runs[CANCELLED].phase is RunPhase.CANCELLED
    # Peers took the buffers of before: no sample's first activation is sent again.
    assert not any(sent.key_frames for step in AFTER for sent in steps[step].traffic)
    # It went on from the snapshot: the rows of the steps in it are those of then.
    assert _rows(files / "journal.db", "PRAGMA user_version") == [(VERSION,)]
    assert _rows(files / "journal.db", kept) == before
    assert len(before) == SNAPSHOT
    copy = files / f"journal.db.v{earlier.journal}"
    assert copy.exists() == (earlier.journal < VERSION)
    if copy.exists():
        assert _rows(copy, "PRAGMA user_version") == [(earlier.journal,)]
        assert _rows(copy, kept) == before


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as journal:
        return journal.execute(query).fetchall()
