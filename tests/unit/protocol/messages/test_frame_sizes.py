"""Bytes of a frame on the wire, headers included, from 128 tokens x 64 channels up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec import pack_buffer
from swarm_ft.codec.spec import Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.digest import digest_of
from swarm_ft.ids import Attempt, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.messages.boundary import Frame, FrameKey, FrameKind, SideInfoPart
from swarm_ft.protocol.messages.reduction import GradientPiece, Phase, PieceKey
from swarm_ft.protocol.wire.frames import (
    GRPC_PREFIX_BYTES,
    LINK_MESSAGE,
    wire_bytes,
)
from tests.codecs import parse
from tests.draws import draws

LARGEST = 2**32 - 1
FLOAT32_BYTES = 4


def key_of(numbers: tuple[int, int, int, int], direction: Direction) -> FrameKey:
    attempt, step, microbatch, sample = numbers
    return FrameKey(
        Attempt(attempt),
        StepNumber(step),
        MicrobatchIndex(microbatch),
        SampleId(sample),
        direction,
    )


def worst_key(direction: Direction) -> FrameKey:
    """Return the key with the most bytes."""
    return key_of((LARGEST, LARGEST, LARGEST, LARGEST), direction)


def delta_frame(tensor: EncodedTensor) -> Frame:
    digest = digest_of(b"")
    return Frame(worst_key(Direction.FORWARD), FrameKind.DELTA, tensor, digest, digest)


def direct_frame(tensor: EncodedTensor) -> Frame:
    return Frame(worst_key(Direction.BACKWARD), FrameKind.DIRECT, tensor)


def test_a_real_aq4_delta_takes_at_most_a_seventh_of_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(128, 64, generator=generator)
    x = base + 0.1 * torch.randn(128, 64, generator=generator)
    tensor = parse("aq4").encode(x, base)
    assert wire_bytes(delta_frame(tensor)) <= FLOAT32_BYTES * x.numel() / 7
    assert len(pack_buffer(x)) > len(tensor.payload)


def test_a_real_q8_gradient_takes_at_most_a_3_8th_of_float32() -> None:
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    tensor = parse("q8", Direction.BACKWARD).encode(x)
    assert wire_bytes(direct_frame(tensor)) <= FLOAT32_BYTES * x.numel() / 3.8


@pytest.mark.parametrize(
    ("codec", "make_frame", "ratio"), [("aq4", delta_frame, 7), ("q8", direct_frame, 3.8)]
)
@given(tokens=st.integers(128, 1024), channels=st.integers(64, 1024))
@settings(derandomize=True, deadline=None, max_examples=draws(30))
def test_every_larger_frame_keeps_the_ratio(
    codec: str,
    make_frame: Callable[[EncodedTensor], Frame],
    ratio: float,
    tokens: int,
    channels: int,
) -> None:
    direction = Direction.BACKWARD if make_frame is direct_frame else Direction.FORWARD
    parsed = parse(codec, direction)
    payload = bytes(parsed.max_payload_bytes(tokens, channels))
    frame = make_frame(EncodedTensor(parsed.spec, tokens, channels, payload))
    assert wire_bytes(frame) <= FLOAT32_BYTES * tokens * channels / ratio


sizes = st.integers(0, 300) | st.sampled_from([16_300, 16_384, 1 << 21])
numbers = st.integers(0, LARGEST)


@given(num_bytes=sizes, numbers=st.tuples(numbers, numbers, numbers, numbers))
@settings(derandomize=True, deadline=None, max_examples=draws(200))
def test_sizes_are_those_of_serialised_messages_and_their_grpc_prefix(
    num_bytes: int, numbers: tuple[int, int, int, int]
) -> None:
    tensor = EncodedTensor(parse("q8").spec, 2, 3, bytes(num_bytes))
    for frame in (direct_frame(tensor), delta_frame(tensor)):
        frame = replace(frame, key=key_of(numbers, frame.key.direction))
        data = LINK_MESSAGE.to_bytes(frame)
        assert wire_bytes(frame) == len(data) + GRPC_PREFIX_BYTES
        assert LINK_MESSAGE.from_bytes(data) == frame
    piece = GradientPiece(
        PieceKey(Attempt(numbers[0]), StepNumber(numbers[1]), Phase.SUM, numbers[2]), tensor
    )
    data = LINK_MESSAGE.to_bytes(piece)
    assert wire_bytes(piece) == len(data) + GRPC_PREFIX_BYTES
    assert LINK_MESSAGE.from_bytes(data) == piece
    basis = SideInfoPart(bytes(1 + num_bytes), numbers[0])  # none is empty
    assert wire_bytes(basis) == len(LINK_MESSAGE.to_bytes(basis)) + GRPC_PREFIX_BYTES


def test_a_piece_costs_a_few_bytes_beside_its_payload() -> None:
    tensor = EncodedTensor(parse("q8").spec, 1, 128, b"payload")
    piece = GradientPiece(PieceKey(Attempt(1), StepNumber(2), Phase.SUM, 3), tensor)
    assert wire_bytes(piece) - len(tensor.payload) <= 40
