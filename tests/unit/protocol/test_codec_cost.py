"""What a key frame takes more than a delta, told from codecs' names."""

import math

import pytest
import torch

from swarm_ft import codec
from swarm_ft.protocol.codec_cost import bits_per_value, buffer_bytes, key_frame_extra_bytes
from swarm_ft.protocol.codec_spec import Direction, parse_codec_spec
from tests.specs import train_spec

SHAPE = (128, 768)


@pytest.mark.parametrize(
    "text",
    ["none", "fp16", "bf16", "q4", "q8t", "hq4", "q2.5+z", "top10", "top1", "top40", "qc0.5"],
)
def test_an_estimate_is_near_to_what_a_normal_sample_takes(text):
    spec = parse_codec_spec(text, Direction.FORWARD)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    taken_bits = 8 * len(codec.from_spec(spec).encode(x).payload) / x.numel()
    assert bits_per_value(spec, *SHAPE) == pytest.approx(taken_bits, rel=0.1, abs=0.05)


def test_low_rank_pays_for_its_factors():
    spec = parse_codec_spec("lowrank8", Direction.FORWARD)
    assert bits_per_value(spec, 128, 768) == 8 * 8 * (128 + 768) / (128 * 768)


def test_a_coarse_step_costs_no_less_than_nothing():
    assert bits_per_value(parse_codec_spec("aqc8", Direction.FORWARD), *SHAPE) == 0.0
    fine = bits_per_value(parse_codec_spec("aqc0.5", Direction.FORWARD), *SHAPE)
    assert fine == pytest.approx(math.log2(4.1327 / 0.5), abs=1e-3)


@pytest.mark.parametrize("channels", [8, 768, 1600])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_hand_off_takes_what_is_stored(bits, channels):
    train = train_spec(seq_length=128, forward_codec="aq4", buffer_bits=bits)
    stored = codec.buffer_bytes(128, channels, bits)
    assert buffer_bytes(train, channels) == pytest.approx(stored, abs=8)
    assert key_frame_extra_bytes(train, channels) == 128 * channels * 12 // 8


def test_both_directions_may_have_buffers():
    train = train_spec(seq_length=128, forward_codec="aq2", backward_codec="q4+ef21")
    assert buffer_bytes(train, 768) == 2 * 196_608
    assert key_frame_extra_bytes(train, 768) == 128 * 768 * 14 // 8
    gradients = train_spec(forward_codec="none", backward_codec="q4+ef21")
    assert key_frame_extra_bytes(gradients, 768) == 0


def test_a_key_frame_is_never_cheaper_than_nothing():
    assert key_frame_extra_bytes(train_spec(forward_codec="aq8", key_codec="q2"), 768) == 0
