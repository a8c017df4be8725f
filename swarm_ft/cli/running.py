"""The event loop of a command, its first line and progress bars, and its stop signals."""

from __future__ import annotations

import asyncio
import gc
import importlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.base import log
from swarm_ft.base.systems import STOP_SIGNALS, run_loop

if TYPE_CHECKING:
    from swarm_ft.client.data.progress import Listener, ReadProgress


logger = log.get_logger(__name__)


def show_start(text: str, *, as_json: bool = False) -> None:
    """Print a command's first line before slow imports; with `--json` there is none."""
    if log.is_json():  # Then standard error has nothing but JSON.
        logger.info(text)
    elif not as_json:
        click.echo(text, err=True)


def load(*modules: str) -> None:
    """Import modules that take seconds.

    The function disables the garbage collector meanwhile. It would scan the objects of all modules
    again and again, which takes a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        if was_enabled:
            gc.enable()


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` until it ends or a stop signal cancels it."""

    async def supervised() -> None:
        task = asyncio.ensure_future(work())
        on_stop_signal(task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    run_async(supervised)


def run_async(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on the fastest event loop of this system.

    Raises:
        KeyboardInterrupt: A signal cancelled it.
    """
    try:
        run_loop(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner on a terminal as long as the context lasts."""
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def reading_bar() -> Iterator[Listener]:
    """Show the progress of reading data on a terminal; its messages remain above the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from swarm_ft.client.data.progress import Listener
    from swarm_ft.client.formatting import printable

    console = Console(stderr=True, highlight=False)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("reading the model and the data", total=None)

    def show(so_far: ReadProgress) -> None:
        counts = f"{so_far.num_documents:,} documents, {so_far.num_samples:,} samples"
        whole = None if so_far.share_read is None else 1.0
        bar.update(task, description=counts, completed=so_far.share_read or 0.0, total=whole)

    def print_line(line: str) -> None:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield Listener(on_line=print_line, on_progress=show)


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Replace the handler of all stop signals by `stop`, which the running loop calls."""
    on_each_stop_signal(lambda _: stop())


def on_each_stop_signal(stop: Callable[[signal.Signals], object]) -> None:
    """Replace the handler of all stop signals by `stop`, which gets the signal."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # The command was started with nohup.
        loop.add_signal_handler(number, stop, number)
