"""Codec specs (`none`, `fp16`, `q4`, `aq4`): names and numbers; the arithmetic is in `codec`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from swarm_ft.errors import BadCodec

MIN_BITS, MAX_BITS = 2, 8


class CodecName(IntEnum):
    """Which arithmetic; the number is what a frame's header carries."""

    NONE = 1
    FP16 = 2
    Q = 3
    AQ = 4


class Direction(IntEnum):
    """Which way a frame goes; the numbers are those of the wire."""

    FORWARD = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """A codec's name and number of bits (32 for `none`, 16 for `fp16`)."""

    name: CodecName
    bits: int

    @property
    def is_delta(self) -> bool:
        """Whether frames build on per-sample buffers (AQ-SGD)."""
        return self.name is CodecName.AQ

    def __str__(self) -> str:
        plain = self.name in (CodecName.NONE, CodecName.FP16)
        return self.name.name.lower() + ("" if plain else str(self.bits))


_FIXED_BITS = {"none": 32, "fp16": 16}
_HELP = "expected none, fp16, qB or aqB with B from 2 to 8, for example aq4"


def parse_codec_spec(text: str, direction: Direction) -> CodecSpec:
    """`aq4` as CodecSpec(AQ, 4), checked for its direction.

    Raises:
        BadCodec: unknown name, bits out of 2..8, or `aq` for gradients.
    """
    match = re.fullmatch(r"(none|fp16|q|aq)([0-9]{0,3})", text)
    if match is None:
        raise BadCodec(f"codec '{text}': {_HELP}")
    name, digits = match[1], match[2]
    if (name in _FIXED_BITS) == bool(digits):
        raise BadCodec(f"codec '{text}': {_HELP}")
    bits = _FIXED_BITS.get(name) or int(digits)
    if name not in _FIXED_BITS and not MIN_BITS <= bits <= MAX_BITS:
        raise BadCodec(f"codec '{text}': {bits} bits is outside {MIN_BITS} to {MAX_BITS}")
    if name == "aq" and direction is Direction.BACKWARD:
        raise BadCodec(
            f"codec '{text}': aq keeps a buffer per sample and works forward only; "
            f"for gradients use q{bits}"
        )
    return CodecSpec(CodecName[name.upper()], bits)
