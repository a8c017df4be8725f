"""The codecs that keep every value: float32 as it is, and halves under one exponent a sample.

Knows nothing of buffers, though a buffer's stored form is a half payload.
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
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor

_HEADER_BYTES = 2
_PEAK_BITS = 15
"""A sample's largest half lies in [2^14, 2^15): as high as halves go, and room to round up."""
_MAX_HALF = 32752.0
"""The largest half below 2^15."""
_MAX_BFLOAT16 = torch.finfo(torch.bfloat16).max
_MIN_NORMAL, _MAX_NORMAL = -126, 127
"""Exponents of powers of two that are normal float32."""
_MAX_EXPONENT = 128 - _PEAK_BITS
"""Of the largest float32; with it, even the largest half decodes to a finite value."""
_MIN_EXPONENT = -148 - _PEAK_BITS
"""Of the smallest float32, the denormal 2^-149."""


class Float32Codec(Codec):
    """`none`: little-endian float32, in C order; the payload holds x's own bits."""

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        return 4 * tokens * channels

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        checked_peak(peak_of(x))
        return self._unread(little_endian(x, "<f4"), x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        values = as_tensor(encoded.payload, device, "f4")
        return check_finite(values.view(encoded.tokens, encoded.channels))


class BFloat16Codec(Codec):
    """`bf16`: little-endian bfloat16, in C order; float32's range, 8 bits of mantissa.

    Rounds to nearest even, and never up to infinity.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        return 2 * tokens * channels

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        checked_peak(peak_of(x))
        return self._unread(bfloat16_bytes(x.clamp(-_MAX_BFLOAT16, _MAX_BFLOAT16)), x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        x = read_bfloat16(encoded.payload, device)
        return check_finite(x.view(encoded.tokens, encoded.channels))


class HalfCodec(Codec):
    """`fp16`: a power-of-two exponent (int16), then little-endian halves, in C order.

    Halves are x * 2^-exponent, rounded to nearest even, with the exponent that brings the
    sample's largest one into [2^14, 2^15); so no magnitude overflows or vanishes. Relative error
    is at most 2^-11, or 2^-39 of the sample's largest value where that is more. A function of x's
    values alone, and what it wrote reads back as values that it writes the same again. Refuses an
    exponent that is not the one of the halves.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        return _HEADER_BYTES + 2 * tokens * channels

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        exponent = min(_exponent(checked_peak(peak_of(x))), _MAX_EXPONENT)
        scaled = times_power(x, -exponent)
        if exponent == _MAX_EXPONENT:  # with any other the largest half fits by itself
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
    """The e for which `peak`, once rounded to a half's 11 bits, lies in [2^14, 2^15) * 2^e.

    Rounding first makes it the exponent of what is stored too: storing twice changes nothing.
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
    """`x` * 2^exponent, also where that power is no float32; into `out`, if given."""
    if _MIN_NORMAL <= exponent <= _MAX_NORMAL:
        return torch.mul(x, 2.0**exponent, out=out)
    # In two factors, as 2^163 is no float32. Between normal values both products are exact; what
    # underflows on its way to a half is far below the smallest half and would be 0 there anyway.
    first = exponent // 2
    return torch.mul(x, 2.0**first, out=out).mul_(2.0 ** (exponent - first))
