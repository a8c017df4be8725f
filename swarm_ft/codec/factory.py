"""The codec of a spec, and the side information of any codec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swarm_ft.codec.base import Codec
from swarm_ft.codec.basis import Basis, max_basis_bytes
from swarm_ft.codec.codebook import CodebookCodec
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.feedback import SHARE_BITS, DeltaCodec, PredictiveCodec
from swarm_ft.codec.kernels.base import Kernels
from swarm_ft.codec.narrow import NarrowCodec
from swarm_ft.codec.raw import BFloat16Codec, Float32Codec, HalfCodec
from swarm_ft.codec.side_info import NAME_BYTES, PLAIN, SideInfo
from swarm_ft.codec.spec import CodecName, CodecSpec, Feedback
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.topk import TopKCodec
from swarm_ft.codec.wide import LosslessCodec, WideCodec

_GRIDS = (CodecName.Q, CodecName.AQ, CodecName.QC, CodecName.AQC)
_BYTE_CODECS: dict[CodecName, Callable[[CodecSpec], Codec]] = {
    CodecName.NONE: Float32Codec,
    CodecName.FP16: HalfCodec,
    CodecName.BF16: BFloat16Codec,
    CodecName.TOP: TopKCodec,
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
    plain = _BYTE_CODECS[spec.name](replace(spec, entropy=False))
    return LosslessCodec(spec, plain, kernels) if spec.entropy else plain


def side_info_needed(encoded: EncodedTensor) -> bytes:
    """Return the name of the side information that a tensor needs; empty for none."""
    name = encoded.payload[:NAME_BYTES] if encoded.codec.has_side_info else b""
    return b"" if name == PLAIN else name


def read_side_info(data: bytes, channels: int) -> SideInfo:
    """Decode side information of any codec from possibly hostile bytes.

    Raises:
        BadFrame: The bytes are no side information for this many channels.
    """
    return Basis.from_bytes(data, channels)


def max_side_info_bytes(channels: int) -> int:
    """Return an upper bound of the encoded size of side information for this many channels."""
    return max_basis_bytes(channels)
