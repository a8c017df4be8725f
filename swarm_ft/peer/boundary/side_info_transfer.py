"""Transfer of side information over a boundary, in parts, to the end that decodes with it. Pure.

It may be larger than a frame, which would have to wait behind it. Side information that is needed
later is sent in small parts, one after each frame, where links have room. If a frame needs it, it
is sent at once. Both ends keep what frames used last, and count alike, so that the sender knows
what it has to send again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from swarm_ft.codec.side_info import SideInfo
from swarm_ft.errors import BadFrame, OutOfTurn
from swarm_ft.protocol.messages.boundary import SideInfoPart

MAX_STORED = 4
"""Pieces of side information that the receiver stores for a connection, and receives in a step.

These are first activations and changes, each for the present step and the next. Gradients have one
kind only.
"""
MOST_PART_BYTES = 1 << 16
"""Largest part in bytes: a link of 1 Mbps sends it in half a second."""
LEAST_PART_BYTES = 1 << 10
_A_FRAMES_SHARE = 4
"""Divisor of a frame's bytes for the part behind it.

With a quarter of each frame all parts are sent within a step, and a link at three quarters of its
capacity takes no longer.
"""

T = TypeVar("T")


class SideInfoSender:
    """Side information that this end has sent over the present connection."""

    def __init__(self) -> None:
        self._sent: dict[bytes, None] = {}
        self._current_name = b""
        self._rest = b""

    def reconnected(self) -> None:
        """Begin anew: the other end has lost everything."""
        self._sent.clear()
        self._current_name = self._rest = b""

    def has_sent(self, name: bytes) -> bool:
        """Whether the other end has side information of this name, which it then keeps longer."""
        if name in self._sent:
            _touch(self._sent, name, None)
        return name in self._sent

    def begin(self, info: SideInfo) -> None:
        """Begin to send side information in parts, unless it was sent or other is in progress."""
        if not self._rest and info.name not in self._sent:
            self._current_name, self._rest = info.name, info.data

    def part(self, frame_bytes: int) -> Iterator[SideInfoPart]:
        """Yield the next part in progress, if any, after a frame of this size."""
        size = max(LEAST_PART_BYTES, min(frame_bytes // _A_FRAMES_SHARE, MOST_PART_BYTES))
        if self._rest:
            yield self._cut(size)

    def whole(self, info: SideInfo) -> Iterator[SideInfoPart]:
        """Yield all missing parts of side information, after the rest of that in progress."""
        yield from self._remaining_parts()
        self.begin(info)
        yield from self._remaining_parts()

    def _remaining_parts(self) -> Iterator[SideInfoPart]:
        while self._rest:
            yield self._cut(MOST_PART_BYTES)

    def _cut(self, size: int) -> SideInfoPart:
        part, self._rest = self._rest[:size], self._rest[size:]
        if not self._rest:
            _touch(self._sent, self._current_name, None)
        return SideInfoPart(part, len(self._rest))


class SideInfoReceiver:
    """Side information of the other end that is stored here, and the parts of the next one.

    Args:
        max_bytes: Size limit of one piece of side information.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._received: dict[bytes, SideInfo] = {}
        self._num_received = 0
        self._parts: list[bytes] = []
        self._missing_bytes = 0

    def begin_step(self) -> None:
        """Start a step, in which the full number of pieces may arrive again."""
        self._num_received = 0

    def reconnected(self) -> None:
        """Begin anew: the transfer in progress starts again."""
        self._num_received = 0
        self._parts.clear()

    def get(self, name: bytes) -> SideInfo | None:
        """Return the side information of this name, if it has arrived and is still stored."""
        return self._received.get(name)

    def mark_used(self, name: bytes) -> None:
        """Register that a frame used the side information of this name."""
        if name in self._received:
            _touch(self._received, name, self._received[name])

    def receive(self, part: SideInfoPart) -> bytes | None:
        """Handle a part; return the bytes of the side information if it is complete.

        Raises:
            BadFrame: The part is empty or too small, does not continue the last one, or belongs to
                side information that is too large.
            OutOfTurn: The step cannot need this much side information.
        """
        num_bytes = len(part.data)
        if not num_bytes or (part.rest_bytes and num_bytes < LEAST_PART_BYTES):
            raise BadFrame(
                f"side information: expected a part of {LEAST_PART_BYTES} bytes or more, "
                f"got {num_bytes}"
            )
        all_bytes = num_bytes + part.rest_bytes
        if all_bytes > self._max_bytes:
            raise BadFrame(
                f"side information: expected at most {self._max_bytes} bytes, got {all_bytes}"
            )
        if self._parts and all_bytes != self._missing_bytes:
            missing = f"{self._missing_bytes} bytes more"
            raise BadFrame(
                f"side information: expected {missing}, got {num_bytes} and {part.rest_bytes}"
            )
        if not self._parts:
            self._num_received += 1
        if self._num_received > MAX_STORED:
            raise OutOfTurn(
                f"side information: expected at most {MAX_STORED} pieces in a step, "
                f"got {self._num_received}"
            )
        self._parts.append(part.data)
        self._missing_bytes = part.rest_bytes
        if part.rest_bytes:
            return None
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    def keep(self, info: SideInfo) -> None:
        """Store side information."""
        _touch(self._received, info.name, info)


def _touch(stored: dict[bytes, T], name: bytes, entry: T) -> None:
    """Move an entry to the end of the dict, and drop the first ones above the limit."""
    stored.pop(name, None)
    stored[name] = entry
    while len(stored) > MAX_STORED:
        del stored[next(iter(stored))]
