"""Both forms of a call: one that waits, and one that is awaited, whatever loop the caller has.

All work of this process runs in one loop, in a thread of its own. So a call that waits works where
a loop runs already, as in a notebook, and what one call started goes on while others are made.
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
from swarm_ft.errors import BadOption
from swarm_ft.systems import new_loop

SIGNAL_POLL_S = 0.5
P = ParamSpec("P")
T = TypeVar("T")


@keyword_errors()
def waited(work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; Ctrl-C cancels it, and it cleans up first.

    Raises:
        BadOption: this is called by the work itself, which would wait for itself for ever.
        SwarmError: as the work raises it, with options named as arguments.
    """
    if threading.current_thread() is _thread():
        work.close()
        raise BadOption("a call that waits, inside of what swarm_ft calls: await its async form")
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    try:
        _begin(work, future)
        # A signal that comes just before a wait is seen at the wait's end.
        while not concurrent.futures.wait([future], SIGNAL_POLL_S).done:
            pass
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        with suppress(BaseException):  # what it was is told by the interrupt
            _begun(_ended(future)).result()
        raise


async def awaited(work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; cancelling this cancels it and waits until it cleaned up.

    Raises:
        SwarmError: as the work raises it, with options named as arguments.
    """
    future = _begun(work)
    with keyword_errors():
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            await asyncio.wrap_future(_begun(_ended(future)))
            raise


def waits(name: str, work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make the form of `work` that waits, under its own name; see `waited`."""

    @functools.wraps(work)
    def wait(*given: P.args, **named: P.kwargs) -> T:
        return waited(work(*given, **named))

    wait.__name__ = wait.__qualname__ = name
    return wait


def awaits(
    name: str, work: Callable[P, Coroutine[Any, Any, T]]
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make the form of `work` that is awaited in any loop, under its own name; see `awaited`."""

    @functools.wraps(work)
    async def wait(*given: P.args, **named: P.kwargs) -> T:
        return await awaited(work(*given, **named))

    wait.__name__ = wait.__qualname__ = name
    return wait


def _begun(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Begin the work; return the future of its result, whose cancellation cancels it."""
    outer: concurrent.futures.Future[T] = concurrent.futures.Future()
    _begin(work, outer)
    return outer


def _begin(work: Coroutine[Any, Any, T], outer: concurrent.futures.Future[T]) -> None:
    """Do the work in the loop, and tell `outer` what it gives."""
    loop = _loop()

    def begin() -> None:
        task = loop.create_task(work)
        _tasks[outer] = task
        task.add_done_callback(functools.partial(_tell, outer))
        outer.add_done_callback(functools.partial(_pass_on, loop, task))

    loop.call_soon_threadsafe(begin)


def _pass_on(
    loop: asyncio.AbstractEventLoop,
    task: asyncio.Task[Any],
    outer: concurrent.futures.Future[Any],
) -> None:
    if outer.cancelled():
        loop.call_soon_threadsafe(task.cancel)


def _tell(outer: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    _tasks.pop(outer, None)
    if task.cancelled():
        outer.cancel()
    elif outer.set_running_or_notify_cancel():
        error = task.exception()
        outer.set_exception(error) if error else outer.set_result(task.result())


async def _ended(outer: concurrent.futures.Future[Any]) -> None:
    """Wait until work that was cancelled has cleaned up."""
    task = _tasks.get(outer)
    if task is not None:
        await asyncio.wait([task])


_tasks: dict[concurrent.futures.Future[Any], asyncio.Task[Any]] = {}
"""Work under way; touched in the loop's thread alone."""


_starting = threading.Lock()


def _started() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    with _starting:  # a cache alone would let two threads start one each
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
