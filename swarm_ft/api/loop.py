"""The blocking and the awaitable form of a call, independent of the caller's event loop.

All work of this process runs in one event loop, in its own thread. So a blocking call works inside
a running loop, as in a notebook, and the work of one call continues during later calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from swarm_ft.api.keyword_errors import keyword_errors
from swarm_ft.base.systems import new_loop
from swarm_ft.errors import BadOption

SIGNAL_POLL_S = 0.5
P = ParamSpec("P")
T = TypeVar("T")


@keyword_errors()
def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run the work and wait for its result; Ctrl-C cancels it, and waits until it cleaned up.

    Raises:
        BadOption: The work itself makes this call, which would wait forever.
        SwarmError: The work failed; the message names options as arguments.
    """
    if threading.current_thread() is _thread():
        work.close()
        raise BadOption(
            "expected the async form of this call, got the blocking one in a callback of swarm_ft; "
            "await it"
        )
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    try:
        _begin(work, future)
        # Python handles a signal that arrives just before a wait only after it.
        while not concurrent.futures.wait([future], SIGNAL_POLL_S).done:
            pass
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        with suppress(BaseException):  # The interrupt is the error to raise.
            _begun(_ended(future)).result()
        raise


async def run_awaitable(work: Coroutine[Any, Any, T]) -> T:
    """Run the work and return its result; cancelling this call cancels the work and waits for it.

    Raises:
        SwarmError: The work failed; the message names options as arguments.
    """
    future = _begun(work)
    with keyword_errors():
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await asyncio.wrap_future(_begun(_ended(future)))
            raise


def blocking(name: str, work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the blocking form of `work`, under this name; see `waited`."""

    @functools.wraps(work)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(work(*args, **kwargs))

    wait.__name__ = wait.__qualname__ = name
    return wait


def awaitable(
    name: str, work: Callable[P, Coroutine[Any, Any, T]]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the awaitable form of `work` for any loop, under this name; see `awaited`."""

    @functools.wraps(work)
    async def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_awaitable(work(*args, **kwargs))

    wait.__name__ = wait.__qualname__ = name
    return wait


def _begun(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start the work; return the future of its result, whose cancellation cancels the work."""
    outer: concurrent.futures.Future[T] = concurrent.futures.Future()
    _begin(work, outer)
    return outer


def _begin(work: Coroutine[Any, Any, T], outer: concurrent.futures.Future[T]) -> None:
    """Start the work in the loop, and set its result in `outer`."""
    loop = _loop()

    def begin() -> None:
        task = loop.create_task(work)
        _tasks[outer] = task
        task.add_done_callback(functools.partial(_set_result, outer))
        outer.add_done_callback(functools.partial(_pass_on, loop, task))

    loop.call_soon_threadsafe(begin)


def _pass_on(
    loop: asyncio.AbstractEventLoop,
    task: asyncio.Task[Any],
    outer: concurrent.futures.Future[Any],
) -> None:
    if outer.cancelled():
        loop.call_soon_threadsafe(task.cancel)


def _set_result(outer: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    _tasks.pop(outer, None)
    if task.cancelled():
        outer.cancel()
    elif outer.set_running_or_notify_cancel():
        error = task.exception()
        outer.set_exception(error) if error else outer.set_result(task.result())


async def _ended(outer: concurrent.futures.Future[Any]) -> None:
    """Wait until cancelled work has cleaned up."""
    task = _tasks.get(outer)
    if task is not None:
        await asyncio.wait([task])


_tasks: dict[concurrent.futures.Future[Any], asyncio.Task[Any]] = {}
"""Tasks of running work; only the loop's thread uses it."""


_starting = threading.Lock()


def _started() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    with _starting:  # With the cache alone two threads could start a loop each.
        return _start()


@functools.cache
def _start() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, name="swarm-ft", daemon=True)
    thread.start()
    return loop, thread


def _loop() -> asyncio.AbstractEventLoop:
    return _started()[0]


def _thread() -> threading.Thread:
    return _started()[1]
