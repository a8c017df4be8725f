"""Entropy-coded scalar quantisers: `qB+z` and `aqB+z` at a rate, `qcS` and `aqcS` at a quality.

Payload of one sample: the header, the codes' lower bits (packed, one plane for all), the codes that
are too large for a symbol (int16, in order), and the symbols of all others.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import Codec, Payload, as_tensor, check_finite, to_device, to_host
from swarm_ft.codec.entropy import (
    WideHeader,
    lanes_for,
    max_header_bytes,
    max_stream_bytes,
    read_symbols,
    write_symbols,
)
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import (
    SLICES,
    SYMBOL_ZERO,
    Coding,
    Kernels,
    Scales,
    WideGrid,
    flip_of,
    packed_bytes,
)
from swarm_ft.codec.spec import Axis, CodecName, CodecSpec
from swarm_ft.codec.tensor import TENSOR_HEADER_BYTES, EncodedTensor
from swarm_ft.codec.wide_plan import (
    FIRST_SYMBOL,
    LAST_SYMBOL,
    MAX_OCTAVES,
    OCTAVE_BITS,
    Sample,
    TensorStatistics,
    codes_bytes,
    levels_for,
    reach_of,
    scale_for_rate,
    with_balanced_channels,
    with_contexts,
    with_low_bits,
    with_scale,
    with_slices,
)
from swarm_ft.errors import BadFrame

# ---- `+z` on codecs whose payload is bytes: lossless compression
#
# The position of a byte within its element is its context, which separates exponents, which repeat,
# from mantissas, which do not. Layout: a zero byte and the unchanged payload where compression does
# not help; else the number of contexts, the payload's size, and the stream.

_HEADER = struct.Struct("<BI")


@dataclass(frozen=True, slots=True)
class LosslessCodec(Codec):
    """Lossless compression of another codec's payload.

    Attributes:
        inner: Codec of the payload; its spec is that of this codec without the entropy stage.
        kernels: Backend of the arithmetic; None for that of the CPU, where payloads are.
    """

    inner: Codec
    kernels: Kernels | None = None

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of the payload's size."""
        return 1 + self.inner.max_payload_bytes(tokens, channels)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        inner = self.inner.write(x, base)
        return Payload(self._compressed(inner.data), inner.value)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        limit = self.inner.max_payload_bytes(encoded.tokens, encoded.channels)
        payload = self._decompressed(encoded.payload, limit)
        inner = replace(encoded, codec=self.inner.spec, payload=payload)
        return self.inner.decode(inner, base, device=device)

    def _compressed(self, payload: bytes) -> bytes:
        symbols = as_tensor(payload)
        stride = 4 if self.spec.name is CodecName.NONE else 2
        contexts = (torch.arange(len(symbols)) % stride).to(torch.uint8)
        kernels = self.kernels or kernels_for("cpu")
        counts = kernels.histogram(symbols, contexts, stride).numpy()
        stream = write_symbols(symbols, contexts, counts, kernels)
        if _HEADER.size + len(stream) >= len(payload):
            return b"\0" + payload
        return _HEADER.pack(stride, len(payload)) + stream

    def _decompressed(self, data: bytes, limit: int) -> bytes:
        if data[:1] == b"\0":
            return data[1:]
        if len(data) < _HEADER.size:
            raise BadFrame(f"frame: expected a header of {_HEADER.size} bytes, got {len(data)}")
        stride, size = _HEADER.unpack_from(data)
        if not 1 <= stride <= 4 or not 1 <= size <= limit:
            raise BadFrame(f"frame: expected 1 to {limit} bytes of payload, got {size}")
        contexts = (torch.arange(size) % stride).to(torch.uint8)
        kernels = self.kernels or kernels_for("cpu")
        symbols = read_symbols(data[_HEADER.size :], contexts, kernels)
        return np.ascontiguousarray(symbols.numpy()).tobytes()


_FRAME_BYTES = TENSOR_HEADER_BYTES + 80
"""Bytes of a frame around its payload; the rate counts all bytes on the wire."""
_SMALLEST_BYTES = 64
"""Bytes that small frames get on top of half of their budget; the codes would get none otherwise.
"""
_TRIES = 6
_SPARE_BITS, _SPARE_SHARE = 0.012, 0.007
"""Unused part of the budget that is accepted, in bits a value and as a share: another try costs
more than it gains."""


