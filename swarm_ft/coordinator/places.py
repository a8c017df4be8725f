"""Places for long calls: a limited number in all, and a fair share for each member.

A member with no place, or few, gets one even when all are taken: the member with the most places
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
        member: Member of the call; empty without keys.
        reason: Text of the error when it is lost.
    """

    def __init__(self, member: str, reason: str) -> None:
        self.member = member
        self._reason = reason
        self._is_lost = asyncio.Event()

    def lose(self) -> None:
        """Give this place to another member."""
        self._is_lost.set()

    async def lost(self) -> NoReturn:
        """Wait until another member gets this place.

        Raises:
            Busy: The place is lost.
        """
        await self._is_lost.wait()
        raise Busy(self._reason)


class Places:
    """A limited number of places.

    Args:
        most: Most places of all members together.
        own: Most places of one member, where members have keys.
        what: Noun in the plural for error messages, such as "followers".
    """

    def __init__(self, most: int, own: int, what: str) -> None:
        self._most = most
        self._own = own
        self._what = what
        self._taken: list[Place] = []

    @property
    def num_taken(self) -> int:
        """Number of taken places."""
        return len(self._taken)

    @contextmanager
    def taken(self, member: str) -> Iterator[Place]:
        """Take a place for the duration of the context, unless another member gets it.

        Raises:
            Busy: The member has its most, or no member has more than it.
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
