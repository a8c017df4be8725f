"""Codec specs such as `aq4`, `q2t+d+z`, `top10+ef`: names and rules, without torch.

spec     = name [number] [axis] {"+" modifier}
name     = none | fp16 | bf16 | q | aq | top | aqtop | qc | aqc | qk | aqk
axis     = f | c | t | tc          scope of a step: the frame, a channel, a token, both
modifier = d | z | ef | ef21 | last | book
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NoReturn

from swarm_ft.errors import BadCodec


class CodecName(IntEnum):
    """Family of a codec; the number is that of an encoded tensor's header.

    6 and 11 were families that `_REMOVED` names.
    """

    NONE = 1
    FP16 = 2
    Q = 3
    AQ = 4
    BF16 = 5
    TOP = 7
    AQTOP = 8
    QC = 9
    AQC = 10
    QK = 12
    AQK = 13


MIN_RATE = 0.3
"""Least bits a value of `q` and `aq` with an entropy stage."""
MIN_QUALITY_STEP, MAX_QUALITY_STEP = 0.02, 8.0
"""Bounds of the step of `qc`, `aqc`, `qk` and `aqk`, as a multiple of the values' spread."""


class Axis(IntEnum):
    """Values of a sample that share a step."""

    NONE = 0
    """No axis: the codec has no steps."""
    FRAME = 1
    CHANNEL = 2
    TOKEN = 3
    BOTH = 4
    """Both axes: a step is the product of a token's and a channel's."""


class Feedback(IntEnum):
    """Treatment of a sender's error (arXiv 2401.07788, section 2); 3 was `+efmix`."""

    NONE = 0
    EF = 1
    """Add the error to the sample's next gradient."""
    EF21 = 2
    """Send the change against the receiver's value, as AQ-SGD does for activations."""
    LAST = 4
    """Send the difference to a multiple of the sample's last gradient, token by token."""
    BOOK = 5
    """Send the difference to an entry of the sender's learned codebook, token by token."""


class Direction(IntEnum):
    """Direction of a frame; the numbers are those of the wire."""

    FORWARD = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class _Family:
    """Unit and range of a family's number."""

    unit: str
    low: float
    high: float
    whole: bool