@dataclass(frozen=True, slots=True)
class WideCodec(Codec):
    """Uniform quantiser with as many levels as needed, followed by rANS.

    At a given rate such a quantiser is within a quarter of a bit of any other (Gish and Pierce
    1968). `qB` chooses the scale at which the frame takes B bits a value on the wire. `qcS` uses a
    scale of S times the spread of x's groups, so that the error stays constant and the rate falls
    as a sample settles.

    Attributes:
        kernels: Backend of the arithmetic; None for that of the tensor's device.
        token_bits: Bits a token that a wrapping codec sends beside the payload; the rate includes
            them.
    """

    kernels: Kernels | None = None
    token_bits: int = 0

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of the payload's size."""
        count = tokens * channels
        escapes, low_planes = 2 * count, packed_bytes(count, 8)
        head = max_header_bytes(tokens, channels)
        return head + low_planes + escapes + max_stream_bytes(count)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        kernels = self.kernels or kernels_for(x.device.type)
        beside = packed_bytes(len(x), self.token_bits) if self.token_bits else 0
        return _Encoder(self.spec, x, base, kernels, beside_bytes=beside).payload()

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        """Return base + units * scale, where only the sum is rounded."""
        shape = tokens, channels = encoded.tokens, encoded.channels
        kernels = self.kernels or kernels_for(device.type)
        header, at = WideHeader.from_bytes(encoded.payload, tokens, channels)
        grid = _grid(self.spec, header)
        codes, grid = _read_codes(encoded.payload[at:], header, grid, shape, device, kernels)
        scales = header.scales().to(device)
        return check_finite(kernels.dequantize(codes, base, scales, grid))


def write_at_scale(
    spec: CodecSpec, x: Tensor, base: Tensor | None, step: float, kernels: Kernels
) -> Payload:
    """Encode x, or x - base, with one quantisation step for all values."""
    return _Encoder(replace(spec, axis=Axis.FRAME), x, base, kernels, step=step).payload()


@dataclass(frozen=True, slots=True)
class _Frame:
    """A header with the codes that follow it.

    Attributes:
        header: Header of the frame.
        scales: Scales of the header, on x's device.
        codes: int16 [n], folded by the sign of the dither.
        symbols, contexts: uint8 [n].
        counts: Histogram of symbols by context, int64 [contexts, 256], on the host.
        grid: Grid of the codes, with the shifts of a trellis.
    """

    header: WideHeader
    scales: Scales
    codes: Tensor
    symbols: Tensor
    contexts: Tensor
    counts: NDArray[np.int64]
    grid: WideGrid

    @property
    def size_bytes(self) -> float:
        """Estimated size of the payload, to a few bytes."""
        return codes_bytes(self.counts, self.header.low_bits) + self.header.size_bytes


