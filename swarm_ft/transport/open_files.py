"""Limit of a process's connections, from the files that its system lets it open."""

from __future__ import annotations

from swarm_ft.base import systems

MAX_OPEN_FILES = 1 << 16
"""Open files to request from the system; some grant a million, and libraries then make tables."""
MAX_CONNECTIONS = 4096
"""Connections of a process in all, if the system allows as many."""
RESERVED_FILES = 256
"""File descriptors for the process's own files: journal, buffers, outgoing connections."""


def raise_open_files() -> int:
    """Raise this process's limit of open files as far as allowed, and return it."""
    return systems.raise_open_files(MAX_OPEN_FILES)


def max_connections(open_files: int) -> int:
    """Return the number of connections that a server accepts, with files left for its process."""
    if open_files < 0:  # no limit
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, open_files - min(RESERVED_FILES, open_files // 2)))
