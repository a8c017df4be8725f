"""Meters that delay a caller's messages by its allowance: `allowance` with a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from swarm_ft.base.clock import Clock, SystemClock
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
    """Meter of all calls to the servers of one transport.

    Args:
        allowances: Allowances of their callers.
        clock: Source of the time.
        sleep: Waits a number of seconds.
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
    """Meter of one call; one task at a time reads the call, and one at a time writes.

    Args:
        meter: Meter of all calls.
        method: Method of the call; most methods do not count.
        caller: Caller by its certificate.
        remote: Address of the caller, `host:port`.
        lost: Future that is done when the call is lost; no wait continues after that.
        on_flood: Receives `remote` when messages or calls are too many.
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
        """Count a message of `num_bytes`, and wait until its handler may have it."""
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
        """Count a reply of `num_bytes`, and wait until it may leave."""
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
