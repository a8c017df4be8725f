"""State of a peer that works, pauses or leaves, with the coordinator's progress reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm_ft.base.log import get_logger
from swarm_ft.protocol.messages.control import FromPeer, LeaveProgress, PeerLeaving, PeerResumed

logger = get_logger(__name__)


def log_progress(progress: LeaveProgress) -> None:
    """Log what a leaving peer waits for."""
    if progress.words:
        logger.warning("%s", describe_progress(progress))


def describe_progress(progress: LeaveProgress) -> str:
    """Return what a leaving peer waits for, with the approximate seconds."""
    seconds = f" (about {progress.seconds:.0f} s)" if progress.seconds >= 1 else ""
    return f"{progress.words}{seconds}"


def _wish(leaving: PeerLeaving | None) -> tuple[bool, str] | None:
    return None if leaving is None else (leaving.stays, leaving.reason)


class DrainState:
    """The peer's request to leave or pause, and the coordinator's replies.

    Args:
        say: Sends a message to the coordinator.
        on_progress: Callback for what this peer waits for while it leaves or pauses.

    Attributes:
        leaving: Present request to leave or pause, repeated in every hello; None while it works.
        is_paused: Whether the coordinator has released this peer, which stays for later.
        progress: Newest progress report; None before the first one.
    """

    def __init__(
        self,
        say: Callable[[FromPeer], None],
        on_progress: Callable[[LeaveProgress], None] = log_progress,
    ) -> None:
        self.leaving: PeerLeaving | None = None
        self.is_paused = False
        self.progress: LeaveProgress | None = None
        self._send = say
        self._on_progress = on_progress
        self._may_go = asyncio.Event()

    def request(self, leaving: PeerLeaving | None) -> None:
        """Request to leave or pause, or with None to work again; a repeated request is not sent."""
        if _wish(leaving) == _wish(self.leaving):
            return
        self.leaving, self.is_paused, self.progress = leaving, False, None
        self._may_go.clear()
        self._send(PeerResumed() if leaving is None else leaving)

    def on_progress(self, progress: LeaveProgress) -> None:
        """Handle a progress report, possibly one for an older request."""
        if self.leaving is None:
            return
        self.progress = progress
        self._on_progress(progress)
        self.is_paused = self.leaving.stays and progress.may_go
        if progress.may_go and not self.leaving.stays:
            self._may_go.set()

    async def wait_released(self) -> None:
        """Wait until the coordinator releases a peer that leaves."""
        await self._may_go.wait()
