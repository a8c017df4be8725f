"""The calls under way at a server, by their callers: those that become invalid are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from swarm_ft.errors import SwarmError
from swarm_ft.identity.roles import Caller
from swarm_ft.transport.validity import Validity

CHECK_EVERY_S = 0.5
"""How often certificates are compared with the clock. Revoked keys need no check: they notify."""

Call = TypeVar("Call")


class OpenCalls(Generic[Call]):
    """See the module's docstring.

    Args:
        validity: of callers; None where nobody has a key.
        end: ends a call with an error.
    """

    def __init__(self, validity: Validity | None, end: Callable[[Call, SwarmError], None]) -> None:
        self._validity = validity
        self._end = end
        self._callers: dict[Call, Caller] = {}
        self._checking: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Watch the callers from now on; needs a running event loop."""
        if self._validity is not None:
            self._unsubscribe = self._validity.subscribe(self._end_invalid)
            self._checking = asyncio.create_task(self._check_on())

    def stop(self) -> None:
        """Watch no more."""
        if self._unsubscribe is not None and self._checking is not None:
            self._unsubscribe()
            self._checking.cancel()
            self._unsubscribe = self._checking = None

    def add(self, call: Call, caller: Caller | None) -> None:
        """A call has begun."""
        if caller is not None:
            self._callers[call] = caller

    def discard(self, call: Call) -> None:
        """A call has ended."""
        self._callers.pop(call, None)

    async def _check_on(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self._end_invalid()

    def _end_invalid(self) -> None:
        if self._validity is None:
            return
        for call, caller in tuple(self._callers.items()):
            refusal = self._validity.refusal(caller)
            if refusal is not None:
                self._end(call, refusal)
