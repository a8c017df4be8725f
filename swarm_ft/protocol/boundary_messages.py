"""What neighbours say to each other over a boundary, both ways, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId
from swarm_ft.protocol.frame import Frame, FrameKey


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryHello:
    """First message of either side; what the other has already is not sent again."""

    run_id: RunId
    spec_digest: bytes
    boundary: BlockIndex
    peer_id: PeerId
    attempt: Attempt
    window_frames: int
    received: frozenset[FrameKey] = frozenset()


@dataclass(frozen=True, slots=True)
class Ack:
    """The frame of this key was decoded; its sender need not send it again."""

    key: FrameKey


@dataclass(frozen=True, slots=True)
class KeyFrameRequest:
    """The frame of this key builds on a buffer that is not here, or came out different."""

    key: FrameKey
    reason: str


BoundaryMessage = BoundaryHello | Frame | Ack | KeyFrameRequest
