"""Bases on their way over a boundary: said in parts by their owner, lent to the other end.

A basis may have more bytes than a frame, so that a frame behind it would wait. What is needed later
only goes in small parts, one behind each frame, where links have room; what a frame needs goes at
once. Both ends keep the bases that frames named last, and count alike, so that the owner knows what
to say again. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from swarm_ft.codec.basis import Basis
from swarm_ft.errors import BadFrame, OutOfTurn
from swarm_ft.protocol.messages.boundary import SharedBasis

MOST_BASES = 4
"""That the receiver keeps of those said over a connection, and that it is said during a step: of
first activations and of changes, each of the present step and the next; of gradients there is one
kind."""
MOST_PART_BYTES = 1 << 16
"""A link of 1 Mbps has it over in half a second."""
LEAST_PART_BYTES = 1 << 10
_A_FRAMES_SHARE = 4
"""Beside a frame goes a quarter of its bytes: a step's frames have a basis over, and take a link
that they use to three quarters no longer."""

T = TypeVar("T")


class Lender:
    """What the owner of bases said of them over the present connection."""

    def __init__(self) -> None:
        self._said: dict[bytes, None] = {}
        self._begun = b""
        self._rest = b""

    def reconnected(self) -> None:
        """The other end has nothing of it any more."""
        self._said.clear()
        self._begun = self._rest = b""

    def has_said(self, name: bytes) -> bool:
        """Whether the other end has it; it stays there longer for being named now."""
        if name in self._said:
            _used_last(self._said, name, None)
        return name in self._said

    def begin(self, basis: Basis) -> None:
        """Say this one in parts from now on, unless it is said or another is under way."""
        if not self._rest and basis.name not in self._said:
            self._begun, self._rest = basis.name, basis.data

    def part(self, frame_bytes: int) -> Iterator[SharedBasis]:
        """What goes behind a frame of so many bytes of the one that is under way, if one is."""
        size = max(LEAST_PART_BYTES, min(frame_bytes // _A_FRAMES_SHARE, MOST_PART_BYTES))
        if self._rest:
            yield self._cut(size)

    def whole(self, basis: Basis) -> Iterator[SharedBasis]:
        """All of it that is not said yet, behind the rest of one that is under way."""
        yield from self._all_of_the_rest()
        self.begin(basis)
        yield from self._all_of_the_rest()

    def _all_of_the_rest(self) -> Iterator[SharedBasis]:
        while self._rest:
            yield self._cut(MOST_PART_BYTES)

    def _cut(self, size: int) -> SharedBasis:
        part, self._rest = self._rest[:size], self._rest[size:]
        if not self._rest:
            _used_last(self._said, self._begun, None)
        return SharedBasis(part, len(self._rest))


class Borrower:
    """The other end's bases that are kept here, and what came of the next.

    Args:
        most_bytes: that one may have.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lent: dict[bytes, Basis] = {}
        self._num_lent = 0
        self._parts: list[bytes] = []
        self._missing_bytes = 0

    def begin_step(self) -> None:
        """In which as many may come again."""
        self._num_lent = 0

    def reconnected(self) -> None:
        """What was under way begins anew."""
        self._num_lent = 0
        self._parts.clear()

    def get(self, name: bytes) -> Basis | None:
        """The one that a frame names, if it came and is not forgotten."""
        return self._lent.get(name)

    def named(self, name: bytes) -> None:
        """A frame that came names it."""
        if name in self._lent:
            _used_last(self._lent, name, self._lent[name])

    def receive(self, part: SharedBasis) -> bytes | None:
        """A part came; all of the basis, if it was the last.

        Raises:
            BadFrame: it is empty, does not go on where the last one ended, or is of too large one.
            OutOfTurn: more bases than frames of a step can need.
        """
        num_bytes = len(part.basis)
        if not num_bytes or (part.rest_bytes and num_bytes < LEAST_PART_BYTES):
            raise BadFrame(f"basis: a part of {num_bytes} bytes")
        all_bytes = num_bytes + part.rest_bytes
        if all_bytes > self._most_bytes:
            raise BadFrame(f"basis: expected at most {self._most_bytes} bytes, got {all_bytes}")
        if self._parts and all_bytes != self._missing_bytes:
            missing = f"{self._missing_bytes} bytes more"
            raise BadFrame(f"basis: expected {missing}, got {num_bytes} and {part.rest_bytes}")
        if not self._parts:
            self._num_lent += 1
        if self._num_lent > MOST_BASES:
            raise OutOfTurn(f"{self._num_lent} bases in a step, which needs {MOST_BASES} at most")
        self._parts.append(part.basis)
        self._missing_bytes = part.rest_bytes
        if part.rest_bytes:
            return None
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    def keep(self, basis: Basis) -> None:
        """It was read."""
        _used_last(self._lent, basis.name, basis)


def _used_last(bases: dict[bytes, T], name: bytes, basis: T) -> None:
    """Have this be the last of them, and drop the first of too many."""
    bases.pop(name, None)
    bases[name] = basis
    while len(bases) > MOST_BASES:
        del bases[next(iter(bases))]
