"""Keeps messages of a caller back until its allowance lets them pass: `allowance` with a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from swarm_ft.clock import Clock, SystemClock
from swarm_ft.identity.roles import Caller
from swarm_ft.transport.allowance import (
    METERED,
    REPLIES_METERED,
    REPLY_BYTES,
    Allowances,
    account_of,
)
from swarm_ft.transport.base import Method, first_done

Sleep = Callable[[float], Awaitable[object]]
OnFlood = Callable[[str], None]


class Meter:
    """Measures all calls to the servers of one transport.

    Args:
        allowances: of their callers.
        clock: the time.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        allowances: Allowances | None = None,
        clock: Clock | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.allowances = allowances or Allowances()
        self.clock = clock or SystemClock()
        self.sleep = sleep


class CallMeter:
    """Measures one call; one task at a time reads it, and one at a time writes.

    Args:
        meter: of all calls.
        method: that is called; most of them do not count.
        caller: by its certificate.
        remote: its address, `host:port`.
        lost: done when the call is no more; nothing is kept back after that.
        on_flood: receives `remote` when messages or calls are too many.
    """

    def __init__(
        self,
        meter: Meter,
        method: Method[Any, Any],
        caller: Caller | None,
        remote: str,
        lost: asyncio.Future[str],
        on_flood: OnFlood = lambda _remote: None,
    ) -> None:
        self._meter = meter
        self._account = account_of(caller, remote)
        self._is_metered = method.path in METERED
        self._has_metered_replies = method.path in REPLIES_METERED
        self._reply_bytes = REPLY_BYTES.get(method.path)
        self._remote = remote
        self._lost = lost
        self._on_flood = on_flood
        self._is_first = True

    async def received(self, num_bytes: int) -> None:
        """Count a message of so many bytes, and wait until it may be handled."""
        if self._is_metered:
            is_first, self._is_first = self._is_first, False
            now_s = self._meter.clock.now_s()
            delay = self._meter.allowances.received(
                self._account, num_bytes, now_s, is_first=is_first
            )
            if delay.is_flood:
                self._on_flood(self._remote)
            await self._wait(delay.wait_s)

    async def replied(self, num_bytes: int) -> None:
        """Count a reply of so many bytes, and wait until it may be sent."""
        if self._has_metered_replies:
            count = max(1, num_bytes // self._reply_bytes) if self._reply_bytes else 1
            now_s = self._meter.clock.now_s()
            await self._wait(self._meter.allowances.replied(self._account, now_s, count))

    async def _wait(self, seconds: float) -> None:
        if seconds <= 0:
            return
        pause = asyncio.ensure_future(self._meter.sleep(seconds))
        try:
            await first_done(pause, self._lost)
        finally:
            pause.cancel()
