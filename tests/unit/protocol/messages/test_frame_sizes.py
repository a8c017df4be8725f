"""What a frame costs on the wire, headers included, from 128 tokens x 64 channels up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec import pack_buffer, parse
from swarm_ft.protocol.messages.boundary import EncodedTensor, Frame, FrameKey, FrameKind
from swarm_ft.protocol.spec.codec_spec import Direction
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.protocol.wire.frames import (
    GRPC_PREFIX_BYTES,
    frame_wire_bytes,
    link_from_wire,
    link_to_wire,
)

LARGEST = 2**32 - 1
FLOAT32_BYTES = 4


def worst_key(direction):
    """The key that takes the most bytes."""
    return FrameKey(LARGEST, LARGEST, LARGEST, LARGEST, direction)


def delta_frame(tensor):
    digest = digest_of(b"")
    return Frame(worst_key(Direction.FORWARD), FrameKind.DELTA, tensor, digest, digest)


def direct_frame(tensor):
    return Frame(worst_key(Direction.BACKWARD), FrameKind.DIRECT, tensor)


def test_a_real_aq4_delta_takes_at_most_a_seventh_of_float32():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(128, 64, generator=generator)
    x = base + 0.1 * torch.randn(128, 64, generator=generator)
    tensor = parse("aq4").encode(x, base)
    assert frame_wire_bytes(delta_frame(tensor)) <= FLOAT32_BYTES * x.numel() / 7
    assert len(pack_buffer(x)) > len(tensor.payload)


def test_a_real_q8_gradient_takes_at_most_a_3_8th_of_float32():
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    tensor = parse("q8", Direction.BACKWARD).encode(x)
    assert frame_wire_bytes(direct_frame(tensor)) <= FLOAT32_BYTES * x.numel() / 3.8


@pytest.mark.parametrize(
    ("codec", "make_frame", "ratio"), [("aq4", delta_frame, 7), ("q8", direct_frame, 3.8)]
)
@given(tokens=st.integers(128, 1024), channels=st.integers(64, 1024))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_every_larger_frame_keeps_the_ratio(codec, make_frame, ratio, tokens, channels):
    direction = Direction.BACKWARD if make_frame is direct_frame else Direction.FORWARD
    codec = parse(codec, direction)
    payload = bytes(codec.max_payload_bytes(tokens, channels))
    frame = make_frame(EncodedTensor(codec.spec, tokens, channels, payload))
    assert frame_wire_bytes(frame) <= FLOAT32_BYTES * tokens * channels / ratio


def test_the_size_is_that_of_the_serialised_message_and_its_grpc_prefix():
    tensor = EncodedTensor(parse("q8").spec, 2, 3, b"payload")
    frame = direct_frame(tensor)
    wire = link_to_wire(frame)
    assert frame_wire_bytes(frame) == len(wire.SerializeToString()) + GRPC_PREFIX_BYTES
    assert link_from_wire(wire) == frame
