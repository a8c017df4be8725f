"""Places for calls that last: so many of all members together, and a fair share of them for each.

A member that has none, or few, gets a place even when all are taken: the one with the most places
loses its newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from swarm_ft.errors import Busy


class Place:
    """A place that a call has taken.

    Args:
        member: whose call it is; empty where nobody has keys.
        reason: why it was lost, once it is.
    """

    def __init__(self, member: str, reason: str) -> None:
        self.member = member
        self._reason = reason
        self._is_lost = asyncio.Event()

    def lose(self) -> None:
        """Another member gets this place."""
        self._is_lost.set()

    async def lost(self) -> NoReturn:
        """Wait until another member gets this place.

        Raises:
            Busy: one did.
        """
        await self._is_lost.wait()
        raise Busy(self._reason)


class Places:
    """See the module's docstring.

    Args:
        most: of all members together.
        own: of one member, where members have keys.
        what: they are for, in words that follow a number.
    """

    def __init__(self, most: int, own: int, what: str) -> None:
        self._most = most
        self._own = own
        self._what = what
        self._taken: list[Place] = []

    @property
    def num_taken(self) -> int:
        """The number of taken places."""
        return len(self._taken)

    @contextmanager
    def taken(self, member: str) -> Iterator[Place]:
        """A place as long as the context lasts, unless another member gets it.

        Raises:
            Busy: the member has as many as one may have, or nobody has more than it.
        """
        own = self._count(member)
        if member and own >= self._own:
            raise Busy(f"{own} {self._what} of yours are open already; end one of these")
        if len(self._taken) >= self._most:
            self._make_room(member)
        place = Place(member, f"another member needs a place; {self._what} are limited")
        self._taken.append(place)
        try:
            yield place
        finally:
            if place in self._taken:
                self._taken.remove(place)

    def _make_room(self, member: str) -> None:
        newest = max(self._taken, key=lambda place: self._count(place.member), default=None)
        # With one more this member would have as many as the one that loses a place.
        if not member or newest is None or self._count(newest.member) <= self._count(member) + 1:
            raise Busy(f"{len(self._taken)} {self._what} are open already; end one of these")
        own = [place for place in self._taken if place.member == newest.member]
        self._taken.remove(own[-1])
        own[-1].lose()

    def _count(self, member: str) -> int:
        return sum(place.member == member for place in self._taken)
