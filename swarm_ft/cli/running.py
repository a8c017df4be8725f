"""How a command runs: its event loop, what it shows meanwhile, and how it is asked to stop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from swarm_ft import log
from swarm_ft.systems import on_signal, run_loop, stop_signals

if TYPE_CHECKING:
    from swarm_ft.client.data.progress import Listener, ReadSoFar


logger = log.get_logger(__name__)


def show_start(words: str, *, as_json: bool = False) -> None:
    """Show a command's first line, before it imports what takes seconds; programs get none."""
    if log.is_json():  # standard error has nothing else then
        logger.info(words)
    elif not as_json:
        click.echo(words, err=True)


def load(*modules: str) -> None:
    """Import modules that take seconds.

    The garbage collector rests meanwhile: it would look through all objects of all modules again
    and again, for a fifth of the time.
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
    """Run `work`; Ctrl-C and SIGTERM cancel it, and it cleans up."""

    async def supervised() -> None:
        task = asyncio.ensure_future(work())
        on_stop_signal(task.cancel)
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    run_async(supervised)


def run_async(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` on the fastest event loop that this system has.

    Raises:
        KeyboardInterrupt: a signal cancelled it.
    """
    try:
        run_loop(work())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show on a terminal that something goes on; it leaves nothing behind."""
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def reading_bar() -> Iterator[Listener]:
    """Show on a terminal how far data was read; what is told of it stays to be read."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from swarm_ft.client.data.progress import Listener
    from swarm_ft.client.words import printable

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

    def show(so_far: ReadSoFar) -> None:
        words = f"{so_far.num_documents:,} documents, {so_far.num_samples:,} samples"
        whole = None if so_far.done is None else 1.0
        bar.update(task, description=words, completed=so_far.done or 0.0, total=whole)

    def tell(line: str) -> None:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    with bar:
        yield Listener(tell=tell, show=show)


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Call `stop` at every stop signal from now on, in the running loop, and nothing else."""
    on_each_stop_signal(lambda _: stop())


def on_each_stop_signal(stop: Callable[[signal.Signals], object]) -> None:
    """As `on_stop_signal`; `stop` is told which."""
    for number in stop_signals():
        if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started with nohup
        on_signal(number, partial(stop, number))
