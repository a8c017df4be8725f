"""The command `swarm-ft top`, which shows runs, pipeline and events live in a terminal."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import SwarmAddress
from swarm_ft.cli.options import examples
from swarm_ft.cli.status_text import WATCH_S, connect_to_coordinator, look_options

if TYPE_CHECKING:
    from rich.console import Console

    from swarm_ft.cli.top_screen import TopScreen, View
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.ids import RunId
    from swarm_ft.protocol.messages.client import RunEvent, RunSummary, SwarmStatus
    from swarm_ft.protocol.messages.events import SwarmEvent

NUM_EVENTS = 100
"""Number of newest events in memory, more than a terminal has lines."""
MAX_CURVES = 8
"""Number of newest runs whose losses are shown."""
REDRAWN_EVERY_S = 0.5


@click.command(
    short_help="Watch runs, pipeline and events live.",
    epilog=examples(
        "swarm-ft top --invite @invitation.txt",
        "swarm-ft top --invite @invitation.txt --once",
        "swarm-ft top --insecure --coordinator 127.0.0.1:7000",
    ),
)
@click.option("--once", is_flag=True, help="Print the screen once.  [default without a terminal]")
@click.option("--run", "run_name", metavar="ID", help="Id of the run whose pipeline comes first.")
@look_options
def top(way: SwarmAddress, once: bool, run_name: str | None) -> None:
    """Watch the swarm's runs, a pipeline and the events live.

    Press q to quit, p to freeze the screen, and tab or the arrows to select another run.
    """
    from rich.console import Console

    from swarm_ft.cli.running import run_until_stopped
    from swarm_ft.cli.top_screen import View
    from swarm_ft.ids import RunId

    console = Console(highlight=False)
    is_live = console.is_terminal and not console.is_dumb_terminal and not once

    async def work() -> None:
        async with connect_to_coordinator(way) as swarm:
            watched = TopData(swarm, View(chosen=RunId(run_name) if run_name else None))
            await (_live(watched, console) if is_live else _once(watched, console))

    run_until_stopped(work)


class TopData:
    """The data that `top` shows: status, losses and events of a swarm.

    Args:
        swarm: Connection to the swarm.
        view: Initial view.
    """

    def __init__(self, swarm: SwarmClient, view: View) -> None:
        self.view = view
        self.trouble = ""
        self._swarm = swarm
        self._found: SwarmStatus | None = None
        self._events: deque[SwarmEvent] = deque(maxlen=NUM_EVENTS)
        self._losses: dict[RunId, dict[int, float]] = {}
        self._followers: dict[RunId, asyncio.Task[None]] = {}

    @property
    def found(self) -> SwarmStatus:
        """The newest status; `ask` must come first."""
        if self._found is None:
            raise RuntimeError("ask() must come first")
        return self._found

    def picture(self) -> TopScreen:
        """Return the screen's contents."""
        from swarm_ft.cli.top_screen import TopScreen

        curves = {run: list(steps.values()) for run, steps in self._losses.items()}
        return TopScreen(
            found=self.found,
            losses=curves,
            events=tuple(self._events),
            view=self.view,
            trouble=self.trouble,
        )

    async def fetch_status(self) -> None:
        """Fetch the swarm's status.

        Raises:
            SwarmError: The coordinator does not answer.
        """
        self._found = await self._swarm.status()
        self.trouble = ""

    async def fetch_history(self) -> None:
        """Fetch the events and losses until now; `ask` must come first.

        Raises:
            SwarmError: The coordinator does not answer.
        """
        from swarm_ft.cli.status_text import loss_rows

        first = max(0, self.found.next_event - NUM_EVENTS)
        async with aclosing(self._swarm.events(first)) as events:
            async for event in events:
                self._events.append(event)
        for run in self._with_curves():
            async with aclosing(loss_rows(self._swarm, run, follows=False)) as rows:
                async for row in rows:
                    self._add_loss(run.run_id, row)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Update the data as long as the context lasts; `ask` must come first."""
        updates = (self._update_status(), self._update_events())
        tasks = [asyncio.create_task(work) for work in updates]
        try:
            yield
        finally:
            tasks += self._followers.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _update_status(self) -> None:
        from swarm_ft.errors import SwarmError

        while True:
            for run in self._with_curves():
                if run.run_id not in self._followers:
                    follower = asyncio.create_task(self._follow(run.run_id))
                    self._followers[run.run_id] = follower
            await asyncio.sleep(WATCH_S)
            try:
                await self.fetch_status()
            except SwarmError as error:
                self.trouble = f"waiting for the coordinator: {error.message}"

    async def _update_events(self) -> None:
        first = max(0, self.found.next_event - NUM_EVENTS)
        async with aclosing(self._swarm.events(first, follows=True)) as events:
            async for event in events:
                self._events.append(event)

    async def _follow(self, run_id: RunId) -> None:
        async with aclosing(self._swarm.watch(run_id, lambda _trouble: None)) as run_events:
            async for event in run_events:
                self._add_loss(run_id, event)

    def _with_curves(self) -> list[RunSummary]:
        return [run for run in self.found.runs if run.is_own][-MAX_CURVES:]

    def _add_loss(self, run_id: RunId, event: RunEvent) -> None:
        """Add a step's loss; a repeated step replaces its loss and drops all later ones."""
        from swarm_ft.protocol.messages.client import StepCommitted

        if isinstance(event, StepCommitted):
            steps = self._losses.setdefault(run_id, {})
            if event.step in steps:
                for later in [step for step in steps if step >= event.step]:
                    del steps[later]
            steps[event.step] = event.loss


async def _once(watched: TopData, console: Console) -> None:
    await watched.fetch_status()
    await watched.fetch_history()
    console.print(watched.picture())


async def _live(watched: TopData, console: Console) -> None:
    """Redraw the screen until q or Ctrl-C."""
    from rich.live import Live

    from swarm_ft.base.systems import keys_pressed

    await watched.fetch_status()
    has_news = asyncio.Event()

    def on_key(key: str) -> None:
        watched.view = watched.view.after(key, watched.found)
        has_news.set()

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(watched.following())
        stack.enter_context(keys_pressed(on_key))
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        shown = watched.picture()
        while not watched.view.has_quit:
            shown = shown if watched.view.is_frozen else watched.picture()
            drawn = replace(shown, view=watched.view, height=console.height)
            live.update(drawn, refresh=True)
            await _news(has_news)


async def _news(has_news: asyncio.Event) -> None:
    """Wait for a key, or until the next redraw."""
    try:
        async with asyncio.timeout(REDRAWN_EVERY_S):
            await has_news.wait()
    except TimeoutError:
        pass
    has_news.clear()
