"""Codec specs: names and numbers, and what a wrong one is told."""

import pytest

from swarm_ft.errors import BadCodec
from swarm_ft.protocol.codec_spec import CodecName, CodecSpec, Direction, parse_codec_spec

BITS = range(2, 9)
# fmt: off
UNKNOWN = [
    "", "zip", "q", "aq", "none32", "fp16 ", "fp168", "fp", "fp32", "4q", "aq4,q8", "Q4", "q-4",
    "q4\n", "q4.0", "q1000", "q٤",
]
# fmt: on


@pytest.mark.parametrize(
    ("text", "spec"),
    [("none", CodecSpec(CodecName.NONE, 32)), ("fp16", CodecSpec(CodecName.FP16, 16))]
    + [(f"q{bits}", CodecSpec(CodecName.Q, bits)) for bits in BITS],
)
@pytest.mark.parametrize("direction", Direction)
def test_direct_codecs_parse_in_both_directions(text, spec, direction):
    assert parse_codec_spec(text, direction) == spec
    assert str(spec) == text
    assert not spec.is_delta


@pytest.mark.parametrize("bits", BITS)
def test_aq_parses_forward_only(bits):
    spec = parse_codec_spec(f"aq{bits}", Direction.FORWARD)
    assert spec == CodecSpec(CodecName.AQ, bits)
    assert str(spec) == f"aq{bits}"
    assert spec.is_delta
    with pytest.raises(BadCodec, match=f"codec 'aq{bits}': .*forward only; .* use q{bits}"):
        parse_codec_spec(f"aq{bits}", Direction.BACKWARD)


@pytest.mark.parametrize("text", ["q0", "q1", "q9", "q16", "aq1", "aq9", "aq999"])
def test_bits_out_of_range_are_named(text):
    bits = text.lstrip("aq")
    with pytest.raises(BadCodec, match=f"codec '{text}': {bits} bits is outside 2 to 8"):
        parse_codec_spec(text, Direction.FORWARD)


@pytest.mark.parametrize(
    "text",
    UNKNOWN,
)
def test_an_unknown_codec_is_told_what_is_known(text):
    with pytest.raises(BadCodec, match="expected none, fp16, qB or aqB with B from 2 to 8"):
        parse_codec_spec(text, Direction.FORWARD)
