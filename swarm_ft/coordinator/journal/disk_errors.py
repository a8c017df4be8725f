"""Texts for errors of SQLite and of the disk; no other module shows such errors to people."""

from __future__ import annotations

import errno
import sqlite3

DISK_FULL = "the disk is full; free some space on it"
IN_USE = "another program has it open; does another coordinator use it?"
_BY_NAME = (
    ("SQLITE_FULL", DISK_FULL),
    ("SQLITE_BUSY", IN_USE),
    ("SQLITE_LOCKED", IN_USE),
    ("SQLITE_NOTADB", "the file is of another kind, or damaged; name another file"),
    ("SQLITE_CORRUPT", "the file is damaged; restore a copy of it, or name another file"),
    ("SQLITE_READONLY", "it cannot be written; check the permissions of the file and its folder"),
    ("SQLITE_CANTOPEN", "it cannot be opened; check that its folder exists and is writable"),
    ("SQLITE_PERM", "it cannot be opened; check the permissions of the file and its folder"),
    ("SQLITE_IOERR", "the disk cannot be read or written; check the disk"),
)
"""Texts by the beginning of SQLite's error names (https://www.sqlite.org/rescode.html)."""


def error_text(error: sqlite3.Error | OSError) -> str:
    """Return the problem with a file, and a remedy."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return DISK_FULL if is_full else error.strerror or type(error).__name__
    name = getattr(error, "sqlite_errorname", "")  # the module's own errors have none
    texts = (words for begin, words in _BY_NAME if name.startswith(begin))
    return next(texts, f"it cannot be read or written ({name or type(error).__name__})")
