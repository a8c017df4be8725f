"""What replicas sum, by name."""

import pytest

from swarm_ft.errors import BadCodec
from swarm_ft.protocol.spec.codec_spec import (
    DEFAULT_MOMENTUM_CODEC,
    ReductionSpec,
    parse_dp_spec,
    parse_reduction_spec,
)


@pytest.mark.parametrize("codec", ["none", "fp16", "q4", "q2.5+z"])
def test_a_codec_alone_is_of_gradients_and_behind_momentum_of_the_first_moment(codec):
    assert parse_reduction_spec(codec) == ReductionSpec(parse_dp_spec(codec))
    of_momentum = parse_reduction_spec(f"momentum:{codec}")
    assert of_momentum == ReductionSpec(parse_dp_spec(codec), of_momentum=True)


def test_momentum_has_a_codec_of_its_own():
    default = parse_dp_spec(DEFAULT_MOMENTUM_CODEC)
    assert parse_reduction_spec("momentum") == ReductionSpec(default, of_momentum=True)


# fmt: off
NOT_REDUCTIONS = [
    "", "momentum:", "momentum:momentum", "momentum:momentum:q4", "Momentum", "momentum+q4",
    "momentumq4", "momentum:aq4", "q4:momentum", " momentum", "momentum ", "momentum" * 9000,
]
# fmt: on


@pytest.mark.parametrize("text", NOT_REDUCTIONS)
def test_anything_else_is_refused_with_what_is_possible(text):
    with pytest.raises(BadCodec, match=r"q1 to q8.*as in momentum:q4") as error:
        parse_reduction_spec(text)
    assert len(error.value.message) < 250