class _Encoder:
    """Encoder of one sample."""

    def __init__(
        self,
        spec: CodecSpec,
        x: Tensor,
        base: Tensor | None,
        kernels: Kernels,
        *,
        step: float | None = None,
        beside_bytes: int = 0,
    ) -> None:
        self._spec, self._kernels, self._step = spec, kernels, step
        self._x = x = x.contiguous()
        self._base = base = None if base is None else base.contiguous()
        self._seen = TensorStatistics.of(x, base, kernels, quality_of_x=spec.is_constant_quality)
        self._reach = self._seen.peak
        whole_bytes = x.numel() * spec.number / 8 - beside_bytes
        self._most_bytes = max(whole_bytes - _FRAME_BYTES, whole_bytes / 2 + _SMALLEST_BYTES)
        spare_bytes = max(x.numel() * _SPARE_BITS / 8, _SPARE_SHARE * self._most_bytes)
        self._least_bytes = self._most_bytes - spare_bytes

    @property
    def _aim_bytes(self) -> float:
        return (self._least_bytes + self._most_bytes) / 2

    def payload(self) -> Payload:
        """Return the payload of the sample."""
        header = WideHeader(0.0, 0, 0, 0) if self._seen.peak == 0 else self._plan()
        # The classes are final; only the scale changes from here on.
        classes = header.group_classes(len(self._x), self._x.shape[1], self._x.device)
        frame = self._quantized(header, classes)
        if self._seen.peak and not self._spec.is_constant_quality:
            frame = self._at_rate(frame, classes)
        return Payload(self._written(frame), lambda: self._value(frame))

    def _plan(self) -> WideHeader:
        """Return a header planned from a sample of the values."""
        spec, seen = self._spec, self._seen
        groups = seen.quality
        if spec.axis is Axis.BOTH:
            change_of = None if spec.is_constant_quality else self._base
            groups = with_balanced_channels(self._x, change_of, groups, self._kernels)
        header = levels_for(groups, spec.axis)
        self._reach = reach_of(header, seen)
        sample = Sample(seen, header)
        header = replace(header, slices=SLICES * spec.dither)
        factor = spec.number if spec.is_constant_quality else 4.1 * 2.0**-spec.number
        step = header.scale * factor if self._step is None else self._step
        header = with_scale(header, step, self._reach)
        header = self._at_rate_of(sample, with_contexts(header, seen.spreads, sample))
        if spec.dither:
            return self._at_rate_of(sample, with_slices(header, sample))
        return replace(header, shrink=sample.shrink(header))

    def _at_rate_of(self, sample: Sample, header: WideHeader) -> WideHeader:
        """Return the header with the scale of the rate and the best number of lower bits."""
        if self._spec.is_constant_quality:
            return with_low_bits(header, sample)
        header = scale_for_rate(header, sample, self._aim_bytes)
        return with_scale(header, header.scale, self._reach)

    def _quantized(self, header: WideHeader, classes: tuple[Tensor, Tensor]) -> _Frame:
        kernels, grid, scales = self._kernels, _grid(self._spec, header), header.scales()
        scales = Scales(*(to_device(part, self._x.device) for part in (scales.rows, scales.cols)))
        coding = Coding(*classes, header.slices, header.low_bits)
        values = self._x, self._base, scales
        if header.is_trellis and grid.seed is not None:
            lanes = lanes_for(self._x.numel())
            made = kernels.trellis_symbols(*values, grid.seed, coding, lanes)
            codes, symbols, contexts, shifts = made
            grid = replace(grid, shifts=shifts)
        else:
            codes, symbols, contexts = kernels.quantize_symbols(*values, grid, coding)
        (counts,) = to_host(kernels.histogram(symbols, contexts, header.num_contexts))
        return _Frame(header, scales, codes, symbols, contexts, counts, grid)

    def _at_rate(self, frame: _Frame, classes: tuple[Tensor, Tensor]) -> _Frame:
        """Return the largest frame within the budget, starting from the planned scale."""
        budget, slope = self._most_bytes, OCTAVE_BITS * self._x.numel() / 8
        best, smallest, size = frame, math.inf, frame.size_bytes
        for _ in range(_TRIES):
            if smallest > budget or budget >= size > smallest:
                best, smallest = frame, size
            if self._least_bytes <= size <= budget:
                break
            octaves = min(max((size - self._aim_bytes) / slope, -MAX_OCTAVES), MAX_OCTAVES)
            header = frame.header
            moved = with_scale(header, header.scale * 2.0**octaves, self._reach)
            if moved.scale == header.scale:
                break
            frame = self._quantized(moved, classes)
            size, before = frame.size_bytes, size
            octaves = math.log2(moved.scale / header.scale)
            slope = min(max((before - size) / octaves, slope / 4), slope * 2)
        return best

    def _value(self, frame: _Frame) -> Tensor:
        """Return the value that the receiver decodes."""
        codes = _folded(frame.codes.view(self._x.shape), frame.header, frame.grid, self._kernels)
        return self._kernels.dequantize(codes, self._base, frame.scales, frame.grid)

    def _written(self, frame: _Frame) -> bytes:
        header, codes, counts = frame.header, frame.codes, frame.counts
        escaped = b""
        if counts[:, FIRST_SYMBOL].any() or counts[:, LAST_SYMBOL].any():
            upper = codes >> header.low_bits
            (escapes,) = to_host(upper[upper.abs() >= SYMBOL_ZERO - FIRST_SYMBOL])
            header = replace(header, escapes=len(escapes))
            escaped = escapes.astype("<i2").tobytes()
        low = b""
        if header.low_bits:
            lower = (codes & ((1 << header.low_bits) - 1)).to(torch.uint8)
            (packed,) = to_host(self._kernels.pack(lower, header.low_bits))
            low = packed.tobytes()
        stream = write_symbols(frame.symbols, frame.contexts, counts, self._kernels)
        return header.to_bytes() + low + escaped + stream


