"""Version of a SQLite file (`PRAGMA user_version`), and its copy before a migration.

The owner of a file refuses one of a later version. It copies one of an earlier version beside it,
and then migrates it in one transaction.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import flush_to_disk, open_private
from swarm_ft.errors import JournalError

logger = get_logger(__name__)


def version_of(db: sqlite3.Connection) -> int | None:
    """Return the file's version; None if it has no tables yet."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (num_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return int(version) if num_tables else None


def check_version(what: str, version: int | None, oldest: int, newest: int) -> None:
    """Refuse a file that cannot be migrated.

    Args:
        what: Kind and path of the file, for the error.
        version: Version of the file; None: it is new.
        oldest, newest: Versions that can be read.

    Raises:
        JournalError: The version is later than `newest`, or earlier than `oldest`.
    """
    if version is None or oldest <= version <= newest:
        return
    if version > newest:
        raise JournalError(
            f"{what}: expected version {newest} or earlier, found {version}, which a later "
            "swarm-ft wrote; update this swarm-ft, or name another file"
        )
    raise JournalError(
        f"{what}: expected version {oldest} to {newest}, found {version}; end its runs with the "
        "swarm-ft that wrote it, or name another file"
    )


def copy_beside(db: sqlite3.Connection, path: Path, version: int) -> Path:
    """Copy a file as `PATH.vVERSION` before its migration; replace an earlier copy.

    Raises:
        OSError, sqlite3.Error: There is no room for it.
    """
    copy, partial = path.with_name(f"{path.name}.v{version}"), path.with_name(f"{path.name}.copy")
    partial.unlink(missing_ok=True)
    open_private(partial, "xb").close()
    with closing(sqlite3.connect(partial)) as target:
        db.backup(target)
        target.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
    flush_to_disk(partial)
    partial.replace(copy)
    logger.info("%s: version %d is copied as %s before its migration", path, version, copy.name)
    return copy
