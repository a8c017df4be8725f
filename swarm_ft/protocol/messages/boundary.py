"""Messages between neighbours over a boundary, both ways, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, NamedTuple

from swarm_ft.codec.spec import Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.spec.bounds import Digest, Length, Range

# ---- a frame: one sample's activation or gradient, sent over a boundary


class FrameKind(IntEnum):
    """Kind of a frame, by what it builds on; the numbers are those of the wire."""

    DIRECT = 1
    """A frame that builds on nothing and leaves no buffer."""
    KEY = 2
    """A frame that builds on nothing and becomes the sample's buffer."""
    DELTA = 3
    """A frame that builds on the buffer that `base_digest` names."""


class FrameKey(NamedTuple):
    """Unique name of a frame inside its run and boundary."""

    attempt: Attempt
    step: StepNumber
    microbatch: MicrobatchIndex
    sample: SampleId
    direction: Direction


@dataclass(frozen=True, slots=True)
class Frame:
    """Neighbour to neighbour: an encoded tensor with its name, and digests of its buffers.

    Attributes:
        key: Name of the frame.
        kind: Kind of the frame.
        tensor: The encoded tensor.
        base_digest: Digest of the buffer that a DELTA builds on; empty otherwise.
        result_digest: Digest of the buffer that KEY and DELTA make, and of the payload that makes
            it; empty otherwise.
    """

    key: FrameKey
    kind: FrameKind
    tensor: EncodedTensor
    base_digest: bytes = b""
    result_digest: bytes = b""


MAX_RECEIVED_KEYS = 1 << 16
"""Frames of one step over one boundary; a hello with more would exhaust memory."""
MAX_WINDOW_FRAMES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryHello:
    """Neighbour to neighbour: first message of each side, with the frames that it has received."""

    run_id: RunId
    spec_digest: Digest
    boundary: BlockIndex
    peer_id: PeerId
    attempt: Attempt
    window_frames: Annotated[int, Range(1, MAX_WINDOW_FRAMES)]
    received: Annotated[frozenset[FrameKey], Length(MAX_RECEIVED_KEYS)] = frozenset()


@dataclass(frozen=True, slots=True)
class Ack:
    """Receiver to sender of a frame: the frame was decoded, and need not be sent again."""

    key: FrameKey


@dataclass(frozen=True, slots=True)
class KeyFrameRequest:
    """Receiver to sender of a frame: its buffer is missing, or came out different."""

    key: FrameKey
    reason: str


@dataclass(frozen=True, slots=True)
class SideInfoPart:
    """Sender to receiver of frames: a part of side information for coming frames.

    Attributes:
        data: Next bytes of the side information, as `codec.side_info` defines it.
        rest_bytes: Bytes that follow in further parts.
    """

    data: bytes
    rest_bytes: int = 0


SessionMessage = Frame | Ack | KeyFrameRequest
"""Messages of a boundary's session."""
FromNeighbour = SessionMessage | SideInfoPart
"""Messages after the hellos."""
BoundaryMessage = BoundaryHello | FromNeighbour
