"""Processes that begin with everything imported, in milliseconds.

A process has one server that forks them, for all its tests: what it imports is settled when it
begins, and so for all who use it. They are forked by a process without threads: those of gRPC, in
tests before, survive no fork.
"""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["tests.unit.buffers.test_crashes", "tests.unit.snapshots.test_crashes", "fsspec"]
)
