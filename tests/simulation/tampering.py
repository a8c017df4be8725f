"""The tampering of a broken or hostile peer with the frames that it sends. Seeded.

TCP and HTTP/2 neither double, reorder nor alter the messages of a call, so these faults are put
where they can arise: in the sender. Frames of a boundary are sent twice, later than others that
came after them, altered or garbled. Altered is only what names its own result (key and delta frames
carry digests): a direct frame, a plan or a commit with other numbers in it is a lie that nobody can
distinguish from the truth. What is garbled does not parse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from swarm_ft.protocol.messages.boundary import Frame
from swarm_ft.transport.methods import LINK

GARBAGE = b"\xff\xff\xff"


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """The probability of each kind of tampering with a sender's frames."""

    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    garble: float = 0.0


MEAN_LATE_S = 0.05
"""By how much a reordered frame falls behind."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that really leave.

    Attributes:
        late_s: how much later than in their turn they arrive.
    """

    data: bytes
    late_s: float = 0.0


class Tamperer:
    """Sits where messages leave; `habits` by the sender's and the receiver's machine."""

    def __init__(self, rng: Random) -> None:
        self.habits: dict[tuple[str, str], Habit] = {}
        self.counts: Counter[str] = Counter()
        self._rng = rng

    def altered(self, source: str, target: str, path: str, data: bytes) -> list[Sent]:
        """Return the messages that are really sent in place of `data`."""
        habit = self.habits.get((source, target))
        if habit is None or path != LINK.path:
            return [Sent(data)]
        message = LINK.request.from_bytes(data)
        if not isinstance(message, Frame):
            return [Sent(data)]
        return self._meet(habit, message, data)

    def _meet(self, habit: Habit, frame: Frame, data: bytes) -> list[Sent]:
        if self._happens("duplicate", habit.duplicate):
            return [Sent(data), Sent(data, self._late_s())]
        if self._happens("reorder", habit.reorder):
            return [Sent(data, self._late_s())]
        if self._happens("garble", habit.garble):
            return [Sent(GARBAGE)]
        if frame.result_digest and self._happens("corrupt", habit.corrupt):
            return [Sent(self._corrupted(frame, data))]
        return [Sent(data)]

    def _happens(self, kind: str, probability: float) -> bool:
        happens = self._rng.random() < probability
        if happens:
            self.counts[kind] += 1
        return happens

    def _late_s(self) -> float:
        return self._rng.expovariate(1 / MEAN_LATE_S)

    def _corrupted(self, frame: Frame, data: bytes) -> bytes:
        tensor_bytes = len(frame.tensor.to_bytes())  # the message's last field
        altered = bytearray(data)
        altered[self._rng.randrange(tensor_bytes) - tensor_bytes] ^= 1 << self._rng.randrange(8)
        return bytes(altered)