_FAMILIES = {
    CodecName.NONE: _Family("bits", 32, 32, True),
    CodecName.FP16: _Family("bits", 16, 16, True),
    CodecName.BF16: _Family("bits", 16, 16, True),
    CodecName.Q: _Family("bits", 1, 8, True),
    CodecName.AQ: _Family("bits", 1, 8, True),
    CodecName.TOP: _Family("percent", 0.01, 100, False),
    CodecName.AQTOP: _Family("percent", 0.01, 100, False),
    CodecName.QC: _Family("times the spread", MIN_QUALITY_STEP, MAX_QUALITY_STEP, False),
    CodecName.AQC: _Family("times the spread", MIN_QUALITY_STEP, MAX_QUALITY_STEP, False),
    CodecName.QK: _Family("times the spread", MIN_QUALITY_STEP, MAX_QUALITY_STEP, False),
    CodecName.AQK: _Family("times the spread", MIN_QUALITY_STEP, MAX_QUALITY_STEP, False),
}
_PLAIN = {CodecName.NONE: "none", CodecName.FP16: "fp16", CodecName.BF16: "bf16"}
_DELTAS = {CodecName.AQ, CodecName.AQTOP, CodecName.AQC, CodecName.AQK}
_GRIDS = {CodecName.Q, CodecName.AQ, CodecName.QC, CodecName.AQC}
_CONSTANT_QUALITY = {CodecName.QC, CodecName.AQC, CodecName.QK, CodecName.AQK}
_LEARNED = {CodecName.QK, CodecName.AQK}
_OF_BITS = {CodecName.NONE, CodecName.FP16, CodecName.BF16, CodecName.Q, CodecName.AQ}
OTHER_BITS = 4.0
"""Bits per value assumed of codecs whose number means something else."""
_AXES = {"": Axis.NONE, "f": Axis.FRAME, "c": Axis.CHANNEL, "t": Axis.TOKEN, "tc": Axis.BOTH}
_AXIS_TEXTS = {axis: text for text, axis in _AXES.items()}
_FEEDBACKS = {each.name.lower(): each for each in Feedback if each is not Feedback.NONE}
_BUFFERED = {Feedback.EF21, Feedback.LAST}
_PATTERN = re.compile(
    r"(?P<name>none|fp16|bf16|top|aqtop|qc|aqc|qk|aqk|q|aq)"
    r"(?P<number>[0-9]+(?:\.[0-9]{1,2})?)?(?P<axis>tc|f|c|t)?(?P<modifiers>(?:\+[a-z0-9]+)*)"
)
_REMOVED = {"hq": "q4+z", "lowrank": "q4+z", "+efmix": "+ef"}
"""Parts of codecs of earlier versions, with a part that replaces each."""
_DP_PATTERN = re.compile(r"none|fp16|bf16|q[0-9.]+(?:\+z)?")
MAX_SPEC_CHARS = 40
_HEADER = struct.Struct("<BBH")


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec with all its settings.

    Attributes:
        name: Family of the codec.
        hundredths: Number of the codec times 100: bits, percent, or times the spread.
        axis: Values that share a step; NONE for codecs without steps.
        dither: Whether it uses subtractive dither, drawn from the frame itself.
        entropy: Whether a lossless stage compresses the codes; bits are then a rate on the wire.
        feedback: Treatment of the error, for gradients.
    """

    name: CodecName
    hundredths: int
    axis: Axis = Axis.NONE
    dither: bool = False
    entropy: bool = False
    feedback: Feedback = Feedback.NONE

    @property
    def number(self) -> float:
        """Bits, percent, or times the spread."""
        return self.hundredths / 100

    @property
    def bits(self) -> int:
        """Whole number of bits of `q` and `aq` without an entropy stage."""
        return self.hundredths // 100

    @property
    def is_delta(self) -> bool:
        """Whether frames build on per-sample buffers at both ends."""
        return self.name in _DELTAS or self.feedback in _BUFFERED

    @property
    def keeps(self) -> tuple[bool, Feedback]:
        """Kind of per-sample state at both ends; codecs of the same kind can replace each other."""
        is_kept = self.feedback is not Feedback.BOOK
        return self.is_delta, self.feedback if is_kept else Feedback.NONE

    @property
    def has_residual(self) -> bool:
        """Whether the sender stores its error for the sample's next visit."""
        return self.feedback is Feedback.EF

    @property
    def is_constant_quality(self) -> bool:
        """Whether steps follow the spread of the values, at any rate of bits."""
        return self.name in _CONSTANT_QUALITY

    @property
    def has_side_info(self) -> bool:
        """Whether the codec needs side information that the sender learned."""
        return self.is_directional or self.feedback is Feedback.BOOK

    @property
    def is_directional(self) -> bool:
        """Whether the codec uses the directions of a learned basis."""
        return self.name in _LEARNED

    @property
    def nominal_bits(self) -> float:
        """Approximate bits per value, for estimates that encode nothing.

        At constant quality a smaller change takes fewer bits. Of codecs along directions these are
        means over runs, from benchmarks/reports/quality.md; of others no mean is known.
        """
        if self.is_directional:
            at_one, power = (0.45, 0.9) if self.is_delta else (1.0, 0.65)
            return at_one / math.pow(self.number, power)
        return self.number if self.name in _OF_BITS else OTHER_BITS

    def to_header(self) -> bytes:
        """Return four bytes that name the codec in an encoded tensor."""
        flags = self.axis | self.dither << 3 | self.entropy << 4 | self.feedback << 5
        return _HEADER.pack(self.name, flags, self.hundredths)

    def __str__(self) -> str:
        text = _PLAIN.get(self.name) or f"{self.name.name.lower()}{self.number:g}"
        text += _AXIS_TEXTS[self.axis] + "+d" * self.dither
        if self.feedback is not Feedback.NONE:
            text += f"+{self.feedback.name.lower()}"
        return text + "+z" * (self.entropy and not self.is_constant_quality)


