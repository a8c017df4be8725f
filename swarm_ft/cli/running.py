"""How a command runs its event loop and how it is asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the polite kill, and a terminal that was closed."""


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on uvloop; Ctrl-C and SIGTERM cancel it, and it cleans up."""

    async def supervised() -> None:
        task = asyncio.ensure_future(work())
        on_stop_signal(task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    run_async(supervised)


def run_async(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on uvloop.

    Raises:
        KeyboardInterrupt: a signal cancelled it.
    """
    import uvloop

    try:
        uvloop.run(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show on a terminal that something goes on; it leaves nothing behind."""
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Call `stop` at every stop signal from now on, in the running loop, and nothing else."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started with nohup
        loop.add_signal_handler(number, stop)
