"""Codecs without quantisation: float32 unchanged, bfloat16, and float16 with one exponent a sample.

Buffers of 16 bits are stored as float16 payloads of this module.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    Payload,
    as_tensor,
    bfloat16_bytes,
    check_finite,
    checked_peak,
    little_endian,
    peak_of,
    read_bfloat16,
    to_host,
)
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

_HEADER_BYTES = 2
_PEAK_BITS = 15
"""Exponent of the largest half: it lies in [2^14, 2^15), which leaves room to round up."""
_MAX_HALF = 32752.0
"""Largest half below 2^15."""
_MAX_BFLOAT16 = torch.finfo(torch.bfloat16).max
_MIN_NORMAL, _MAX_NORMAL = -126, 127
"""Exponents of powers of two that are normal float32."""
_MAX_EXPONENT = 128 - _PEAK_BITS
"""Exponent of the largest float32; with it the largest half still decodes to a finite value."""
_MIN_EXPONENT = -148 - _PEAK_BITS
"""Exponent of the smallest float32, the denormal 2^-149."""


class Float32Codec(Codec):
    """The codec `none`: little-endian float32 in C order, with x's own bits."""

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the size of every payload of this shape."""
        return 4 * tokens * channels

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        checked_peak(peak_of(x))
        return self._unread(little_endian(x, "<f4"), x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        values = as_tensor(encoded.payload, device, "f4")
        return check_finite(values.view(encoded.tokens, encoded.channels))


class BFloat16Codec(Codec):
    """The codec `bf16`: little-endian bfloat16 in C order, with 8 bits of mantissa.

    Rounds to nearest, ties to even, and never up to infinity.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the size of every payload of this shape."""
        return 2 * tokens * channels

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        checked_peak(peak_of(x))
        return self._unread(bfloat16_bytes(x.clamp(-_MAX_BFLOAT16, _MAX_BFLOAT16)), x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        x = read_bfloat16(encoded.payload, device)
        return check_finite(x.view(encoded.tokens, encoded.channels))


class HalfCodec(Codec):
    """The codec `fp16`: a power-of-two exponent (int16), then little-endian halves in C order.

    Halves are x * 2^-exponent, rounded to nearest even. The exponent brings the sample's largest
    one into [2^14, 2^15), so no magnitude overflows or vanishes. The relative error is at most
    2^-11, or 2^-39 of the sample's largest value where that is more. The payload depends on x's
    values alone, and encoding the decoded values gives the same payload. An exponent that does not
    match the halves is refused.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the size of every payload of this shape."""
        return _HEADER_BYTES + 2 * tokens * channels

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        exponent = min(_exponent(checked_peak(peak_of(x))), _MAX_EXPONENT)
        scaled = times_power(x, -exponent)
        if exponent == _MAX_EXPONENT:  # with any other exponent the largest half fits
            scaled.clamp_(-_MAX_HALF, _MAX_HALF)
        header = exponent.to_bytes(_HEADER_BYTES, "little", signed=True)
        (halves,) = to_host(scaled.to(torch.float16))
        data = b"".join((header, np.ascontiguousarray(halves, "<f2").data))  # copied once
        return self._unread(data, x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        exponent = int.from_bytes(encoded.payload[:_HEADER_BYTES], "little", signed=True)
        halves = as_tensor(encoded.payload[_HEADER_BYTES:], device, "f2").float()
        _check_normalised(halves, exponent)
        return times_power(halves, exponent, out=halves).view(encoded.tokens, encoded.channels)


def _exponent(peak: float) -> int:
    """Return the e for which `peak`, rounded to 11 bits, lies in [2^14, 2^15) * 2^e.

    The rounding comes first, so that the decoded values have the same exponent.
    """
    mantissa, exponent = math.frexp(peak)  # peak = mantissa * 2^exponent, mantissa in [0.5, 1)
    rounds_up = mantissa >= 1 - 2.0**-12
    return exponent - _PEAK_BITS + rounds_up if peak else 0


def _check_normalised(halves: Tensor, exponent: int) -> None:
    peak = peak_of(halves)
    if peak == 0 and exponent == 0:
        return
    if not 2.0 ** (_PEAK_BITS - 1) <= peak <= _MAX_HALF:
        raise BadFrame(f"frame: expected a largest half of 16384 to 32752, got {peak}")
    if not _MIN_EXPONENT <= exponent <= _MAX_EXPONENT:
        raise BadFrame(
            f"frame: expected an exponent of {_MIN_EXPONENT} to {_MAX_EXPONENT}, got {exponent}"
        )


def times_power(x: Tensor, exponent: int, out: Tensor | None = None) -> Tensor:
    """Return `x` * 2^exponent, also if that power is not a float32; written to `out`, if given."""
    if _MIN_NORMAL <= exponent <= _MAX_NORMAL:
        return torch.mul(x, 2.0**exponent, out=out)
    # 2^163 is not a float32, so there are two factors. Between normal values both products are
    # exact. Values that underflow on the way to a half are far below the smallest half.
    first = exponent // 2
    return torch.mul(x, 2.0**first, out=out).mul_(2.0 ** (exponent - first))
