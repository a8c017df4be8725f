"""Codecs by their texts."""

from swarm_ft.codec import from_spec
from swarm_ft.codec.base import Codec
from swarm_ft.protocol.spec.codec_spec import Direction, parse_codec_spec


def parse(text: str, direction: Direction = Direction.FORWARD) -> Codec:
    """The codec of a text such as `aq4`."""
    return from_spec(parse_codec_spec(text, direction))
