"""Processes that begin with everything imported, in milliseconds.

A process has one server that forks them, for all its tests. The server's imports are the same for
all of them. It has no threads when it forks: gRPC's threads, in tests before, survive no fork.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["tests.unit.buffers.test_crashes", "tests.unit.snapshots.test_crashes", "fsspec"]
)
