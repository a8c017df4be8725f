"""Error feedback: residuals at the sender, or a base at both ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    Payload,
    check_finite,
    checked_peak,
    checked_sample,
    packed_numbers,
    peak_of,
    peak_tensor,
    to_host,
    unpacked_numbers,
)
from swarm_ft.codec.kernels.base import packed_bytes
from swarm_ft.codec.spec import CodecName, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

_TINY_SQUARE = 1e-300

# ---- the change against a base, coded by any direct codec: `aqtopK`, `q4t+ef21`
#
# The base is a tensor argument; the caller stores it and makes both ends agree.


@dataclass(frozen=True, slots=True)
class DeltaCodec(Codec):
    """Codec m + C(a - m) of a value a with a base m and an inner codec C.

    For activations this is AQ-SGD (arXiv 2206.01299, algorithm 1), for gradients EF21 (arXiv
    2106.05203). The error is relative to the change alone, so it shrinks from visit to visit as
    training settles.

    Attributes:
        inner: Codec C. Its spec is that of this codec without the delta or the feedback.
    """

    inner: Codec

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the bound of the inner codec, which codes the change."""
        return self.inner.max_payload_bytes(tokens, channels)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        inner = self.inner.write(x if base is None else x - base)
        return Payload(inner.data, lambda: _sum_of(base, inner.value()))

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        delta = self.inner.decode(replace(encoded, codec=self.inner.spec), device=device)
        return check_finite(_sum_of(base, delta))


def _sum_of(base: Tensor | None, delta: Tensor) -> Tensor:
    return delta if base is None else base + delta


# ---- the stored base differs from the decoded value
#
# Dither at low rates is noise as large as the signal. A stage has to compute on the decoded value,
# which is unbiased. The prediction of the next gradient is better from the estimate with the least
# squared error, which shrinks the coded part by its reliability.


def shrunk_estimate(spec: CodecSpec, rest: bytes, exact: Tensor, value: Tensor) -> Tensor:
    """Return the value to store when one part is exact and the residual was coded with noise.

    Args:
        spec: Spec of the residual's codec, a direct one.
        rest: Payload of the residual.
        exact: Exact part, float32 [tokens, channels].
        value: Sum of both parts, of the same shape and on the same device.

    Returns:
        A weighted mean of the two, elementwise; two products and a sum, each rounded once.
    """
    if not (spec.dither and spec.entropy and spec.name is CodecName.Q):
        return value
    weight = _reliability(8 * len(rest) / value.numel()) / _PARTS
    return exact * (1 - weight) + value * weight


_PARTS = 16


def _reliability(bits: float) -> int:
    """Return the reliability of a residual coded at this rate, in sixteenths.

    The reliability is s / (s + e) for signal energy s and noise energy e (Wiener). The curve is
    within 0.02 of measured gradients at 0.4 to 1.5 bits a value.
    """
    return round(_PARTS * bits * bits / (bits * bits + 0.46))


# ---- linear prediction from the last gradient: `q1+z+last`
#
# A sample's gradient has much of the direction of its last one, because it depends mostly on the
# sample's targets. Its size falls as they are learned, token by token. The receiver has a denoised
# version of the last gradient, and the remaining noise makes the best gain smaller.

SHARE_BITS = 3
_SHARES = 4
"""Parts of a base that make the whole; SHARE_BITS code a share of up to seven parts."""


