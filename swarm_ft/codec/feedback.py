"""What a codec lost goes into the next frame: residuals at the sender, or a base at both ends."""

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
    peak_there,
    to_host,
    unpacked_numbers,
)
from swarm_ft.codec.kernels.base import packed_bytes
from swarm_ft.codec.topk import kept_entries, largest
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import CodecName, CodecSpec, Feedback

_TINY_SQUARE = 1e-300

# ---- the change against a base, by any codec that builds on nothing: `aqtopK`, `q4t+ef21`
#
# Knows a base as a tensor; where it is kept, and whether the other end has it, is others' work.


@dataclass(frozen=True, slots=True)
class DeltaCodec(Codec):
    """m + C(a - m) for a value a, a base m and a codec C.

    AQ-SGD for activations (arXiv 2206.01299, algorithm 1); for gradients the same sum is EF21
    (arXiv 2106.05203). The error is C's relative to the change alone, so it shrinks from visit
    to visit as training settles.

    Attributes:
        inner: C. Its spec is its own: without the delta or the feedback that `spec` names.
    """

    inner: Codec

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`; the delta's."""
        return self.inner.max_payload_bytes(tokens, channels)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        inner = self.inner.write(x if base is None else x - base)
        return Payload(inner.data, lambda: _sum_of(base, inner.value()))

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        delta = self.inner.decode(replace(encoded, codec=self.inner.spec), device=device)
        return check_finite(_sum_of(base, delta))


def _sum_of(base: Tensor | None, delta: Tensor) -> Tensor:
    return delta if base is None else base + delta


# ---- what is used is not what is kept
#
# Dither in few bits is noise of the size of what it codes, and larger. What a stage computes on has
# to have all of that, or it would lack something in the mean; what the next gradient is told from
# had better be the nearest guess, in which what was coded counts as little as it is sure.


def best_guess(spec: CodecSpec, rest: bytes, told: Tensor, value: Tensor) -> Tensor:
    """What is to be kept of a value of which `told` was said, and the rest coded.

    Args:
        spec: of the codec of the rest, which builds on nothing.
        rest: its payload.
        told: float32 [tokens, channels].
        value: so too, and on the same device; the sum of both.

    Returns:
        Between the two, elementwise; two products and a sum, each rounded once.
    """
    if not (spec.dither and spec.entropy and spec.name is CodecName.Q):
        return value
    sure = _sure_parts(8 * len(rest) / value.numel()) / _PARTS
    return told * (1 - sure) + value * sure


_PARTS = 16


def _sure_parts(bits: float) -> int:
    """Of what was coded in so many bits a value, in sixteenths: the share nearest to what it is of.

    That is s / (s + e) for energy s and noise e. The curve is within 0.02 of what the study's
    gradients have at 0.4 to 1.5 bits.
    """
    return round(_PARTS * bits * bits / (bits * bits + 0.46))


# ---- what a share of the last gradient does not tell: `q1+z+last`
#
# A sample's gradient has much of its last one's direction, since most of it is what the sample's
# targets say; its size falls as they are learned, token by token. Of the last one the receiver has
# what was sent, without most of its noise, and the share that tells most is smaller for the rest.

SHARE_BITS = 3
_SHARES = 4
"""Of a base that make the whole; a share of up to seven of them is told in SHARE_BITS."""


@dataclass(frozen=True, slots=True)
class ShareCodec(Codec):
    """s m + C(g - s m) for a gradient g, a base m, a codec C, and a share s of every token.

    EF21 (arXiv 2106.05203) is this with shares of 1. Layout: the shares in quarters, packed in 3
    bits, and the payload of C.

    Attributes:
        inner: C. Its spec is its own: without the feedback that `spec` names.
    """

    inner: Codec

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        shares = packed_bytes(tokens, SHARE_BITS)
        return shares + self.inner.max_payload_bytes(tokens, channels)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        base = torch.zeros_like(x) if base is None else base
        shares = _nearest_shares(x, base)
        *peaks, numbers = to_host(peak_there(x), peak_there(base), shares)
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

    def kept(self, encoded: EncodedTensor, value: Tensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.kept`: what was told, and as much of the rest as is sure."""
        base = torch.zeros_like(value) if base is None else base.to(value.device)
        shares, rest = _read_shares(encoded)
        told = _share_of(base, shares.to(value.device))
        return best_guess(self.inner.spec, rest, told, value)


def _read_shares(encoded: EncodedTensor) -> tuple[Tensor, bytes]:
    """The shares, uint8 [tokens], and the payload behind them.

    Raises:
        BadFrame: it has an end before.
    """
    size = packed_bytes(encoded.tokens, SHARE_BITS)
    if len(encoded.payload) < size:
        raise BadFrame(f"frame: expected {size} bytes of shares, got {len(encoded.payload)}")
    shares = unpacked_numbers(encoded.payload[:size], encoded.tokens, SHARE_BITS)
    return torch.from_numpy(shares), encoded.payload[size:]


def _nearest_shares(x: Tensor, base: Tensor) -> Tensor:
    """Of each token how many quarters of the base leave least of x: uint8 [tokens], 0 to 7."""
    x, base = x.double(), base.double()
    best = (x * base).sum(1) / base.square().sum(1).clamp(min=_TINY_SQUARE)
    return (best * _SHARES).round().clamp(0, (1 << SHARE_BITS) - 1).to(torch.uint8)


def _share_of(base: Tensor, shares: Tensor) -> Tensor:
    """One rounding of each product, so that both ends have the same."""
    return base * (shares.float() / _SHARES)[:, None]


# ---- error feedback at the sender: what a codec lost of a gradient goes into the sample's next one
#
# Knows residuals as tensors, passed in and out; which sample's they are, and for how long they
# are kept, is the caller's to know. The receiver has no part in it and decodes as ever. `+ef21`
# is not here: it sends the change against a base, as `DeltaCodec` does.


def encode_with_feedback(
    codec: Codec, x: Tensor, residual: Tensor | None
) -> tuple[EncodedTensor, Tensor]:
    """Encode one sample with the error that its earlier messages made.

    With a message c that decodes to d, the new residual is x + residual - d, so what was sent and
    the last residual add up to all inputs, but for rounding. `+ef` sends c(x + residual);
    `+efmix` half of its entries for x and half for the residual (arXiv 2401.07788, section 2).
    The code published with that paper keeps one residual of a batch's shape, so a sample gets the
    error of whichever sample had its place in the batch before. Here a call is about one sample:
    keep residuals by sample, and drop them when the sample's messages are lost.

    Args:
        codec: builds on nothing; its spec says which feedback. `+efmix` needs `topK`, with or
            without a lossless stage around it.
        x: float32 [tokens, channels], the gradient, on any device.
        residual: float32 of x's shape, from this sample's last call; None for zeros.

    Returns:
        The message, and the new residual: float32 of x's shape, on x's device.

    Raises:
        BadFrame: x or residual is of another shape or type.
        NonFinite: x, the residual or their sum holds an infinity or NaN.
    """
    x = checked_sample(x)
    residual = _checked_residual(residual, x)
    total = x + residual
    checked_peak(peak_of(total))
    message = total
    if codec.spec.feedback is Feedback.EFMIX:
        message = _mixed(x, residual, total, kept_entries(codec.spec, x.numel()))
    encoded, value = codec.encode_and_decode(message)
    return encoded, total - value


def _mixed(x: Tensor, residual: Tensor, total: Tensor, count: int) -> Tensor:
    """What `topK` of `count` entries is to send: a tensor with no more than these.

    The larger half of `count` for the largest entries of x, the other half for the residual's;
    where both are at one place, their sum. Entries that are left (halves that share places, a
    residual of zeros) are the largest others of x + residual.
    """
    message = torch.zeros(x.numel(), device=x.device)
    _add_largest(message, x, count - count // 2)
    _add_largest(message, residual, count // 2)
    others = torch.where(message == 0, total.reshape(-1), 0)
    _add_largest(message, others, count - int(message.count_nonzero()))
    return message.view_as(total)


def _add_largest(message: Tensor, part: Tensor, count: int) -> None:
    if count:
        places = largest(part, count)
        message[places] += part.reshape(-1)[places]


def _checked_residual(residual: Tensor | None, x: Tensor) -> Tensor:
    if residual is None:
        return torch.zeros_like(x)
    residual = checked_sample(residual, "residual").to(x.device)
    if residual.shape != x.shape:
        raise BadFrame(f"residual: expected {list(x.shape)}, got {list(residual.shape)}")
    return residual