HEADER_BYTES = _HEADER.size


def spec_from_header(header: bytes) -> CodecSpec:
    """Return the spec of a header's bytes, which any process may have written.

    Raises:
        BadCodec: The bytes name no codec.
    """
    name, flags, hundredths = _HEADER.unpack(header)
    try:
        claimed = CodecSpec(
            CodecName(name),
            hundredths,
            Axis(flags & 7),
            bool(flags & 8),
            bool(flags & 16),
            Feedback(flags >> 5),
        )
    except ValueError as error:
        raise BadCodec(f"codec header {header.hex()}: names none") from error
    _check(claimed, str(claimed))
    return claimed


def parse_codec_spec(text: str, direction: Direction) -> CodecSpec:
    """Return the codec of a text such as `aq4`, checked for its direction, with its axis.

    Raises:
        BadCodec: The name is unknown, a number is out of range, the codec does not take a
            modifier, or makes no sense in that direction.
    """
    for part, other in _REMOVED.items():
        if text.startswith(part) or (part.startswith("+") and part in text):
            _refuse(text[:MAX_SPEC_CHARS], f"swarm-ft no longer has {part}; use {other}")
    match = _PATTERN.fullmatch(text) if len(text) <= MAX_SPEC_CHARS else None
    if match is None:
        _refuse(text[:MAX_SPEC_CHARS], "expected a codec such as none, fp16, q8, aq4 or aq2+z")
    name = CodecName[match["name"].upper()]
    spec = CodecSpec(name, _hundredths(text, name, match["number"]), _AXES[match["axis"] or ""])
    for modifier in match["modifiers"].split("+")[1:]:
        spec = _modified(text, spec, modifier)
    if name in _CONSTANT_QUALITY:
        spec = replace(spec, entropy=True)
    if name in _GRIDS and spec.axis is Axis.NONE:
        spec = _at_its_best(spec, direction)
    _check(spec, text)
    _check_direction(spec, text, direction)
    return spec


def parse_key_spec(text: str) -> CodecSpec:
    """Return the codec of key frames, which build on nothing.

    Raises:
        BadCodec: The text is no codec, see `parse_codec_spec`, or the codec needs a buffer.
    """
    spec = parse_codec_spec(text, Direction.FORWARD)
    if spec.is_delta:
        _refuse(text, f"a key frame builds on nothing; use {_without_buffer(text)}")
    return spec


def parse_dp_spec(text: str) -> CodecSpec:
    """Return the codec of the gradients that replicas of a stage sum: `none`, `fp16`, `q4`.

    Each row of values has its own step, without dither: error feedback covers the error.

    Raises:
        BadCodec: The text is no such codec.
    """
    if _DP_PATTERN.fullmatch(text) is None:
        _refuse(
            text[:MAX_SPEC_CHARS],
            "expected none, fp16, bf16, or q1 to q8 with or without +z, for gradients of replicas",
        )
    spec = parse_codec_spec(text, Direction.BACKWARD)
    return replace(spec, dither=False)


def parse_replacement(spec: CodecSpec, text: str, direction: Direction) -> CodecSpec:
    """Return a codec that can replace `spec`, with the per-sample state at both ends.

    Buffers and residuals hold values, at bits of their own, and not a codec's codes.

    Raises:
        BadCodec: The text is no codec, or the codec needs another kind of state.
    """
    new = parse_codec_spec(text, direction)
    if new.keeps != spec.keeps:
        _refuse(text, f"expected {_kin(spec)}, with the per-sample state of {spec}")
    return new


def _kin(spec: CodecSpec) -> str:
    """Return a description of the codecs with the same kind of state."""
    if spec.feedback is not Feedback.NONE:
        name = f"+{spec.feedback.name.lower()}"
        return f"a codec with {name}, such as q2{name}"
    if spec.is_delta:
        return "a delta codec (aq1 to aq8, with or without +z, aqc0.5, aqtop10)"
    return (
        "a codec without per-sample state (none, fp16, bf16, q1 to q8, with or without +z, top10)"
    )


