"""Translate errors of SQLite and of the disk into words for people; no other module shows them."""

from __future__ import annotations

import errno
import sqlite3

DISK_FULL = "the disk is full; make room on it"
IN_USE = "another program has it open; does another coordinator use it?"
_BY_NAME = (
    ("SQLITE_FULL", DISK_FULL),
    ("SQLITE_BUSY", IN_USE),
    ("SQLITE_LOCKED", IN_USE),
    ("SQLITE_NOTADB", "this is no such file, or it is damaged; name another file"),
    ("SQLITE_CORRUPT", "the file is damaged; put a copy of it back, or name another file"),
    ("SQLITE_READONLY", "it cannot be written; see to the rights of the file and its folder"),
    ("SQLITE_CANTOPEN", "it cannot be opened; does its folder exist, and may it be written to?"),
    ("SQLITE_PERM", "it cannot be opened; see to the rights of the file and its folder"),
    ("SQLITE_IOERR", "the disk cannot be read or written; see to it"),
)
"""By the begin of SQLite's names of its errors (https://www.sqlite.org/rescode.html)."""


def in_words(error: sqlite3.Error | OSError) -> str:
    """Return what is wrong with a file, and what to do."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return DISK_FULL if is_full else error.strerror or type(error).__name__
    name = getattr(error, "sqlite_errorname", "")  # the module's own errors have none
    found = (words for begin, words in _BY_NAME if name.startswith(begin))
    return next(found, f"it cannot be read or written ({name or type(error).__name__})")
