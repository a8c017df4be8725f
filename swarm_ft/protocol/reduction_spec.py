"""What replicas of a stage sum before each optimizer step, `--dp`: names and rules, no arithmetic.

spec = codec | "momentum" [":" codec]          as in q4, momentum, momentum:q4+z
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.protocol.codec_spec import CodecSpec, parse_dp_spec

MOMENTUM = "momentum"
DEFAULT_MOMENTUM_CODEC = "q8"
"""As in the published code; why not fewer bits: docs/codecs.md."""


@dataclass(frozen=True, slots=True)
class ReductionSpec:
    """What is summed and how it travels.

    Attributes:
        codec: of each member's share, and of the sum.
        of_momentum: shares are of the first moment that the step leads to, not of its gradient.
    """

    codec: CodecSpec
    of_momentum: bool = False


def parse_reduction_spec(text: str) -> ReductionSpec:
    """`momentum:q4` as a ReductionSpec.

    Raises:
        BadCodec: neither `momentum` nor a codec of `parse_dp_spec`, alone or behind `momentum:`.
    """
    if text == MOMENTUM:
        return ReductionSpec(parse_dp_spec(DEFAULT_MOMENTUM_CODEC), of_momentum=True)
    codec = text.removeprefix(f"{MOMENTUM}:")
    return ReductionSpec(parse_dp_spec(codec), of_momentum=codec != text)
