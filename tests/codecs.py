"""Codecs by their texts, and a sample of many that has every pair of their settings."""

from collections.abc import Mapping
from itertools import combinations
from typing import TypeAlias

import torch
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.codec.base import Codec
from swarm_ft.codec.spec import CodecName, CodecSpec, Direction, parse_codec_spec


def parse(text: str, direction: Direction = Direction.FORWARD) -> Codec:
    """The codec of a text such as `aq4`."""
    return from_spec(parse_codec_spec(text, direction))


def assert_sender_has_the_value(codec: Codec, x: Tensor, base: Tensor | None) -> None:
    """Check that the sender's value is the receiver's, to the bit, and the frame is `encode`'s."""
    encoded, value = codec.encode_and_decode(x, base)
    assert encoded == codec.encode(x, base)
    assert torch.equal(value.view(torch.int32), codec.decode(encoded, base).view(torch.int32))


Setting: TypeAlias = tuple[str, object]
ARITHMETIC = {
    **dict.fromkeys((CodecName.NONE, CodecName.FP16, CodecName.BF16), "float"),
    **dict.fromkeys((CodecName.Q, CodecName.AQ), "narrow"),
    **dict.fromkeys((CodecName.QC, CodecName.AQC), "wide"),
    **dict.fromkeys((CodecName.TOP, CodecName.AQTOP), "sparse"),
    **dict.fromkeys((CodecName.QK, CodecName.AQK), "learned"),
}
"""Families that share code; `is_delta` tells the two of a line apart."""


def settings_of(spec: CodecSpec) -> tuple[Setting, ...]:
    """Return what a codec combines."""
    return (
        ("arithmetic", ARITHMETIC.get(spec.name, spec.name)),
        ("is_delta", spec.is_delta),
        ("axis", spec.axis),
        ("dither", spec.dither),
        ("entropy", spec.entropy),
        ("feedback", spec.feedback),
    )


def pairwise(specs: Mapping[str, CodecSpec]) -> frozenset[str]:
    """Return names that have every family, and every pair of settings that any of them has.

    Greedy: the name with the most missing pairs comes next, and names that later ones made
    superfluous are dropped.
    """
    pairs = {
        name: {*combinations(settings_of(spec), 2), (("family", spec.name),)}
        for name, spec in specs.items()
    }
    missing = set().union(*pairs.values())
    sample: list[str] = []
    while missing:
        best = max(pairs, key=lambda name: len(pairs[name] & missing))
        sample.append(best)
        missing -= pairs[best]
    for name in tuple(sample):
        others = set().union(*(pairs[other] for other in sample if other != name))
        if pairs[name] <= others:
            sample.remove(name)
    return frozenset(sample)
