"""What a volunteer sees of its peer: what it does, what it waits for as it leaves, a thank-you."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from swarm_ft.log import get_logger

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from swarm_ft.protocol.messages.contribution import Contribution
    from swarm_ft.protocol.messages.control import LeaveProgress

LEAVE_TIMEOUT_S = 75.0
"""Less than the 90 s after which systemd kills what it stops."""
REDRAWN_EVERY_S = 1.0
LOGGED_EVERY_S = 60.0

logger = get_logger(__name__)


class PeerLine:
    """One line at a terminal: what the peer does, and when it leaves, what it waits for.

    Seconds run down there. Elsewhere the log has a line now and then, and one for each thing waited
    for. What else is told meanwhile stands above it.
    """

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        self._console = console if console.is_terminal and not console.is_dumb_terminal else None
        self._does: Callable[[], str] = lambda: ""
        self._has_begun = False
        self._words = self._told = ""
        self._until_s = 0.0
        self._insist = ""
        self._live: Live | None = None
        self._telling: asyncio.Task[None] | None = None

    def start(self, does: Callable[[], str]) -> None:
        """The peer is there.

        Args:
            does: says what it does now.
        """
        self._does = does
        if self._console is not None:
            self._draw_on(self._console)
        else:
            self._telling = asyncio.create_task(self._log_on())

    def begin(self, *, hosts: bool, timeout_s: float) -> None:
        """This peer would leave from now on.

        Args:
            hosts: whether it has anything that could be lost.
            timeout_s: after which it leaves in any case.
        """
        self._has_begun = True
        self._insist = (
            "Ctrl-C again leaves at once"
            if timeout_s == math.inf
            else f"at most {timeout_s:.0f} s, a second signal leaves at once"
        )
        if not hosts:
            return
        self._words = "leaving; asking the coordinator what would be lost"
        if self._console is not None:
            self._draw_on(self._console)

    def show(self, progress: LeaveProgress) -> None:
        """What the coordinator says to a peer that would leave, or pause."""
        from swarm_ft.protocol.messages.control import gist_of

        if not progress.words:
            return
        self._words, self._until_s = progress.words, time.monotonic() + progress.seconds
        is_drawn = self._live is not None and self._has_begun
        if not is_drawn and gist_of(self._words) != self._told:
            self._told = gist_of(self._words)
            self.say(self.line())

    def say(self, words: str) -> None:
        """A line of its own, above the one that is drawn."""
        if self._live is None:
            click.echo(words, err=True)
        else:
            self._live.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """It leaves."""
        if self._telling is not None:
            self._telling.cancel()
        if self._live is not None:
            self._live.stop()

    def line(self, columns: int | None = None) -> str:
        """What is shown of its leaving now.

        Args:
            columns: of the terminal; what does not fit is left out of the middle.
        """
        left_s = self._until_s - time.monotonic()
        seconds = f" (about {left_s:.0f} s)" if left_s >= 1 else ""
        end = seconds + (f"; {self._insist}" if self._has_begun else "")
        room = max(0, columns - len(end) - 2) if columns else len(self._words)
        return (self._words if len(self._words) <= room else f"{self._words[:room]}…") + end

    def _draw_on(self, console: Console) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
            self._telling = asyncio.create_task(self._redraw(self._live))

    async def _redraw(self, live: Live) -> None:
        from rich.text import Text

        from swarm_ft.client.words import printable

        while True:
            leaves = self._has_begun and self._words
            words = self.line(live.console.width) if leaves else self._does()
            live.update(Text(printable(words)), refresh=True)
            await asyncio.sleep(REDRAWN_EVERY_S)

    async def _log_on(self) -> None:
        while True:
            await asyncio.sleep(LOGGED_EVERY_S)
            logger.info("%s", self._does())


def say_farewell(name: str, given: Contribution | None, *, as_json: bool) -> None:
    """Print the swarm's count of what this peer gave, if that is anything."""
    if as_json:
        click.echo(json.dumps({"gave": asdict(given) if given is not None else None}))
    elif given is not None and given.steps:
        click.echo(f"{name} gave {given}; thank you")
