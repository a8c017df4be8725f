"""Transfer of bases over a boundary, in parts, to the end that decodes with them. Pure.

A basis may be larger than a frame, which would have to wait behind it. A basis that is needed later
is sent in small parts, one after each frame, where links have room. A basis that a frame needs is
sent at once. Both ends keep the bases that frames used last, and count alike, so that the sender
knows which bases it has to send again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from swarm_ft.codec.basis import Basis
from swarm_ft.errors import BadFrame, OutOfTurn
from swarm_ft.protocol.messages.boundary import SharedBasis

MOST_BASES = 4
"""Bases that the receiver stores for a connection, and receives in a step.

These are first activations and changes, each for the present step and the next. Gradients have one
kind of basis only.
"""
MOST_PART_BYTES = 1 << 16
"""Largest part in bytes: a link of 1 Mbps sends it in half a second."""
LEAST_PART_BYTES = 1 << 10
_A_FRAMES_SHARE = 4
"""Divisor of a frame's bytes for the part behind it.

With a quarter of each frame a basis is sent within a step, and a link at three quarters of its
capacity takes no longer.
"""

T = TypeVar("T")


class BasisSender:
    """Bases that this end has sent over the present connection."""

    def __init__(self) -> None:
        self._sent: dict[bytes, None] = {}
        self._current_name = b""
        self._rest = b""

    def reconnected(self) -> None:
        """Begin anew: the other end has lost all bases."""
        self._sent.clear()
        self._current_name = self._rest = b""

    def has_sent(self, name: bytes) -> bool:
        """Whether the other end has a basis, which it then keeps longer."""
        if name in self._sent:
            _touch(self._sent, name, None)
        return name in self._sent

    def begin(self, basis: Basis) -> None:
        """Begin to send a basis in parts, unless it was sent or another one is in progress."""
        if not self._rest and basis.name not in self._sent:
            self._current_name, self._rest = basis.name, basis.data

    def part(self, frame_bytes: int) -> Iterator[SharedBasis]:
        """Yield the next part of the basis in progress, if any, after a frame of this size."""
        size = max(LEAST_PART_BYTES, min(frame_bytes // _A_FRAMES_SHARE, MOST_PART_BYTES))
        if self._rest:
            yield self._cut(size)

    def whole(self, basis: Basis) -> Iterator[SharedBasis]:
        """Yield all missing parts of a basis, after the rest of the one in progress."""
        yield from self._remaining_parts()
        self.begin(basis)
        yield from self._remaining_parts()

    def _remaining_parts(self) -> Iterator[SharedBasis]:
        while self._rest:
            yield self._cut(MOST_PART_BYTES)

    def _cut(self, size: int) -> SharedBasis:
        part, self._rest = self._rest[:size], self._rest[size:]
        if not self._rest:
            _touch(self._sent, self._current_name, None)
        return SharedBasis(part, len(self._rest))


class BasisReceiver:
    """Bases of the other end that are stored here, and the parts of the next one.

    Args:
        most_bytes: Size limit of a basis.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._received: dict[bytes, Basis] = {}
        self._num_received = 0
        self._parts: list[bytes] = []
        self._missing_bytes = 0

    def begin_step(self) -> None:
        """Start a step, in which the full number of bases may arrive again."""
        self._num_received = 0

    def reconnected(self) -> None:
        """Begin anew: the transfer in progress starts again."""
        self._num_received = 0
        self._parts.clear()

    def get(self, name: bytes) -> Basis | None:
        """Return the basis of this name, if it has arrived and is still stored."""
        return self._received.get(name)

    def mark_used(self, name: bytes) -> None:
        """Register that a frame used a basis."""
        if name in self._received:
            _touch(self._received, name, self._received[name])

    def receive(self, part: SharedBasis) -> bytes | None:
        """Handle a part; return the bytes of the basis if it is complete.

        Raises:
            BadFrame: The part is empty or too small, does not continue the last one, or belongs to
                a basis that is too large.
            OutOfTurn: The step cannot need this many bases.
        """
        num_bytes = len(part.basis)
        if not num_bytes or (part.rest_bytes and num_bytes < LEAST_PART_BYTES):
            raise BadFrame(
                f"basis: expected a part of {LEAST_PART_BYTES} bytes or more, got {num_bytes}"
            )
        all_bytes = num_bytes + part.rest_bytes
        if all_bytes > self._most_bytes:
            raise BadFrame(f"basis: expected at most {self._most_bytes} bytes, got {all_bytes}")
        if self._parts and all_bytes != self._missing_bytes:
            missing = f"{self._missing_bytes} bytes more"
            raise BadFrame(f"basis: expected {missing}, got {num_bytes} and {part.rest_bytes}")
        if not self._parts:
            self._num_received += 1
        if self._num_received > MOST_BASES:
            raise OutOfTurn(
                f"expected at most {MOST_BASES} bases in a step, got {self._num_received}"
            )
        self._parts.append(part.basis)
        self._missing_bytes = part.rest_bytes
        if part.rest_bytes:
            return None
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    def keep(self, basis: Basis) -> None:
        """Store a basis."""
        _touch(self._received, basis.name, basis)


def _touch(bases: dict[bytes, T], name: bytes, basis: T) -> None:
    """Move a basis to the end of the dict, and drop the first ones above the limit."""
    bases.pop(name, None)
    bases[name] = basis
    while len(bases) > MOST_BASES:
        del bases[next(iter(bases))]
