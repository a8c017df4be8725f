"""Codecs: tensors to bytes and back. Knows no order of frames, no storage of buffers, no clock.

    spec ──from_spec──► Codec ──encode──► EncodedTensor ──to_bytes──► frame

| module | codecs |
|---|---|
| `raw` | none, fp16, bf16 |
| `narrow` | qB, aqB: fixed-width codes of B bits; hqB |
| `wide` | qB+z, aqB+z, qcS, aqcS: entropy-coded quantisers, planned by `wide_plan`; +z of others |
| `directional` | qkS, aqkS: transform coders along a learned `basis` |
| `codebook` | +book: a direct codec for the residual of a vector quantiser |
| `topk`, `lowrank` | topK, lowrankR |
| `feedback` | aqtopK, +ef21 and +last around a direct codec; +ef, +efmix |
| `stored` | stored form of buffers |

`kernels` implements their arithmetic three times: in plain torch, Numba and Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swarm_ft.codec.base import Codec
from swarm_ft.codec.codebook import CodebookCodec
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.feedback import SHARE_BITS, DeltaCodec, PredictiveCodec, encode_with_feedback
from swarm_ft.codec.kernels.base import Kernels
from swarm_ft.codec.lowrank import LowRankCodec
from swarm_ft.codec.narrow import HadamardCodec, NarrowCodec
from swarm_ft.codec.raw import BFloat16Codec, Float32Codec, HalfCodec
from swarm_ft.codec.stored import buffer_bytes, pack_buffer, unpack_buffer
from swarm_ft.codec.topk import TopKCodec
from swarm_ft.codec.wide import LosslessCodec, WideCodec
from swarm_ft.protocol.spec.codec_spec import (
    Axis,
    CodecName,
    CodecSpec,
    Feedback,
)

__all__ = [
    "Codec",
    "buffer_bytes",
    "encode_with_feedback",
    "from_spec",
    "pack_buffer",
    "unpack_buffer",
]

_GRIDS = (CodecName.Q, CodecName.AQ, CodecName.QC, CodecName.AQC)
_BYTE_CODECS: dict[CodecName, Callable[[CodecSpec], Codec]] = {
    CodecName.NONE: Float32Codec,
    CodecName.FP16: HalfCodec,
    CodecName.BF16: BFloat16Codec,
    CodecName.TOP: TopKCodec,
    CodecName.LOWRANK: LowRankCodec,
}


def from_spec(spec: CodecSpec, kernels: Kernels | None = None) -> Codec:
    """Return the codec of a spec.

    Args:
        spec: Name and parameters of the codec.
        kernels: Backend of its arithmetic; None chooses the fastest for each tensor's device.
    """
    if spec.feedback is Feedback.LAST:
        plain = from_spec(replace(spec, feedback=Feedback.NONE), kernels)
        if isinstance(plain, WideCodec):
            plain = replace(plain, token_bits=SHARE_BITS)
        return PredictiveCodec(spec, plain)
    if spec.feedback is Feedback.BOOK:
        return CodebookCodec(spec, from_spec(replace(spec, feedback=Feedback.NONE), kernels))
    if spec.name in _GRIDS:
        return WideCodec(spec, kernels) if spec.entropy else NarrowCodec(spec, kernels)
    if spec.is_directional:
        return DirectionalCodec(spec, kernels)
    if spec.name is CodecName.AQTOP:
        return DeltaCodec(spec, from_spec(replace(spec, name=CodecName.TOP), kernels))
    if spec.feedback is Feedback.EF21:
        return DeltaCodec(spec, from_spec(replace(spec, feedback=Feedback.NONE), kernels))
    if spec.name is CodecName.HQ:
        return HadamardCodec(spec, from_spec(_of_tiles(spec), kernels), kernels)
    plain = _BYTE_CODECS[spec.name](replace(spec, entropy=False))
    return LosslessCodec(spec, plain, kernels) if spec.entropy else plain


def _of_tiles(spec: CodecSpec) -> CodecSpec:
    # A row of the inner codec is a tile. Fixed-width codes need a scale for each tile. With an
    # entropy stage one common scale has the smaller error, and contexts separate wide tiles from
    # narrow ones.
    axis = Axis.FRAME if spec.entropy else Axis.TOKEN
    return CodecSpec(CodecName.Q, spec.hundredths, axis, entropy=spec.entropy)
