"""An end of a boundary's stream as a state machine: frames sent, expected, and sent again.

The machine receives messages and returns effects; it knows no gRPC, no tensor and no clock. Both
ends run the same machine: upstream sends FORWARD frames and receives BACKWARD ones, downstream the
reverse. A session lives as long as one attempt of a run; streams may break and come back under
it. Rules (docs/explanation/protocol.md):

- a frame has a unique key; a second arrival changes nothing and is acknowledged again;
- at most the other side's window of frames is unacknowledged;
- after a reconnect both sides list what they have, and only the rest is sent again;
- a frame whose base is missing or whose result differs is requested once more, as a key frame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarm_ft.codec.spec import Direction
from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.protocol.machines.outbox import Outbox
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
    SessionMessage,
)

WINDOW_FRAMES = 256
"""Frames that the other side may leave unacknowledged, which bounds a hostile peer's use of memory.
"""


@dataclass(frozen=True, slots=True)
class Transmit:
    """Effect: send this message on the stream."""

    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """Effect: decode this frame, then call `accepted` or `refused`."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Reencode:
    """Effect: encode this frame's value again, as a key frame; the other side lacks the base."""

    frame: Frame
    reason: str


SessionEffect = Transmit | Deliver | Reencode
Effects = list[SessionEffect]


