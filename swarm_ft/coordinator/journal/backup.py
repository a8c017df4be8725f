"""Backup of a running coordinator's files: journal, tokens, keys and registry.

SQLite's backup API reads each database as of one moment. Tokens are copied after the journal: a
file never changes once its run is in the journal, and is deleted only when its run is over.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.base.private_files import flush_to_disk, open_private, private_folder
from swarm_ft.coordinator.journal.disk_errors import error_text
from swarm_ft.coordinator.journal.registry import FILE as MEMBERS
from swarm_ft.coordinator.journal.schema import VERSION
from swarm_ft.coordinator.journal.schema_version import check_version, version_of
from swarm_ft.digest import file_stem
from swarm_ft.errors import BadOption, JournalError
from swarm_ft.protocol.messages.client import RunPhase

BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Backup:
    """A finished copy.

    Attributes:
        journal: Path of the journal in it, for `swarm-ft coordinator --journal`.
        version: Version of the journal.
        num_runs: Number of runs in the journal.
        num_members: Number of members in the registry; None where the swarm has no keys.
        total_bytes: Bytes of all files.
    """

    journal: Path
    version: int
    num_runs: int
    num_members: int | None
    total_bytes: int


def back_up(journal: Path, keys: Path, folder: Path) -> Backup:
    """Copy a coordinator's files into a new folder; the coordinator may run meanwhile.

    Args:
        journal: Path of its journal.
        keys: Folder of the swarm's keys; it need not exist.
        folder: Folder of the copy; it appears once the copy is complete.

    Raises:
        BadOption: There is no such journal, or `folder` exists.
        JournalError: A file cannot be read or written.
    """
    if not journal.is_file():
        raise BadOption(f"--journal {journal}: there is no such file")
    if folder.exists():
        raise BadOption(f"{folder}: it exists already; name a new folder")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        private_folder(partial)
        copy = partial / journal.name
        _copy_database(journal, copy)
        version, num_runs, num_members = *_copy_tokens(journal, copy), None
        if keys.is_dir():
            num_members = _copy_keys(keys, partial / f"{journal.name}.keys")
        total_bytes = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        partial.replace(folder)
        flush_to_disk(folder.parent)
    except (sqlite3.Error, OSError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise JournalError(f"backup of {journal} in {folder}: {error_text(error)}") from error
    except JournalError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Backup(
        journal=folder / journal.name,
        version=version,
        num_runs=num_runs,
        num_members=num_members,
        total_bytes=total_bytes,
    )


def _copy_database(source: Path, target: Path) -> None:
    open_private(target, "xb").close()
    with (
        closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S)) as found,
        closing(sqlite3.connect(target)) as copy,
    ):
        found.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
    flush_to_disk(target)


def _copy_tokens(journal: Path, copy: Path) -> tuple[int, int]:
    """Copy the tokens of runs that may still need them; return the journal's version and runs."""
    with closing(sqlite3.connect(copy)) as db:
        version = version_of(db)
        check_version(f"journal {journal}", version, 0, VERSION)
        if version is None:
            raise JournalError(f"journal {journal}: it is empty")
        runs = db.execute("SELECT run_id, phase FROM runs").fetchall()
    tokens = private_folder(Path(f"{copy}.tokens"))
    for run_id, phase in runs:
        name = f"{file_stem(run_id)}.tokens"
        source = Path(f"{journal}.tokens") / name
        if phase <= RunPhase.FINISHED and source.exists():  # else it is over by now
            _copy_file(source, tokens / name)
    return version, len(runs)


def _copy_keys(keys: Path, target: Path) -> int:
    private_folder(target)
    for file in keys.iterdir():
        if file.is_file() and not file.name.startswith(MEMBERS):
            _copy_file(file, target / file.name)
    if not (keys / MEMBERS).exists():
        return 0
    _copy_database(keys / MEMBERS, target / MEMBERS)
    with closing(sqlite3.connect(target / MEMBERS)) as db:
        (num_members,) = db.execute("SELECT count(*) FROM members WHERE NOT is_revoked").fetchone()
    return int(num_members)


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb") as found, open_private(target, "xb") as copy:
        shutil.copyfileobj(found, copy)
    flush_to_disk(target)
