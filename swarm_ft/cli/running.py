"""How a command runs: its event loop, its place in the DHT, and how it is asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft.cli.options import DHT_PREFIX, Listening
from swarm_ft.systems import on_signal, run_loop, stop_signals

if TYPE_CHECKING:
    from swarm_ft.client.data.progress import Listener, ReadSoFar
    from swarm_ft.discovery import Directory
    from swarm_ft.discovery.dht import DhtDirectory
    from swarm_ft.discovery.remembering import RememberingDirectory
    from swarm_ft.identity.certificates import Role
    from swarm_ft.identity.records import Signer
    from swarm_ft.transport.base import Server


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
    for number in stop_signals():
        if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started with nohup
        on_signal(number, stop)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have something done that the rest does not wait for, and that ends with it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def in_dht(
    initial_peers: tuple[str, ...],
    prefix: str = DHT_PREFIX,
    *,
    host_maddrs: tuple[str, ...] = (),
    announce_maddrs: tuple[str, ...] = (),
    identity_path: Path | None = None,
    signer: Signer | None = None,
    authority: str | None = None,
) -> AsyncIterator[DhtDirectory | RememberingDirectory]:
    """Take part in a DHT as long as the context lasts, see `DhtOptions`.

    Without addresses to listen on it is only asked, and entered anew when it is lost: others could
    not reach a node behind a home link.

    Raises:
        BadOption: an address or the identity file is not usable.
        PortInUse: a listen address is taken.
        DirectoryUnreachable: none of the initial peers answers.
    """
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
    from swarm_ft.discovery.remembering import RememberingDirectory

    options = DhtOptions(
        initial_peers=initial_peers,
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs,
        identity_path=identity_path,
        client_mode=not host_maddrs,
        prefix=prefix,
        signer=signer,
        authority=authority,
    )
    directory: DhtDirectory | RememberingDirectory
    directory = dht = await DhtDirectory.open(options)
    if options.client_mode:
        directory = RememberingDirectory(partial(DhtDirectory.open, options), dht=dht)
        await directory.enter()
    try:
        yield directory
    finally:
        await directory.close()


@asynccontextmanager
async def announced(
    server: Server, listening: Listening, directory: Directory, role: Role, name: str
) -> AsyncIterator[str]:
    """Where others reach the server, which they may learn as long as the context lasts."""
    endpoint = listening.endpoint(int(server.endpoint.rpartition(":")[2]))
    try:
        await directory.announce(role, name, endpoint)
        yield endpoint
    finally:
        await server.stop()
        await directory.withdraw(role, name)