class BoundarySession:
    """State of one end of a boundary during one attempt; see the module's docstring.

    Attributes:
        attempt: Attempt of all frames.
        sends: Direction of the frames that this end sends; it receives the other direction.
    """

    def __init__(self, *, attempt: Attempt, sends: Direction) -> None:
        self.attempt = attempt
        self.sends = sends
        self._step = StepNumber(-1)
        # Frames that this side sends in the step.
        self._sent: dict[FrameKey, Frame] = {}  # all of them, arrived or not
        self._outbox: Outbox[FrameKey, Frame] = Outbox()  # not acknowledged
        self._refused_there: set[FrameKey] = set()  # whose delta the other side refused
        self._reencoding: set[FrameKey] = set()  # refused, and not encoded again yet
        # Frames that the other side sends in the step.
        self._received: set[FrameKey] = set()  # accepted
        self._decoding: set[FrameKey] = set()  # delivered to the caller, who decodes them
        self._refused_here: set[FrameKey] = set()  # requested as key frames on this stream
        self._early: dict[FrameKey, Frame] = {}  # of the next step, which is not begun here

    @property
    def received(self) -> frozenset[FrameKey]:
        """Keys of this step's accepted frames, for a hello."""
        return frozenset(self._received)

    @property
    def sent(self) -> tuple[Frame, ...]:
        """This step's frames of this side, arrived or not."""
        return tuple(self._sent.values())

    @property
    def is_settled(self) -> bool:
        """Whether the other side has everything that was sent in this step."""
        return not self._outbox and not self._reencoding

    def is_acknowledged(self, key: FrameKey) -> bool:
        """Whether the other side has acknowledged this frame of this side."""
        return self._outbox.find(key) is None and key not in self._reencoding

    def forget(self, key: FrameKey) -> None:
        """Forget an acknowledged frame, which nobody needs again in any attempt."""
        self._sent.pop(key, None)

    def has_missing(self, keys: Iterable[FrameKey]) -> bool:
        """Whether some of these frames have not arrived; those that are being decoded have."""
        arrived = self._received | self._decoding
        return not arrived.issuperset(keys)

    # ---- actions of this side

    def begin(self, step: StepNumber) -> Effects:
        """Start a step: forget the last one, and process frames that arrived before their plan."""
        self._step = step
        self._outbox.clear()
        for sent in (self._sent, self._refused_there, self._reencoding):
            sent.clear()
        for received in (self._received, self._decoding, self._refused_here):
            received.clear()
        early = [frame for key, frame in self._early.items() if key.step == step]
        self._early.clear()
        return [effect for frame in early for effect in self._frame(frame)]

    def send(self, frame: Frame) -> Effects:
        """Queue a frame of the present step; it goes out as soon as the window allows.

        Raises:
            OutOfTurn: The frame belongs to another step, attempt or direction.
        """
        key = frame.key
        if (key.attempt, key.step, key.direction) != (self.attempt, self._step, self.sends):
            raise OutOfTurn(f"cannot send {key} in step {self._step} of attempt {self.attempt}")
        if key in self._refused_there and key not in self._reencoding:
            return []  # the other side acknowledged it meanwhile, or has its key frame already
        self._sent[key] = frame
        self._reencoding.discard(key)
        return _transmitted(self._outbox.put(key, frame))

    def accepted(self, key: FrameKey) -> Effects:
        """Record that the delivered frame was decoded, and that its digest agrees."""
        if key not in self._decoding:
            return []
        self._decoding.discard(key)
        self._received.add(key)
        return [Transmit(Ack(key))]

    def refused(self, key: FrameKey, reason: str) -> Effects:
        """Record that the delivered frame cannot be used; request a key frame of its sample."""
        if key not in self._decoding:
            return []
        self._decoding.discard(key)
        self._refused_here.add(key)
        return [Transmit(KeyFrameRequest(key, reason))]

    def discarded(self, key: FrameKey) -> None:
        """Record that the caller discarded the delivered frame, because it broke the protocol.

        The caller then drops the stream; the frame arrives again over the next one.
        """
        self._decoding.discard(key)

    # ---- events of the stream

    def connected(self, hello: BoundaryHello) -> Effects:
        """Record that a stream is up with this hello; return the frames to send again."""
        self._refused_here.clear()  # a request may have been lost with the last stream
        for key in hello.received:
            self._reencoding.discard(key)
            self._outbox.withdraw(key)
        return _transmitted(self._outbox.connected(hello.window_frames))

    def disconnected(self) -> None:
        """Record that the stream is gone; frames wait in the outbox."""
        self._outbox.disconnected()

    def receive(self, message: SessionMessage) -> Effects:
        """Process a message of the other side.

        Raises:
            OutOfTurn: The message is not allowed now; the stream should be dropped.
        """
        match message:
            case Frame():
                return self._frame(message)
            case Ack(key):
                self._reencoding.discard(key)
                return _transmitted(self._outbox.acknowledge(key))
            case KeyFrameRequest(key, reason):
                return self._key_frame_request(key, reason)

    def _frame(self, frame: Frame) -> Effects:
        key = frame.key
        if key.direction is self.sends:
            raise OutOfTurn(f"got a {key.direction.name} frame, but this side sends those")
        if key.attempt != self.attempt or key.step < self._step:
            return []
        if key.step > self._step:
            return self._park(frame)
        if key in self._received:
            return [Transmit(Ack(key))]
        was_refused = key in self._refused_here and frame.kind is FrameKind.DELTA
        if key in self._decoding or was_refused:
            return []  # a copy: one frame of this key is enough, and a delta is refused once
        self._decoding.add(key)
        return [Deliver(frame)]

    def _park(self, frame: Frame) -> Effects:
        """Store a frame of the next step until `begin`."""
        # The sender may begin a step before we do; its window bounds how far it can run ahead.
        if frame.key.step != self._step + 1 and self._step >= 0:
            raise OutOfTurn(f"got a frame of step {frame.key.step} during step {self._step}")
        if len(self._early) >= WINDOW_FRAMES and frame.key not in self._early:
            raise OutOfTurn(f"more than {WINDOW_FRAMES} frames arrived before their step began")
        self._early[frame.key] = frame
        return []

    def _key_frame_request(self, key: FrameKey, reason: str) -> Effects:
        frame = self._outbox.find(key)
        if frame is None or key in self._refused_there:
            return []
        if frame.kind is not FrameKind.DELTA:
            raise OutOfTurn(f"got a request for a key frame of {key}, which has no base: {reason}")
        self._refused_there.add(key)
        self._reencoding.add(key)
        self._outbox.withdraw(key)  # it must not go out again as the delta that was refused
        return [Reencode(frame, reason)]


def _transmitted(frames: list[Frame]) -> Effects:
    return [Transmit(frame) for frame in frames]
