"""How many connections a process can have, by the files that its system lets it open."""

from __future__ import annotations

import resource
from contextlib import suppress

MAX_OPEN_FILES = 1 << 16
"""Asked of the system; some give a million, for which others then make tables."""
MAX_CONNECTIONS = 4096
"""In all, where the system allows as many."""
RESERVED_FILES = 256
"""Descriptors for what this process opens itself: journal, buffers, its own connections."""


def raise_open_files() -> int:
    """Let this process open as many files as the system lets it; the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a system that does not: the limit stays as it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_connections(open_files: int) -> int:
    """How many connections a server takes in all, so that files are left for its process."""
    if open_files < 0:  # no limit
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, open_files - min(RESERVED_FILES, open_files // 2)))
