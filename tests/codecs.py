"""Codecs by their texts."""

import torch
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.codec.base import Codec
from swarm_ft.protocol.spec.codec_spec import Direction, parse_codec_spec


def parse(text: str, direction: Direction = Direction.FORWARD) -> Codec:
    """The codec of a text such as `aq4`."""
    return from_spec(parse_codec_spec(text, direction))


def assert_sender_has_the_value(codec: Codec, x: Tensor, base: Tensor | None) -> None:
    """Check that the sender's value is the receiver's, to the bit, and the frame is `encode`'s."""
    encoded, value = codec.encode_and_decode(x, base)
    assert encoded == codec.encode(x, base)
    assert torch.equal(value.view(torch.int32), codec.decode(encoded, base).view(torch.int32))
