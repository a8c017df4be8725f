"""How a command runs its event loop and how it is asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on uvloop; Ctrl-C and SIGTERM cancel it, and it cleans up."""

    async def supervised() -> None:
        task = asyncio.ensure_future(work())
        on_stop_signal(task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    run_async(supervised)


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on uvloop, and return what it returns."""
    import uvloop

    result: T = uvloop.run(work())
    return result


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Call `stop` at every Ctrl-C and SIGTERM from now on, in the running loop."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
