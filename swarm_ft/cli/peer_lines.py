"""The lines that a volunteer sees of its peer: its work, its leaving and its contribution."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from swarm_ft.base.log import get_logger

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from swarm_ft.protocol.messages.contribution import Contribution
    from swarm_ft.protocol.messages.control import LeaveProgress

REDRAWN_EVERY_S = 1.0
LOGGED_EVERY_S = 60.0

logger = get_logger(__name__)


class PeerLine:
    """A line at a terminal with the peer's work or, while it leaves, with what it waits for.

    At a terminal the line counts seconds down, and other messages stand above it. Elsewhere the
    log gets a line every minute, and one for each thing that the peer waits for.
    """

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        self._console = console if console.is_terminal and not console.is_dumb_terminal else None
        self._does: Callable[[], str] = lambda: ""
        self._has_begun = False
        self._text = self._printed = ""
        self._until_s = 0.0
        self._hint = ""
        self._live: Live | None = None
        self._updating: asyncio.Task[None] | None = None

    def start(self, does: Callable[[], str]) -> None:
        """Start to show the peer's work.

        Args:
            does: Function that returns the peer's status line.
        """
        self._does = does
        if self._console is not None:
            self._draw_on(self._console)
        else:
            self._updating = asyncio.create_task(self._log_periodically())

    def begin(self, *, hosts: bool, timeout_s: float) -> None:
        """Start to show the peer's leaving.

        Args:
            hosts: Whether the peer hosts a stage, whose state could be lost.
            timeout_s: Seconds until the peer leaves in any case.
        """
        self._has_begun = True
        self._hint = (
            "Ctrl-C again leaves at once"
            if timeout_s == math.inf
            else f"at most {timeout_s:.0f} s, a second signal leaves at once"
        )
        if not hosts:
            return
        self._text = "leaving; the coordinator checks what would be lost"
        if self._console is not None:
            self._draw_on(self._console)

    def show(self, progress: LeaveProgress) -> None:
        """Show the coordinator's message to a peer that leaves or pauses."""
        from swarm_ft.protocol.messages.control import without_numbers

        if not progress.words:
            return
        self._text, self._until_s = progress.words, time.monotonic() + progress.seconds
        is_drawn = self._live is not None and self._has_begun
        if not is_drawn and without_numbers(self._text) != self._printed:
            self._printed = without_numbers(self._text)
            self.print_above(self.line())

    def print_above(self, words: str) -> None:
        """Print a message above the line."""
        if self._live is None:
            click.echo(words, err=True)
        else:
            self._live.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Remove the line."""
        if self._updating is not None:
            self._updating.cancel()
        if self._live is not None:
            self._live.stop()

    def line(self, columns: int | None = None) -> str:
        """Return the line while the peer leaves.

        Args:
            columns: Width of the terminal; a longer message is cut in front of the hint.
        """
        left_s = self._until_s - time.monotonic()
        seconds = f" (about {left_s:.0f} s)" if left_s >= 1 else ""
        end = seconds + (f"; {self._hint}" if self._has_begun else "")
        room = max(0, columns - len(end) - 2) if columns else len(self._text)
        return (self._text if len(self._text) <= room else f"{self._text[:room]}…") + end

    def _draw_on(self, console: Console) -> None:
        from rich.live import Live

        if self._live is None:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
            self._updating = asyncio.create_task(self._redraw(self._live))

    async def _redraw(self, live: Live) -> None:
        from rich.text import Text

        from swarm_ft.client.formatting import printable

        while True:
            is_leaving = self._has_begun and self._text
            text = self.line(live.console.width) if is_leaving else self._does()
            live.update(Text(printable(text)), refresh=True)
            await asyncio.sleep(REDRAWN_EVERY_S)

    async def _log_periodically(self) -> None:
        while True:
            await asyncio.sleep(LOGGED_EVERY_S)
            logger.info("%s", self._does())


def print_contribution(name: str, given: Contribution | None, *, as_json: bool) -> None:
    """Print this peer's contribution in the swarm's count, if there is one."""
    if as_json:
        click.echo(json.dumps({"gave": asdict(given) if given is not None else None}))
    elif given is not None and given.steps:
        click.echo(f"{name} gave {given}; thank you")