def _at_its_best(spec: CodecSpec, direction: Direction) -> CodecSpec:
    """Return the spec with the axis that was best in benchmarks/reports/quality.md."""
    if direction is Direction.BACKWARD:
        return replace(spec, axis=Axis.TOKEN, dither=spec.dither or spec.entropy)
    if spec.is_constant_quality:
        return replace(spec, axis=Axis.CHANNEL)
    return replace(spec, axis=Axis.FRAME if spec.entropy else Axis.BOTH)


def _hundredths(text: str, name: CodecName, digits: str | None) -> int:
    family = _FAMILIES[name]
    if name in _PLAIN:
        if digits is not None:
            _refuse(text, f"{name.name.lower()} takes no number")
        return int(family.low * 100)
    if digits is None:
        _refuse(text, f"expected a number of {family.unit}, as in {name.name.lower()}4")
    return round(float(digits) * 100)


def _modified(text: str, spec: CodecSpec, modifier: str) -> CodecSpec:
    if modifier == "d" and not spec.dither:
        return replace(spec, dither=True)
    if modifier == "z" and not spec.entropy:
        return replace(spec, entropy=True)
    if modifier in _FEEDBACKS and spec.feedback is Feedback.NONE:
        return replace(spec, feedback=_FEEDBACKS[modifier])
    return _refuse(
        text,
        f"expected one of +d, +z, +ef, +ef21, +last or +book, once, got '+{modifier}'",
    )


def _check(spec: CodecSpec, text: str) -> None:
    family = _FAMILIES[spec.name]
    is_rate = spec.entropy and spec.name in (CodecName.Q, CodecName.AQ)
    low = MIN_RATE if is_rate else family.low
    if not low <= spec.number <= family.high:
        expected = f"{low:g} to {family.high:g}"
        _refuse(text, f"{spec.number:g} {family.unit} is outside {expected}")
    if family.whole and not spec.entropy and spec.hundredths % 100:
        _refuse(text, f"expected a whole number of {family.unit} without +z, got {spec.number:g}")
    if (spec.axis is not Axis.NONE) != (spec.name in _GRIDS):
        _refuse(text, "only q, aq, qc and aqc share steps by frame, channel or token")
    if spec.is_directional and spec.feedback is not Feedback.NONE:
        _refuse(text, "feedback is for gradients, and qk is for activations")
    if spec.dither and spec.name not in _GRIDS:
        _refuse(text, "+d needs a grid of steps, as q, aq, qc and aqc have")
    if spec.is_constant_quality and not spec.entropy:
        _refuse(text, "constant quality needs an entropy stage")
    _check_feedback(spec, text)


def _check_feedback(spec: CodecSpec, text: str) -> None:
    if spec.feedback is Feedback.NONE:
        return
    if spec.name is CodecName.NONE:
        _refuse(text, "'none' loses nothing, so there is no error to feed back")
    if spec.name in _DELTAS:
        _refuse(text, "aq sends the change against a buffer, which feeds its error back already")


def _check_direction(spec: CodecSpec, text: str, direction: Direction) -> None:
    if direction is Direction.BACKWARD and spec.is_directional:
        _refuse(text, "qk needs a basis of activations; for gradients use q1.5+z or qc0.5")
    if direction is Direction.BACKWARD and spec.name in _DELTAS:
        direct = _without_buffer(text)
        _refuse(
            text,
            "aq builds on a sample's last activation, so it works forward only; "
            f"for gradients use {direct}, or {direct}+ef21, which does the same for them",
        )
    if direction is Direction.FORWARD and spec.feedback is not Feedback.NONE:
        _refuse(
            text,
            "error feedback is for gradients, whose errors add up over steps; use it with --bw. "
            "An activation must not contain another visit's error; aq corrects its own",
        )


def _without_buffer(text: str) -> str:
    """Return `q4` for `aq4`, `top10` for `aqtop10`."""
    rest = text.removeprefix("aq")
    return rest if rest.startswith("top") else f"q{rest}"


def _refuse(text: str, reason: str) -> NoReturn:
    raise BadCodec(f"codec {text!a}: {reason}")
