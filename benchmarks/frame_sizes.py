"""Prints what one frame takes on the wire, headers and gRPC framing included, against float32."""

import sys

import torch

from swarm_ft.codec.spec import Direction
from swarm_ft.digest import DIGEST_BYTES
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.messages.boundary import Frame, FrameKey, FrameKind
from swarm_ft.protocol.wire.frames import wire_bytes
from tests.codecs import parse

SHAPES = ((128, 64), (128, 768), (1024, 1600))
DIGEST = bytes(DIGEST_BYTES)


def frames(x: torch.Tensor) -> dict[str, Frame]:
    """One frame of each kind, late in a long run, where numbers take the most bytes."""
    name = Attempt(3), StepNumber(1000), MicrobatchIndex(30), SampleId(100_000)
    forward, backward = (FrameKey(*name, way) for way in Direction)
    made = {}
    for codec in ("aq4", "aq2+z"):
        delta = parse(codec).encode(x, 0.9 * x)
        made[f"{codec} delta"] = Frame(forward, FrameKind.DELTA, delta, DIGEST, DIGEST)
    for codec in ("fp16", "q4+z"):
        first = parse(codec).encode(x)
        made[f"{codec} key"] = Frame(forward, FrameKind.KEY, first, result_digest=DIGEST)
    for codec in ("q8", "q2+z"):
        gradient = parse(codec, Direction.BACKWARD).encode(x)
        made[f"{codec} gradient"] = Frame(backward, FrameKind.DIRECT, gradient)
    return made


def main() -> None:
    """One line a shape and kind: bytes, and how many times less than float32."""
    for tokens, channels in SHAPES:
        x = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(0))
        for name, frame in frames(x).items():
            num_bytes = wire_bytes(frame)
            ratio = 4 * tokens * channels / num_bytes
            sys.stdout.write(f"{tokens:5} x {channels:<5} {name:14} {num_bytes:9,} {ratio:5.1f}x\n")


main()
