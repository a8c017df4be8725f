"""A frame: one sample's activation or gradient on its way over a boundary. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.codec_spec import CodecSpec, Direction


class FrameKind(IntEnum):
    """What a frame builds on; the numbers are those of the wire."""

    DIRECT = 1
    """Builds on nothing and leaves no buffer."""
    KEY = 2
    """Builds on nothing and becomes the sample's buffer."""
    DELTA = 3
    """Builds on the buffer that `base_digest` names."""


class FrameKey(NamedTuple):
    """Names a frame for ever inside its run and boundary."""

    attempt: Attempt
    step: StepNumber
    microbatch: MicrobatchIndex
    sample: SampleId
    direction: Direction


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """One sample's tensor as a codec wrote it.

    Attributes:
        codec: the codec that wrote it, and the only one that can read it.
        tokens: rows of the tensor.
        channels: columns of the tensor.
        payload: codes and scales, in the codec's own layout.
    """

    codec: CodecSpec
    tokens: int
    channels: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded tensor with its name and, for buffered codecs, the digests at both ends.

    Attributes:
        base_digest: of the buffer a DELTA builds on; empty otherwise.
        result_digest: of the buffer that KEY and DELTA make; empty otherwise.
    """

    key: FrameKey
    kind: FrameKind
    tensor: EncodedTensor
    base_digest: bytes = b""
    result_digest: bytes = b""