@dataclass(frozen=True, slots=True)
class PredictiveCodec(Codec):
    """Predictive codec s m + C(g - s m) of a gradient g with a base m and a gain s for each token.

    EF21 (arXiv 2106.05203) is the case s = 1. Layout: the gains in quarters, packed in 3 bits each,
    and the payload of C.

    Attributes:
        inner: Codec C. Its spec is that of this codec without the feedback.
    """

    inner: Codec

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of the payload's size."""
        shares = packed_bytes(tokens, SHARE_BITS)
        return shares + self.inner.max_payload_bytes(tokens, channels)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        base = torch.zeros_like(x) if base is None else base
        shares = _nearest_shares(x, base)
        *peaks, numbers = to_host(peak_tensor(x), peak_tensor(base), shares)
        for peak in peaks:
            checked_peak(float(peak))
        packed = packed_numbers(numbers, SHARE_BITS)
        share = _share_of(base, shares)
        inner = self.inner.write(x - share)
        return Payload(packed + inner.data, lambda: share + inner.value())

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        shares, rest = _read_shares(encoded)
        rest_of = replace(encoded, codec=self.inner.spec, payload=rest)
        left = self.inner.decode(rest_of, device=device)
        return check_finite(left if base is None else _share_of(base, shares.to(device)) + left)

    def next_base(
        self, encoded: EncodedTensor, value: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return the prediction plus the residual shrunk by its reliability; see `Codec.kept`."""
        base = torch.zeros_like(value) if base is None else base.to(value.device)
        shares, rest = _read_shares(encoded)
        exact = _share_of(base, shares.to(value.device))
        return shrunk_estimate(self.inner.spec, rest, exact, value)


def _read_shares(encoded: EncodedTensor) -> tuple[Tensor, bytes]:
    """Decode the gains, uint8 [tokens], and return them with the remaining payload.

    Raises:
        BadFrame: The payload is too short.
    """
    size = packed_bytes(encoded.tokens, SHARE_BITS)
    if len(encoded.payload) < size:
        raise BadFrame(f"frame: expected {size} bytes of shares, got {len(encoded.payload)}")
    shares = unpacked_numbers(encoded.payload[:size], encoded.tokens, SHARE_BITS)
    return torch.from_numpy(shares), encoded.payload[size:]


def _nearest_shares(x: Tensor, base: Tensor) -> Tensor:
    """Return the least-squares gain of each token in quarters, uint8 [tokens], 0 to 7."""
    x, base = x.double(), base.double()
    best = (x * base).sum(1) / base.square().sum(1).clamp(min=_TINY_SQUARE)
    return (best * _SHARES).round().clamp(0, (1 << SHARE_BITS) - 1).to(torch.uint8)


def _share_of(base: Tensor, shares: Tensor) -> Tensor:
    """Return the base times the gains; each product is rounded once, so that both ends agree."""
    return base * (shares.float() / _SHARES)[:, None]


# ---- error feedback at the sender: the error of a gradient is added to the sample's next one
#
# Residuals are arguments and results; the caller stores them by sample. The receiver decodes as
# without feedback. `+ef21` sends the change against a base and is a `DeltaCodec` instead.


def encode_with_feedback(
    codec: Codec, x: Tensor, residual: Tensor | None
) -> tuple[EncodedTensor, Tensor]:
    """Encode one sample with the error of its earlier messages (error feedback).

    For a message c with the decoded value d, the new residual is x + residual - d. All messages and
    the last residual therefore sum to all inputs, except for rounding. The published code of arXiv
    2401.07788 keeps one residual of a batch's shape, so samples receive errors of other samples.
    Here each call concerns one sample: store residuals by sample, and drop them when messages of
    the sample are lost.

    Args:
        codec: Direct codec with a feedback in its spec.
        x: Gradient, float32 [tokens, channels], on any device.
        residual: Residual of the sample's last call, float32 of x's shape; None for zeros.

    Returns:
        The message, and the new residual: float32 of x's shape, on x's device.

    Raises:
        BadFrame: x or residual has a wrong shape or type.
        NonFinite: x, the residual or their sum has an infinity or NaN.
    """
    x = checked_sample(x)
    residual = _checked_residual(residual, x)
    total = x + residual
    checked_peak(peak_of(total))
    encoded, value = codec.encode_and_decode(total)
    return encoded, total - value


def _checked_residual(residual: Tensor | None, x: Tensor) -> Tensor:
    if residual is None:
        return torch.zeros_like(x)
    residual = checked_sample(residual, "residual").to(x.device)
    if residual.shape != x.shape:
        raise BadFrame(f"residual: expected {list(x.shape)}, got {list(residual.shape)}")
    return residual
