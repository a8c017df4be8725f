"""Machine code for all of a run's codecs, before the first frame needs it.

Compiling takes seconds, on a machine's first run and after an update; a frame that waits for it
holds up every stage behind this one.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from swarm_ft.codec import from_spec, pack_buffer, unpack_buffer
from swarm_ft.protocol.codec_spec import CodecSpec, Direction
from swarm_ft.protocol.run_spec import RunSpec


def compile_codecs(spec: RunSpec) -> None:
    """Encode and decode a sample by each codec of the run, as frames will be."""
    train = spec.train
    codecs = [train.fill_frame_codec, train.reduction_codec]
    for way in Direction:
        codecs += [train.codec(way), train.key_frame_codec(way)]
    for codec in codecs:
        _use_codec(codec, train.seq_length, spec.model.hidden_size)
    if any(codec.is_delta or codec.has_residual for codec in codecs):
        _use_buffer(train.buffer_bits, train.seq_length, spec.model.hidden_size)


@lru_cache(maxsize=64)
def _use_codec(spec: CodecSpec, tokens: int, channels: int) -> None:
    codec, x = from_spec(spec), _sample(tokens, channels)
    base = x / 2 if spec.is_delta else None
    codec.decode(codec.encode(x, base), base)


@lru_cache(maxsize=64)
def _use_buffer(bits: int, tokens: int, channels: int) -> None:
    unpack_buffer(pack_buffer(_sample(tokens, channels), bits), tokens, channels, bits)


def _sample(tokens: int, channels: int) -> torch.Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(0))
