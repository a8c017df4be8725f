"""The attempt that is under way at a peer, and waiting for it: neighbours may hear of it first."""

from __future__ import annotations

import asyncio
from typing import Generic, Protocol, TypeVar

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import Attempt, RunId
from swarm_ft.protocol.coordinator_messages import Assign

NEIGHBOUR_PATIENCE_S = 60.0
"""How long a neighbour that was told of an attempt sooner waits for this peer to hear of it; then
it waits as long as the stage takes to load."""


class _UnderWay(Protocol):
    @property
    def assign(self) -> Assign: ...


Work = TypeVar("Work", bound=_UnderWay)


class AttemptSlot(Generic[Work]):
    """See the module's docstring.

    Attributes:
        work: the attempt, once it is more than assigned; None between attempts.
    """

    def __init__(self, run_id: RunId) -> None:
        self.work: Work | None = None
        self._run_id = run_id
        self._assigned = Attempt(-1)
        self._changed = asyncio.Event()

    def assigned(self, attempt: Attempt) -> None:
        """This one will begin as soon as its stage is there."""
        self._assigned = attempt
        self._changed.set()

    def begun(self, work: Work) -> None:
        """It is under way."""
        self.work = work
        self._changed.set()

    def ended(self) -> None:
        """None is under way."""
        self.work = None

    def at(self, attempt: Attempt) -> Work | None:
        """What is under way, if it is that attempt."""
        is_it = self.work is not None and self.work.assign.attempt == attempt
        return self.work if is_it else None

    async def wait_for(self, attempt: Attempt) -> Work:
        """What is under way, once it is this attempt, or a later one.

        Raises:
            OutOfTurn: it is over, or does not begin here in time.
        """
        try:
            async with asyncio.timeout(NEIGHBOUR_PATIENCE_S) as patience:
                while self.work is None or self.work.assign.attempt < attempt:
                    if self._assigned >= attempt:
                        patience.reschedule(None)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise OutOfTurn(f"run {self._run_id}: attempt {attempt} did not begin") from None
        return self.work
