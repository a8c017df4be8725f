"""Calls under way at a server, by caller; those of callers that become invalid are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from swarm_ft.errors import SwarmError
from swarm_ft.identity.roles import Caller
from swarm_ft.transport.validity import Validity

CHECK_EVERY_S = 0.5
"""Seconds between two checks of certificates' expiry; revoked keys notify by themselves."""

Call = TypeVar("Call")


class OpenCalls(Generic[Call]):
    """Registry of calls under way; see the module's docstring.

    Args:
        validity: Validity of callers; None in a swarm without keys.
        end: Ends a call with an error.
    """

    def __init__(self, validity: Validity | None, end: Callable[[Call, SwarmError], None]) -> None:
        self._validity = validity
        self._end = end
        self._callers: dict[Call, Caller] = {}
        self._checking: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to check the callers; needs a running event loop."""
        if self._validity is not None:
            self._unsubscribe = self._validity.subscribe(self._end_invalid)
            self._checking = asyncio.create_task(self._check_on())

    def stop(self) -> None:
        """Stop checking the callers."""
        if self._unsubscribe is not None and self._checking is not None:
            self._unsubscribe()
            self._checking.cancel()
            self._unsubscribe = self._checking = None

    def add(self, call: Call, caller: Caller | None) -> None:
        """Add a call that has begun."""
        if caller is not None:
            self._callers[call] = caller

    def discard(self, call: Call) -> None:
        """Remove a call that has ended."""
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
