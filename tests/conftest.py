"""What holds for all tests."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.draws import PROFILE, draws
from tests.sampled import mark_cases

# The same examples in every run, so that a change alone makes a test fail that did not before;
# `quick` draws the first quarter of those of `full`, which `make test-rest` takes in CI. To look
# for others: HYPOTHESIS_PROFILE=explore.
settings.register_profile("full", derandomize=True, database=None, deadline=None)
settings.register_profile("quick", settings.get_profile("full"), max_examples=draws(100))
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(PROFILE)

# Read when torch is imported, here and in the processes that tests start. Tensors of tests are
# small: threads cost them more than they bring, the more so where every core has a worker.
os.environ["OMP_NUM_THREADS"] = "1"

# As the commands set it. gRPC reads it when it is imported, which collecting the tests does; its
# notes would then appear among the lines of commands that a test runs in this process.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Peers keep their names and buffers in the user's cache; here, in one that is thrown away.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="swarm-ft-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# So too the user's own defaults of options.
os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_CACHE_HOME"]

# Triton reads it as its own functions are declared, whoever imports it first. Without a GPU its
# kernels run in its interpreter.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector need not look through it.

    Simulations among others collect after every run, which would take longer than the run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # or extension modules would say that they leak


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Leave cases of `sampled` tests to `make test-rest`; files that may take long come first.

    So no worker is alone with a long file at the end. A file's longest timeout tells how long it
    may take; files with equal timeouts stay in order, and so do tests.
    """
    mark_cases(item for item in items if item.get_closest_marker("sampled"))
    yield
    timeouts_s: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        own_s = float(mark.args[0]) if mark else 0.0
        timeouts_s[item.path] = max(own_s, timeouts_s.get(item.path, 0.0))
    items.sort(key=lambda item: -timeouts_s[item.path])


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Nothing but the code itself keeps others out of its files."""
    before = os.umask(0)
    yield
    os.umask(before)