def _read_codes(
    data: bytes,
    header: WideHeader,
    grid: WideGrid,
    shape: tuple[int, int],
    device: torch.device,
    kernels: Kernels,
) -> tuple[Tensor, WideGrid]:
    """Decode the codes after the header, int16 of this shape, and return them with their grid."""
    count = shape[0] * shape[1]
    low_bytes = packed_bytes(count, header.low_bits)
    stream_at = low_bytes + 2 * header.escapes
    if len(data) < stream_at:
        raise BadFrame(f"frame: expected {stream_at} bytes of codes, got {len(data)}")
    contexts = _contexts(header, grid, shape, device, kernels)
    flip = flip_of(header.slices) if header.is_trellis else 0
    symbols = read_symbols(data[stream_at:], contexts, kernels, flip)
    if header.is_trellis:
        grid = replace(grid, shifts=kernels.shifts_of(symbols, lanes_for(count)))
    escapes = np.frombuffer(data, "<i2", header.escapes, low_bytes).astype(np.int16)
    codes = read_escaped(symbols, torch.from_numpy(escapes))
    if header.low_bits:
        low = as_tensor(data[:low_bytes], device)
        lower = kernels.unpack(low, count, header.low_bits)
        codes = (codes << header.low_bits) | lower
    return _folded(codes.view(shape), header, grid, kernels), grid


def _contexts(
    header: WideHeader, grid: WideGrid, shape: Sequence[int], device: torch.device, kernels: Kernels
) -> Tensor:
    """Return the context of each value, uint8 [n]."""
    tokens, channels = shape
    classes = header.classes(tokens, channels, device)
    if not header.slices:
        return classes
    if grid.seed is None:
        raise BadFrame("frame: dither slices in a frame without dither")
    return kernels.slice_contexts(classes, grid.seed, header.slices)


def _folded(codes: Tensor, header: WideHeader, grid: WideGrid, kernels: Kernels) -> Tensor:
    """Fold codes by the sign of the dither, or unfold them."""
    if not header.slices or grid.seed is None:
        return codes
    return kernels.flip_signs(codes, grid.seed, grid.shifts)


def read_escaped(symbols: Tensor, escapes: Tensor) -> Tensor:
    """Return symbols as int16 codes, with `escapes` in place of escape symbols.

    Raises:
        BadFrame: The number of escapes differs, or one of them is too small.
    """
    codes = symbols.to(torch.int16) - SYMBOL_ZERO
    low, high = (int(end) for end in torch.stack(symbols.aminmax()).tolist())
    expected = 0
    if low <= FIRST_SYMBOL or high == LAST_SYMBOL:
        is_apart = codes.abs() >= SYMBOL_ZERO - FIRST_SYMBOL
        expected = int(is_apart.sum())
        if expected == len(escapes):
            codes[is_apart] = escapes.to(codes.device)
    sizes = escapes.int().abs()
    if expected != len(escapes) or bool((sizes < SYMBOL_ZERO - FIRST_SYMBOL).any()):
        raise BadFrame(f"frame: expected {expected} large codes apart from the symbols")
    return codes


def _grid(spec: CodecSpec, header: WideHeader) -> WideGrid:
    # Both ends have the header, so a seed derived from it costs no bytes. The fields that the
    # encoder learns only from the codes are excluded.
    if not spec.dither:
        return WideGrid(shrink=header.shrink)
    return WideGrid(seed=zlib.crc32(replace(header, escapes=0, low_bits=0).to_bytes()))
