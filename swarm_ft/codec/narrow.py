"""The codecs `qB` and `aqB`: B-bit codes of values, or of their change against a buffer.

Payload of one sample: the steps of the axis, then the codes, packed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import (
    as_tensor,
    check_encoded,
    check_finite,
    check_size,
    checked_base,
    checked_peak,
    checked_sample,
    to_host,
)
from swarm_ft.codec.kernels import Kernels, NarrowGrid, kernels_for, packed_bytes
from swarm_ft.codec.steps import STEP_BYTES, choose_steps, read_steps, step_patterns, steps_for
from swarm_ft.protocol.codec_spec import CodecSpec
from swarm_ft.protocol.frame import EncodedTensor


@dataclass(frozen=True, slots=True)
class NarrowCodec:
    """Q of AQ-SGD (arXiv 2206.01299), of x or, with a base, of x - base (its algorithm 1).

    Without the faults of its published code: steps belong to one sample, not to a microbatch, and
    have the range of float32 and no epsilon; the grid is symmetric and uses all 2^B codes; up to 6
    bits its step is the one with the least squared error, not the one that covers all.

    Attributes:
        kernels: the backend; by default the one for the tensor's device.
    """

    spec: CodecSpec
    kernels: Kernels | None = None

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """See `Codec.encode`; base may be on another device than x."""
        x = checked_sample(x)
        base = checked_base(self.spec, base, *x.shape)
        base = None if base is None else base.to(x.device)
        kernels = self.kernels or kernels_for(x.device.type)
        steps, peak = choose_steps(x, base, self.spec, kernels)
        patterns = step_patterns(steps, self.spec.axis)
        grid = self._grid(_bytes_of(*to_host(patterns))) if self.spec.dither else self._grid()
        packed = kernels.quantize_pack(x, base, steps, grid)
        # All that a GPU has to say comes at once, so that it is waited for once.
        header, body, largest = to_host(patterns, packed, peak)
        checked_peak(float(largest[0]))
        payload = _bytes_of(header) + body.tobytes()
        return EncodedTensor(self.spec, x.shape[0], x.shape[1], payload)

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; base + units * step, with the one rounding of the sum."""
        check_encoded(self, encoded)
        tokens, channels = encoded.tokens, encoded.channels
        check_size(encoded, self.max_payload_bytes(tokens, channels))
        base = checked_base(self.spec, base, tokens, channels)
        device = torch.device("cpu") if base is None else base.device
        kernels = self.kernels or kernels_for(device.type)
        steps = read_steps(encoded.payload, self.spec.axis, tokens, channels)
        header_bytes = self._header_bytes(tokens, channels)
        packed = as_tensor(encoded.payload[header_bytes:]).to(device)
        steps = steps.to(device)
        grid = self._grid(encoded.payload[:header_bytes])
        shape = tokens, channels
        return check_finite(kernels.unpack_dequantize(packed, shape, base, steps, grid))

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`; every payload has that size."""
        codes = packed_bytes(tokens * channels, self.spec.bits)
        return self._header_bytes(tokens, channels) + codes

    def _header_bytes(self, tokens: int, channels: int) -> int:
        return STEP_BYTES * sum(steps_for(self.spec.axis, tokens, channels))

    def _grid(self, header: bytes = b"") -> NarrowGrid:
        # Both ends have the steps, so a seed made of them needs no room on the wire.
        return NarrowGrid(self.spec.bits, zlib.crc32(header) if self.spec.dither else None)


def _bytes_of(patterns: NDArray[np.int16]) -> bytes:
    return patterns.astype("<i2", copy=False).tobytes()
