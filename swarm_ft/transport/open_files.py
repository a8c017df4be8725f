"""How many connections a process can have, by the files that its system lets it open."""

from __future__ import annotations

from swarm_ft import systems

MAX_OPEN_FILES = 1 << 16
"""Asked of the system; some give a million, for which others then make tables."""
MAX_CONNECTIONS = 4096
"""In all, where the system allows as many."""
RESERVED_FILES = 256
"""Descriptors for what this process opens itself: journal, buffers, its own connections."""


def raise_open_files() -> int:
    """Let this process open as many files as the system lets it; the number."""
    return systems.raise_open_files(MAX_OPEN_FILES)


def max_connections(open_files: int) -> int:
    """How many connections a server takes in all, so that files are left for its process."""
    if open_files < 0:  # no limit
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, open_files - min(RESERVED_FILES, open_files // 2)))
