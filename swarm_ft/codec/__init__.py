"""Codecs: tensors to bytes and back. Knows no order of frames, no storage of buffers, no clock.

    spec ──from_spec──► Codec ──encode──► EncodedTensor ──to_bytes──► frame

| module | codecs |
|---|---|
| `raw` | none, fp16, bf16 |
| `narrow` | qB, aqB: fixed-width codes of B bits |
| `wide` | qB+z, aqB+z, qcS, aqcS: entropy-coded quantisers, planned by `wide_plan`; +z of others |
| `directional` | qkS, aqkS: transform coders along a learned `basis` |
| `codebook` | +book: a direct codec for the residual of a vector quantiser |
| `topk` | topK |
| `feedback` | aqtopK, +ef21 and +last around a direct codec; +ef |
| `stored` | stored form of buffers |

`side_info` describes the numbers that `directional` and `codebook` learn and that decoders need.

`kernels` implements their arithmetic three times: in plain torch, Numba and Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm_ft.codec.base import Codec
    from swarm_ft.codec.factory import (
        from_spec,
        max_side_info_bytes,
        read_side_info,
        side_info_needed,
    )
    from swarm_ft.codec.feedback import encode_with_feedback
    from swarm_ft.codec.stored import buffer_bytes, pack_buffer, unpack_buffer

__all__ = [
    "Codec",
    "buffer_bytes",
    "encode_with_feedback",
    "from_spec",
    "max_side_info_bytes",
    "pack_buffer",
    "read_side_info",
    "side_info_needed",
    "unpack_buffer",
]

_MODULES = {
    "Codec": "base",
    "buffer_bytes": "stored",
    "encode_with_feedback": "feedback",
    "from_spec": "factory",
    "max_side_info_bytes": "factory",
    "pack_buffer": "stored",
    "read_side_info": "factory",
    "side_info_needed": "factory",
    "unpack_buffer": "stored",
}


def __getattr__(name: str) -> object:
    # The coordinator reads specs of codecs and has no torch, which the codecs themselves need.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
