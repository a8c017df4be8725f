"""How many bits a value takes with a codec, told from its name alone. Pure.

An estimate, for choices between ways that cost differently; what frames really take is counted
(`traffic`). Steps, headers and tables are left out: they are some hundredths of a bit.
"""

from __future__ import annotations

import math

from swarm_ft.protocol.codec_spec import CodecName, CodecSpec, Direction
from swarm_ft.protocol.run_spec import TrainSpec

_HALF_BITS = 16
_FACTOR_BITS = 8
_BLOCK_CHANNELS = 32
"""That share a byte of a step in buffers of 8 and 4 bits; each channel has two bytes more."""


def bits_per_value(spec: CodecSpec, tokens: int, channels: int) -> float:
    """Bits that a value of a sample takes.

    - `none`, `fp16`, `bf16`: 32 and 16; an entropy stage is taken to save nothing.
    - `qB`, `aqB`, `hqB`: B; with `+z` that is a rate already.
    - `topK`, `aqtopK`: of every hundred values K take 16 bits and their place, which is
      2 + log2(100 / K) bits by Elias and Fano, or one for each value, whichever is less.
    - `qcS`: the entropy of a normal value on a grid of S times its spread, log2(sqrt(2 pi e) / S).
    - `aqcS`: the same, which is the most that a change takes that spreads less than the value.
    - `lowrankR`: R pairs of vectors in 8 bits.
    """
    match spec.name:
        case CodecName.TOP | CodecName.AQTOP:
            share = spec.number / 100
            return share * _HALF_BITS + min(1.0, share * (2 + math.log2(1 / share)))
        case CodecName.QC | CodecName.AQC:
            return max(0.0, math.log2(math.sqrt(2 * math.pi * math.e) / spec.number))
        case CodecName.LOWRANK:
            return spec.number * _FACTOR_BITS * (tokens + channels) / (tokens * channels)
        case _:
            return spec.number


def buffer_bytes(train: TrainSpec, channels: int) -> int:
    """What both directions' buffers of one sample take at one end of a boundary, as stored."""
    num_buffers = sum(train.codec(direction).is_delta for direction in Direction)
    tokens, bits = train.seq_length, train.buffer_bits
    step_bytes = (
        0 if bits == _HALF_BITS else 2 * channels + tokens * -(-channels // _BLOCK_CHANNELS)
    )
    return num_buffers * (tokens * channels * bits // 8 + step_bytes)


def key_frame_extra_bytes(train: TrainSpec, channels: int) -> int:
    """What it takes more that a sample begins its buffers at a boundary anew; about."""
    extra_bits = 0.0
    for direction in Direction:
        codecs = train.key_frame_codec(direction), train.codec(direction)
        if codecs[1].is_delta:
            key, delta = (bits_per_value(spec, train.seq_length, channels) for spec in codecs)
            extra_bits += key - delta
    return max(0, round(extra_bits * train.seq_length * channels / 8))
