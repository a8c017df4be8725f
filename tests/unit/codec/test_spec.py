"""Codec specs: texts and headers both ways, and errors of wrong ones."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec.spec import (
    HEADER_BYTES,
    Axis,
    CodecName,
    CodecSpec,
    Direction,
    Feedback,
    parse_codec_spec,
    parse_dp_spec,
    parse_key_spec,
    spec_from_header,
)
from swarm_ft.errors import BadCodec
from tests.draws import draws

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
GRIDS = (CodecName.Q, CodecName.AQ, CodecName.QC, CodecName.AQC)
DELTAS = (CodecName.AQ, CodecName.AQTOP, CodecName.AQC, CodecName.AQK)
ALONG = (CodecName.QK, CodecName.AQK)
CONSTANT = (CodecName.QC, CodecName.AQC, *ALONG)
FIXED = {CodecName.NONE: 3200, CodecName.FP16: 1600, CodecName.BF16: 1600}
property_test = settings(derandomize=True, deadline=None, max_examples=draws(400))
# fmt: off
UNKNOWN = [
    "", "zip", "4q", "aq4,q8", "Q4", "q-4", "q4\n", " q4", "q4 ", "fp", "fp32", "fp16 ", "q٤",
    "q4.", "q.5", "q4.125", "q4ct", "q4x", "q4+", "q4++z", "q4+Z", "q4+z-d", "aqq4", "aqhq4",
    "q4" + "+z" * 20, "q" * 10_000,
]
# fmt: on


def numbers_of(name: CodecName, entropy: bool) -> st.SearchStrategy[int]:
    """Return every number that the name may have, in hundredths."""
    if name in FIXED:
        return st.just(FIXED[name])
    if name in (CodecName.TOP, CodecName.AQTOP):
        return st.integers(1, 10_000)
    if name in CONSTANT:
        return st.integers(2, 800)
    return st.integers(100, 800) if entropy else st.integers(1, 8).map(lambda bits: 100 * bits)


def feedbacks_of(name: CodecName) -> st.SearchStrategy[Feedback]:
    if name is CodecName.NONE or name in (*DELTAS, *ALONG):
        return st.just(Feedback.NONE)
    return st.sampled_from(Feedback)


@st.composite
def legal_specs(draw: st.DrawFn) -> CodecSpec:
    name = draw(st.sampled_from(CodecName))
    has_steps = name in GRIDS
    entropy = name in CONSTANT or draw(st.booleans())
    return CodecSpec(
        name,
        draw(numbers_of(name, entropy)),
        draw(st.sampled_from([a for a in Axis if a is not Axis.NONE])) if has_steps else Axis.NONE,
        dither=has_steps and draw(st.booleans()),
        entropy=entropy,
        feedback=draw(feedbacks_of(name)),
    )


BUFFERED = (Feedback.EF21, Feedback.LAST)


def directions_of(spec: CodecSpec) -> list[Direction]:
    """Return the directions of frames of `spec`."""
    if spec.feedback is not Feedback.NONE:
        return [BACKWARD]
    return [FORWARD] if spec.name in (*DELTAS, *ALONG) else [FORWARD, BACKWARD]


# ---- texts


@given(spec=legal_specs())
@property_test
def test_every_legal_spec_prints_as_a_text_that_parses_to_it(spec: CodecSpec) -> None:
    for direction in Direction:
        if direction in directions_of(spec):
            assert parse_codec_spec(str(spec), direction) == spec
        else:
            with pytest.raises(BadCodec, match=re.escape(f"codec '{spec}'")):
                parse_codec_spec(str(spec), direction)


@pytest.mark.parametrize(
    ("text", "direction", "spec"),
    [
        ("none", FORWARD, CodecSpec(CodecName.NONE, 3200)),
        ("fp16", BACKWARD, CodecSpec(CodecName.FP16, 1600)),
        ("bf16", FORWARD, CodecSpec(CodecName.BF16, 1600)),
        ("q4c", FORWARD, CodecSpec(CodecName.Q, 400, Axis.CHANNEL)),
        ("q4t", FORWARD, CodecSpec(CodecName.Q, 400, Axis.TOKEN)),
        ("q4f", BACKWARD, CodecSpec(CodecName.Q, 400, Axis.FRAME)),
        ("aq3tc", FORWARD, CodecSpec(CodecName.AQ, 300, Axis.BOTH)),
        ("top0.5", FORWARD, CodecSpec(CodecName.TOP, 50)),
        ("aqtop10", FORWARD, CodecSpec(CodecName.AQTOP, 1000)),
        ("aq1.5c+z", FORWARD, CodecSpec(CodecName.AQ, 150, Axis.CHANNEL, entropy=True)),
        ("qc0.25c", FORWARD, CodecSpec(CodecName.QC, 25, Axis.CHANNEL, entropy=True)),
        ("qc0.25c+z", FORWARD, CodecSpec(CodecName.QC, 25, Axis.CHANNEL, entropy=True)),
        ("qk0.25", FORWARD, CodecSpec(CodecName.QK, 25, entropy=True)),
        ("qk0.25+z", FORWARD, CodecSpec(CodecName.QK, 25, entropy=True)),
        ("aqk1", FORWARD, CodecSpec(CodecName.AQK, 100, entropy=True)),
        ("q2t+d+z", FORWARD, CodecSpec(CodecName.Q, 200, Axis.TOKEN, dither=True, entropy=True)),
        ("q2t+z+d", FORWARD, CodecSpec(CodecName.Q, 200, Axis.TOKEN, dither=True, entropy=True)),
        ("top10+ef", BACKWARD, CodecSpec(CodecName.TOP, 1000, feedback=Feedback.EF)),
        ("q4t+ef21", BACKWARD, CodecSpec(CodecName.Q, 400, Axis.TOKEN, feedback=Feedback.EF21)),
        ("q4t+last", BACKWARD, CodecSpec(CodecName.Q, 400, Axis.TOKEN, feedback=Feedback.LAST)),
    ],
)
def test_texts_mean_what_they_say(text: str, direction: Direction, spec: CodecSpec) -> None:
    assert parse_codec_spec(text, direction) == spec


@pytest.mark.parametrize(
    ("text", "forward", "backward"),
    [
        ("q4", "q4tc", "q4t"),
        ("q4+d", "q4tc+d", "q4t+d"),
        ("q2+z", "q2f+z", "q2t+d+z"),
        ("qc0.5", "qc0.5c", "qc0.5t+d"),
        ("aq4", "aq4tc", None),
        ("aq1.5+z", "aq1.5f+z", None),
        ("aqc0.5", "aqc0.5c", None),
        ("aqk0.5", "aqk0.5", None),
        ("qk2", "qk2", None),
        ("q4+ef", None, "q4t+ef"),
        ("q2+ef21+z", None, "q2t+d+ef21+z"),
        ("q1+z+last", None, "q1t+d+last+z"),
    ],
)
def test_a_spec_without_an_axis_stands_for_the_best_of_its_direction(
    text: str, forward: str | None, backward: str | None
) -> None:
    for direction, stands_for in ((FORWARD, forward), (BACKWARD, backward)):
        if stands_for is not None:
            assert str(parse_codec_spec(text, direction)) == stands_for


@pytest.mark.parametrize("axis", ["f", "c", "t", "tc"])
@pytest.mark.parametrize("text", ["q4{}", "q2{}+z", "q3{}+d", "qc0.5{}"])
@pytest.mark.parametrize("direction", Direction)
def test_a_spec_with_an_axis_is_taken_at_its_word(
    text: str, axis: str, direction: Direction
) -> None:
    assert str(parse_codec_spec(text.format(axis), direction)) == text.format(axis)


@given(spec=legal_specs())
@property_test
def test_what_a_spec_needs_follows_from_its_name_and_feedback(spec: CodecSpec) -> None:
    assert spec.is_delta == (str(spec).startswith("aq") or spec.feedback in BUFFERED)
    assert spec.has_residual == ("+ef" in str(spec) and "+ef21" not in str(spec))
    assert spec.is_constant_quality == (spec.name in CONSTANT)
    assert spec.is_directional == (str(spec).split("+")[0].lstrip("a").startswith("qk"))
    assert spec.has_side_info == (spec.is_directional or "+book" in str(spec))
    assert spec.keeps == (spec.is_delta, spec.feedback if "+book" not in str(spec) else 0)
    assert spec.number == spec.hundredths / 100
    assert spec.bits == int(spec.number)


# ---- headers


@given(spec=legal_specs())
@property_test
def test_headers_lead_back_to_their_specs(spec: CodecSpec) -> None:
    header = spec.to_header()
    assert len(header) == HEADER_BYTES == 4
    assert spec_from_header(header) == spec


def assert_legal_or_refused(header: bytes) -> bool:
    """Check that a header names a codec that users can name, or is refused."""
    try:
        spec = spec_from_header(header)
    except BadCodec as error:
        reason = error.message
    else:
        assert spec.to_header() == header
        assert parse_codec_spec(str(spec), directions_of(spec)[0]) == spec
        return True
    assert reason.isprintable()
    assert len(reason) < 200
    return False


@given(header=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
@property_test
def test_random_headers_name_a_legal_spec_or_none(header: bytes) -> None:
    assert_legal_or_refused(header)


def test_every_name_with_every_flag_names_a_legal_spec_or_none() -> None:
    hundredths = (0, 1, 2, 99, 100, 150, 400, 800, 801, 1600, 3200, 10_001, 25_600, 65_535)
    legal = sum(
        assert_legal_or_refused(bytes([name, flags]) + number.to_bytes(2, "little"))
        for name, flags, number in itertools.product(range(15), range(256), hundredths)
    )
    assert 200 < legal < 2000


@given(spec=legal_specs(), place=st.integers(0, 3), byte=st.integers(0, 255))
@property_test
def test_headers_with_one_byte_changed_name_a_legal_spec_or_none(
    spec: CodecSpec, place: int, byte: int
) -> None:
    header = bytearray(spec.to_header())
    header[place] = byte
    assert_legal_or_refused(bytes(header))


# ---- refusals


@pytest.mark.parametrize("text", UNKNOWN)
@pytest.mark.parametrize("direction", Direction)
def test_an_unknown_codec_is_told_what_is_known(text: str, direction: Direction) -> None:
    with pytest.raises(BadCodec, match=r"expected a codec such as .*q8.*aq4") as raised:
        parse_codec_spec(text, direction)
    assert raised.value.message.startswith(f"codec {text[:40]!a}")
    assert len(raised.value.message) < 200


REFUSED = {
    "none32": "none takes no number",
    "fp168": "fp16 takes no number",
    "bf164": "bf16 takes no number",
    "q": "expected a number of bits, as in q4",
    "aq": "expected a number of bits, as in aq4",
    "top": "expected a number of percent, as in top4",
    "qc": "expected a number of times the spread, as in qc4",
    "q0": "0 bits is outside 1 to 8",
    "q0.5": "0.5 bits is outside 1 to 8",
    "q0.29+z": "0.29 bits is outside 0.3 to 8",
    "q9": "9 bits is outside 1 to 8",
    "aq16": "16 bits is outside 1 to 8",
    "q8.01+z": "8.01 bits is outside 0.3 to 8",
    "q" + "9" * 39: "bits is outside 1 to 8",
    "top0": "0 percent is outside 0.01 to 100",
    "top100.01": "100.01 percent is outside 0.01 to 100",
    "aqtop101": "101 percent is outside 0.01 to 100",
    "qc0.01": "0.01 times the spread is outside 0.02 to 8",
    "qk": "expected a number of times the spread, as in qk4",
    "qk0.01": "0.01 times the spread is outside 0.02 to 8",
    "aqk8.5": "8.5 times the spread is outside 0.02 to 8",
    "qk0.5c": "only q, aq, qc and aqc share steps",
    "aqk0.5+d": "as q, aq, qc and aqc have",
    "qk0.5+ef": "feedback is for gradients, and qk is for activations",
    "aqk0.5+ef21": "feedback is for gradients, and qk is for activations",
    "aqc8.5": "8.5 times the spread is outside 0.02 to 8",
    "q1.5": r"expected a whole number of bits without \+z, got 1.5",
    "hq4": r"no longer has hq; use q4\+z",
    "lowrank16+z": r"no longer has lowrank; use q4\+z",
    "top10+efmix": r"no longer has \+efmix; use \+ef",
    "top10+z+efmix": r"no longer has \+efmix; use \+ef",
    "fp16c": "only q, aq, qc and aqc share steps",
    "top10t": "only q, aq, qc and aqc share steps",
    "none+d": "as q, aq, qc and aqc have",
    "top10+d": "as q, aq, qc and aqc have",
    "q4+x": r"expected one of .*, once, got '\+x'",
    "q4+z+z": r"expected one of .*, once, got '\+z'",
    "q4+d+d": r"expected one of .*, once, got '\+d'",
    "q4+ef+ef21": r"expected one of .*, once, got '\+ef21'",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items())
@pytest.mark.parametrize("direction", Direction)
def test_a_codec_that_cannot_be_is_told_why(text: str, reason: str, direction: Direction) -> None:
    with pytest.raises(BadCodec, match=rf"^codec '{re.escape(text)}': .*{reason}"):
        parse_codec_spec(text, direction)


@pytest.mark.parametrize(
    ("text", "reason"),
    {
        "none+ef": "loses nothing",
        "none+ef21": "loses nothing",
        "none+last": "loses nothing",
        "aq4+ef": "feeds its error back already",
        "aqtop10+ef21": "feeds its error back already",
        "aqc0.5+ef": "feeds its error back already",
    }.items(),
)
@pytest.mark.parametrize("direction", Direction)
def test_feedback_that_makes_no_sense_is_told_why(
    text: str, reason: str, direction: Direction
) -> None:
    with pytest.raises(BadCodec, match=rf"^codec '{re.escape(text)}': .*{reason}"):
        parse_codec_spec(text, direction)


@pytest.mark.parametrize(
    ("text", "instead"),
    {
        "aq4": "q4",
        "aq2t+d+z": "q2t+d+z",
        "aqc0.5": "qc0.5",
        "aqtop10": "top10",
    }.items(),
)
def test_buffered_activations_are_no_codec_of_gradients(text: str, instead: str) -> None:
    advice = re.escape(f"for gradients use {instead}, or {instead}+ef21, which does the same")
    with pytest.raises(BadCodec, match=rf"codec '{re.escape(text)}': .*forward only; {advice}"):
        parse_codec_spec(text, BACKWARD)
    for better in (instead, f"{instead}+ef21"):
        parse_codec_spec(better, BACKWARD)


@pytest.mark.parametrize("text", ["qk0.5", "aqk0.5", "aqk1+z"])
def test_a_basis_is_no_codec_of_gradients(text: str) -> None:
    reason = re.escape("qk needs a basis of activations; for gradients use q1.5+z or qc0.5")
    with pytest.raises(BadCodec, match=rf"^codec '{re.escape(text)}': {reason}"):
        parse_codec_spec(text, BACKWARD)
    parse_codec_spec(text, FORWARD)


def test_a_key_frame_may_be_coded_along_a_basis_but_not_as_a_change() -> None:
    assert str(parse_key_spec("qk0.5")) == "qk0.5"
    with pytest.raises(BadCodec, match=r"builds on nothing; use qk0\.5"):
        parse_key_spec("aqk0.5")


@pytest.mark.parametrize("text", ["qk0.5", "aqk0.5"])
def test_replicas_sum_nothing_along_a_basis(text: str) -> None:
    with pytest.raises(BadCodec, match="expected none, fp16, bf16"):
        parse_dp_spec(text)


@pytest.mark.parametrize("text", ["q4+ef", "top10+ef21", "top10+ef+z", "fp16+ef"])
def test_error_feedback_is_for_gradients(text: str) -> None:
    with pytest.raises(BadCodec, match="error feedback is for gradients"):
        parse_codec_spec(text, FORWARD)
    parse_codec_spec(text, BACKWARD)


HEADERS_OF_NONE = {
    "no name": (0, 0, 400),
    "a name too many": (14, 0, 400),
    "a basis without an entropy stage": (CodecName.QK, 0, 50),
    "a basis for an axis": (CodecName.AQK, Axis.CHANNEL | 16, 50),
    "a basis with dither": (CodecName.AQK, 8 | 16, 50),
    "a basis of gradients": (CodecName.QK, 16 | 2 << 5, 50),
    "axis 5": (CodecName.Q, 5, 400),
    "axis 7": (CodecName.Q, 7, 400),
    "feedback 6": (CodecName.TOP, 6 << 5, 1000),
    "steps of no axis": (CodecName.Q, 0, 400),
    "an axis of no steps": (CodecName.FP16, Axis.TOKEN, 1600),
    "dither of no grid": (CodecName.TOP, 8, 1000),
    "half bits": (CodecName.FP16, 0, 800),
    "constant quality uncoded": (CodecName.QC, Axis.CHANNEL, 50),
    "feedback of a delta": (CodecName.AQ, Axis.CHANNEL | Feedback.EF21 << 5, 400),
    "feedback 3, which versions before had": (CodecName.TOP, 3 << 5, 1000),
    "family 6, which versions before had": (6, 0, 400),
    "family 11, which versions before had": (11, 0, 800),
    "feedback of nothing": (CodecName.NONE, Feedback.EF << 5, 3200),
    "nine bits": (CodecName.AQ, Axis.CHANNEL, 900),
    "a bit and a half uncoded": (CodecName.AQ, Axis.CHANNEL, 150),
}


@pytest.mark.parametrize(
    ("name", "flags", "hundredths"), HEADERS_OF_NONE.values(), ids=HEADERS_OF_NONE
)
def test_headers_that_no_spec_writes_are_refused(name: int, flags: int, hundredths: int) -> None:
    with pytest.raises(BadCodec):
        spec_from_header(bytes([name, flags]) + hundredths.to_bytes(2, "little"))


# ---- key frames

# fmt: off
KEYS = ["none", "fp16", "bf16", "q8", "q4+z", "q2t+d+z", "qc0.25", "top30"]
# fmt: on


@pytest.mark.parametrize("text", KEYS)
def test_what_builds_on_nothing_can_begin_a_buffer(text: str) -> None:
    spec = parse_key_spec(text)
    assert spec == parse_codec_spec(text, FORWARD)
    assert not spec.is_delta


@pytest.mark.parametrize(
    ("text", "instead"),
    {"aq4": "q4", "aq2t+z": "q2t+z", "aqc0.5": "qc0.5", "aqtop10": "top10"}.items(),
)
def test_what_needs_a_buffer_cannot_begin_one(text: str, instead: str) -> None:
    with pytest.raises(BadCodec, match="a key frame builds on nothing") as raised:
        parse_key_spec(text)
    advised = re.search(r"use '?([^' ]+)'?$", raised.value.message)
    assert advised is not None
    assert advised[1] == instead
    parse_key_spec(instead)


@pytest.mark.parametrize("text", ["", "zip", "q9", "q4+ef", "top10+ef21", "none+d"])
def test_a_key_codec_is_checked_as_any(text: str) -> None:
    with pytest.raises(BadCodec, match=re.escape(f"codec '{text}'")):
        parse_key_spec(text)


# ---- replicas' gradients

DP = {"none": "none", "fp16": "fp16", "bf16": "bf16", "q1": "q1t", "q8": "q8t", "q2.5+z": "q2.5t+z"}


@pytest.mark.parametrize(("text", "stands_for"), DP.items())
def test_replicas_gradients_have_a_step_a_row_and_no_dither(text: str, stands_for: str) -> None:
    spec = parse_dp_spec(text)
    assert str(spec) == stands_for
    assert not spec.dither
    assert not spec.is_delta
    assert spec_from_header(spec.to_header()) == spec


# fmt: off
NOT_DP = [
    "", "zip", "q", "q4c", "q4tc", "q4t+d", "q4+d", "q4+ef", "q4+ef21", "q4+z+z", "fp16+z",
    "none+z", "aq4", "hq4", "top10", "qc0.5", "lowrank8", "q4 ", "q" * 9000,
    "momentum", "momentum:q4",
]
# fmt: on


@pytest.mark.parametrize("text", NOT_DP)
def test_other_codecs_of_replicas_gradients_are_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(BadCodec, match="none, fp16, bf16, or q1 to q8") as raised:
        parse_dp_spec(text)
    assert f"codec '{text[:40]}'" in raised.value.message
    assert len(raised.value.message) < 200


@pytest.mark.parametrize("text", ["q0", "q9", "q2.5", "q0.2+z", "q8.5+z", "q4.123+z", "q1..2"])
def test_bits_of_replicas_gradients_are_checked_as_any(text: str) -> None:
    with pytest.raises(BadCodec, match=re.escape(f"codec '{text}'")):
        parse_dp_spec(text)
