"""What a volunteer sees while its peer leaves: what it waits for, for how long, and a thank-you."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from swarm_ft.peer.given import Gift
    from swarm_ft.protocol.messages.control import LeaveProgress

LEAVE_TIMEOUT_S = 75.0
"""Less than the 90 s after which systemd kills what it stops."""
REDRAWN_EVERY_S = 1.0


class LeaveLine:
    """One line at a terminal, whose seconds run down; elsewhere a line for each thing waited for.

    Nothing is shown before `begin`, but what a peer that pauses waits for, as lines.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._has_begun = False
        self._words = self._told = ""
        self._until_s = 0.0
        self._insist = ""
        self._drawing: asyncio.Task[None] | None = None

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
        if self._is_terminal:
            self._drawing = asyncio.create_task(self._draw())

    def show(self, progress: LeaveProgress) -> None:
        """What the coordinator says."""
        from swarm_ft.protocol.messages.control import gist_of

        if not progress.words:
            return
        self._words, self._until_s = progress.words, time.monotonic() + progress.seconds
        if self._drawing is None and gist_of(self._words) != self._told:
            self._told = gist_of(self._words)
            click.echo(self.line(), err=True)

    def end(self) -> None:
        """It leaves."""
        if self._drawing is not None:
            self._drawing.cancel()
            click.echo("\r\x1b[2K", nl=False, err=True)

    def line(self, columns: int | None = None) -> str:
        """What is shown now.

        Args:
            columns: of the terminal; what does not fit is left out of the middle.
        """
        left_s = self._until_s - time.monotonic()
        seconds = f" (about {left_s:.0f} s)" if left_s >= 1 else ""
        end = seconds + (f"; {self._insist}" if self._has_begun else "")
        room = max(0, columns - len(end) - 2) if columns else len(self._words)
        return (self._words if len(self._words) <= room else f"{self._words[:room]}…") + end

    async def _draw(self) -> None:
        while True:
            columns = shutil.get_terminal_size().columns
            click.echo(f"\r\x1b[2K{self.line(columns)[: columns - 1]}", nl=False, err=True)
            await asyncio.sleep(REDRAWN_EVERY_S)


def tell_gift(gift: Gift, *, as_json: bool) -> None:
    """What the peer gave, if it gave anything."""
    if as_json:
        click.echo(json.dumps({"gave": asdict(gift)}))
    elif gift.hosted_s or gift.steps:
        click.echo(f"this peer gave {gift.in_words}; thank you")
