"""Whether this peer works, pauses or leaves, and what the coordinator says to that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.control import FromPeer, LeaveProgress, PeerLeaving, PeerWorks

logger = get_logger(__name__)


def log_progress(progress: LeaveProgress) -> None:
    """Tell in the log what a leaver waits for."""
    if progress.words:
        logger.warning("%s", in_words(progress))


def in_words(progress: LeaveProgress) -> str:
    """What a leaver waits for, and how long about."""
    seconds = f" (about {progress.seconds:.0f} s)" if progress.seconds >= 1 else ""
    return f"{progress.words}{seconds}"


def _wish(leaving: PeerLeaving | None) -> tuple[bool, str] | None:
    return None if leaving is None else (leaving.stays, leaving.reason)


class Presence:
    """See the module's docstring.

    Args:
        say: to the coordinator.
        on_progress: hears what this peer waits for while it would work no more.

    Attributes:
        leaving: that this peer would work no more, if it would not; the hello tells it anew.
        is_paused: whether the coordinator said that it has nothing to do here any more.
    """

    def __init__(
        self,
        say: Callable[[FromPeer], None],
        on_progress: Callable[[LeaveProgress], None] = log_progress,
    ) -> None:
        self.leaving: PeerLeaving | None = None
        self.is_paused = False
        self.progress: LeaveProgress | None = None
        self._say = say
        self._on_progress = on_progress
        self._may_go = asyncio.Event()

    def would(self, leaving: PeerLeaving | None) -> None:
        """Say that this peer would work no more, or works again, if that is news."""
        if _wish(leaving) == _wish(self.leaving):
            return
        self.leaving, self.is_paused, self.progress = leaving, False, None
        self._may_go.clear()
        self._say(PeerWorks() if leaving is None else leaving)

    def heard(self, progress: LeaveProgress) -> None:
        """The coordinator tells what is under way, perhaps in answer to an older wish."""
        if self.leaving is None:
            return
        self.progress = progress
        self._on_progress(progress)
        self.is_paused = self.leaving.stays and progress.may_go
        if progress.may_go and not self.leaving.stays:
            self._may_go.set()

    async def may_go(self) -> None:
        """Wait until the coordinator says that a peer which leaves for good may go."""
        await self._may_go.wait()
