"""A clock that stands still until a test advances it."""

from __future__ import annotations

import asyncio


class ManualClock:
    """See `Clock`; starts at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds that were passed to `advance` so far."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class ManualTime(ManualClock):
    """A clock by which tasks sleep until it is advanced far enough."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Condition()
        self._sleepers: list[float] = []

    async def sleep(self, seconds: float) -> None:
        """Wait until so many seconds were passed to `pass_by`."""
        until_s = self.now_s() + seconds
        async with self._changed:
            self._sleepers.append(until_s)
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: self.now_s() >= until_s)
            finally:
                self._sleepers.remove(until_s)

    async def pass_by(self, seconds: float) -> None:
        """Let time pass, and wake those who slept as long."""
        async with self._changed:
            self.advance(seconds)
            self._changed.notify_all()

    async def until_somebody_sleeps(self) -> None:
        """Wait until a task sleeps past the present time."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(s > self.now_s() for s in self._sleepers))
