"""Fixed-width scalar quantisers: `qB` and `aqB` with codes of B bits."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    Payload,
    as_tensor,
    check_finite,
    checked_peak,
    read_bfloat16,
    to_device,
    to_host,
)
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import MIN_SCALE, Kernels, NarrowGrid, Scales, packed_bytes
from swarm_ft.codec.spec import Axis, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

Floats = NDArray[np.float32]

# ---- the codecs `qB` and `aqB`: B-bit codes of values, or of their change against a buffer
#
# The payload of one sample has the scales of the axis, then the packed codes.


@dataclass(frozen=True, slots=True)
class NarrowCodec(Codec):
    """Quantiser Q of AQ-SGD (arXiv 2206.01299), of x or, with a base, of x - base (algorithm 1).

    It differs from the published code: scales belong to one sample, not to a microbatch, have the
    range of float32 and no epsilon; the grid is symmetric and uses all 2^B codes; up to 6 bits the
    scale minimises the squared error instead of covering all values.

    Attributes:
        kernels: Backend of the arithmetic; None for that of the tensor's device.
    """

    kernels: Kernels | None = None
    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the size of every payload of this shape."""
        codes = packed_bytes(tokens * channels, self.spec.bits)
        return self._header_bytes(tokens, channels) + codes

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        kernels = self.kernels or kernels_for(x.device.type)
        scales = _choose_scales(x, base, self.spec, kernels)
        header = _written_scales(scales, self.spec.axis)
        on_device = Scales(to_device(scales.rows, x.device), to_device(scales.cols, x.device))
        grid = self._grid(header)
        packed = kernels.quantize_pack(x, base, on_device, grid)
        shape = len(x), x.shape[1]
        return Payload(
            b"".join((header, to_host(packed)[0].data)),
            lambda: kernels.unpack_dequantize(packed, shape, base, on_device, grid),
        )

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        """Return base + units * scale, where only the sum is rounded."""
        shape = encoded.tokens, encoded.channels
        kernels = self.kernels or kernels_for(device.type)
        header_bytes = self._header_bytes(*shape)
        header = encoded.payload[:header_bytes]
        scales = read_scales(header, self.spec.axis, *shape).to(device)
        packed = as_tensor(encoded.payload[header_bytes:], device)
        grid = self._grid(header)
        return check_finite(kernels.unpack_dequantize(packed, shape, base, scales, grid))

    def _header_bytes(self, tokens: int, channels: int) -> int:
        return _SCALE_BYTES * sum(_scales_for(self.spec.axis, tokens, channels))

    def _grid(self, header: bytes = b"") -> NarrowGrid:
        # Both ends have the scales, so a seed derived from them costs no bytes.
        return NarrowGrid(self.spec.bits, zlib.crc32(header) if self.spec.dither else None)


# ---- choice of each group's scale, and its two bytes
#
# A scale is a bfloat16: 0 for a group of zeros, negative for a grid with zero on it, see
# `NarrowGrid`.

_SCALE_BYTES = 2
_MAX_FLOAT = torch.finfo(torch.float32).max
_FIT_BITS = 6
"""Largest number of bits at which clipping has a smaller error than covering the largest value."""
_MULTIPLES = (1.0, 0.87, 0.75, 0.65, 0.56, 0.48, 0.41, 0.35, 0.29, 0.23, 0.18)
"""Candidate scales relative to the covering one. At few bits a finer grid that clips is better."""
_FINE_MULTIPLES = (0.14, 0.11, 0.08, 0.06, 0.04, 0.025)
"""Further candidates where the best scale depends on the spread alone: at one and two bits, and for
a whole frame, whose largest value is far from most."""
_ZERO_MULTIPLES = (-1.25, -1.0, -0.75, -0.55, -0.4)
"""Candidates with zero on the grid, for groups that are mostly zeros or have rare large values."""
_MULTIPLES_OF_MORE = {
    4: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, -1.25, -1.0, -0.8),
    5: (1.0, 0.93, 0.86, 0.78, 0.7, 0.6, 0.45, -1.25, -1.0, -0.85),
    6: (1.0, 0.97, 0.93, 0.85, 0.7, -1.05, -1.0, -0.97),
}
"""Candidates by number of bits; with more bits the best scale is nearer to the covering one, and
candidates are denser."""
_SPREAD_VALUES, _SPREAD_TOKENS = 256, 512
_LINE = 32
"""Channels that are read together: memory delivers no fewer, and loops over few values are slow."""
_FIT_VALUES = 128
"""Sampled values of each group: enough to rank scales, and cheap."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Statistics of groups of values on their device, for the choice of scales.

    Attributes:
        sample: Sampled values of each group, float32 [values, groups].
        peaks: Largest magnitude of all values of a group, float32 [groups].
        count: Number of all values of a group.
        rows: Divisors of tokens, float32 [tokens]; None for none.
        row_peaks: Largest magnitude of each token, float32 [tokens].
    """

    sample: Tensor
    peaks: Tensor
    count: int
    rows: Tensor | None
    row_peaks: Tensor


def _choose_scales(x: Tensor, base: Tensor | None, spec: CodecSpec, kernels: Kernels) -> Scales:
    """Return scales with little squared error for x, or x - base; on the CPU.

    The device reduces the values, and the host chooses from the results. A GPU is synchronised
    once, or twice if tokens have divisors of their own.

    Args:
        x: float32 [tokens, channels].
        base: Buffer of the same shape; None for a direct codec.
        spec: Spec with 1 to 8 bits and an axis.
        kernels: Backend of the arithmetic.

    Raises:
        NonFinite: x, or x - base, has an infinity or NaN.
    """
    groups = _groups(x, base, spec, kernels)
    looks = [groups.row_peaks, groups.peaks]
    if groups.rows is not None:
        looks.append(groups.rows)
    is_fitted = spec.bits <= _FIT_BITS and not spec.dither
    if is_fitted:
        multiples = to_device(_multiples(spec.bits, spec.axis), x.device)
        by = _covering(groups.peaks, spec), multiples, spec.bits
        looks.append(kernels.grid_errors(groups.sample, None, *by))
    row_peaks, peaks, *rest = to_host(*looks)
    checked_peak(float(row_peaks.max()))
    errors, share = rest.pop() if is_fitted else None, len(groups.sample) / groups.count
    fitted = torch.from_numpy(_fitted(peaks, spec, errors, share))
    if spec.axis is Axis.TOKEN:
        return Scales(fitted, torch.ones(1))
    return Scales(torch.from_numpy(rest[0]) if rest else torch.ones(1), fitted)


def _groups(x: Tensor, base: Tensor | None, spec: CodecSpec, kernels: Kernels) -> _Groups:
    if spec.axis is Axis.BOTH:
        inverse = to_device(_inverse_spreads(x, base, spec), x.device)
        every = _every(len(x))
        rows, row_peaks, col_peaks, sample = kernels.balanced_sample(x, base, inverse, every)
        return _Groups(sample, col_peaks, len(x), rows, row_peaks)
    _, _, row_peaks, col_peaks = kernels.moments(x, base)
    if spec.axis is Axis.CHANNEL:
        return _Groups(_some_tokens(x, base), col_peaks, len(x), None, row_peaks)
    if spec.axis is Axis.FRAME:
        sample, peak = _some_tokens(x, base).reshape(-1, 1), row_peaks.amax(0, keepdim=True)
        return _Groups(sample, peak, x.numel(), None, row_peaks)
    sample = _some_columns(x, base).T.contiguous()
    return _Groups(sample, row_peaks, x.shape[1], None, row_peaks)


def _inverse_spreads(x: Tensor, base: Tensor | None, spec: CodecSpec) -> Tensor:
    """Return the inverse spread of each channel with balanced tokens, float32 [channels], CPU.

    One outlying token would otherwise determine a channel's spread. Channels and tokens are
    normalised in turn, over a sample of the tokens. If a grid may clip, only some channels count
    and the others get 0: rare large values of a token should be clipped instead of widening its
    scale.
    """
    from swarm_ft.codec.kernels import cpu_plan  # compilers take seconds

    may_clip = spec.bits <= _FIT_BITS
    across = max(1, x.shape[1] // _SPREAD_VALUES) if may_clip else 1
    down = max(1, len(x) // (_SPREAD_TOKENS if may_clip else _FIT_VALUES))
    some = _some_lines(x[::down], across)
    if base is not None:
        some = some - _some_lines(base[::down], across)
    (values,) = to_host(some.flatten(1).contiguous())
    of_some = torch.empty(values.shape[1])
    cpu_plan.inverse_spreads(values, of_some.numpy())
    inverse = torch.zeros(x.shape[1])
    lines = _some_lines(inverse, across)
    lines.copy_(of_some.view_as(lines))
    return inverse


def _some_lines(x: Tensor, across: int) -> Tensor:
    """Return one in `across` lines of the last dimension as a view [..., lines, values a line]."""
    line = _LINE if across > 1 else x.shape[-1]
    return x.unfold(-1, line, line * across)


def _scales_for(axis: Axis, tokens: int, channels: int) -> tuple[int, int]:
    """Return the number of scales by token and by channel."""
    rows = tokens if axis in (Axis.TOKEN, Axis.BOTH) else 0
    cols = {Axis.CHANNEL: channels, Axis.BOTH: channels, Axis.FRAME: 1}.get(axis, 0)
    return rows, cols


def _written_scales(scales: Scales, axis: Axis) -> bytes:
    """Encode the scales of the axis, by token and then by channel, each exactly a bfloat16."""
    rows, cols = _scales_for(axis, len(scales.rows), len(scales.cols))
    written = np.concatenate((scales.rows.numpy()[:rows], scales.cols.numpy()[:cols]))
    return (written.view(np.uint32) >> 16).astype("<u2").tobytes()


def read_scales(payload: bytes, axis: Axis, tokens: int, channels: int) -> Scales:
    """Decode the scales at the start of a payload, on the CPU.

    Raises:
        BadFrame: A scale is infinite, NaN, or neither zero nor at least MIN_SCALE.
    """
    rows, cols = _scales_for(axis, tokens, channels)
    scales = read_bfloat16(payload[: _SCALE_BYTES * (rows + cols)])
    sizes = scales.abs()
    bad = scales[~((sizes <= _MAX_FLOAT) & ((sizes >= MIN_SCALE) | (sizes == 0)))]  # NaN is bad
    if len(bad):
        raise BadFrame(f"frame: expected scales of 0 or {MIN_SCALE:.4g} and more, got {bad[0]:.4g}")
    one = torch.ones(1)
    return Scales(scales[:rows] if rows else one, scales[rows:] if cols else one)


def _reach(spec: CodecSpec) -> float:
    """Return the distance from zero to the last code, in scales."""
    return ((1 << spec.bits) - 1) / 2


def _covering(peaks: Tensor, spec: CodecSpec) -> Tensor:
    """Return the scales that cover all values."""
    return (peaks / _reach(spec)).clamp(min=MIN_SCALE)


def _fitted(peaks: Floats, spec: CodecSpec, errors: Floats | None, share: float) -> Floats:
    """Return the scale of each group: the multiple of the covering one with the least error.

    Args:
        peaks: Largest magnitude of each group.
        spec: Spec with bits and axis.
        errors: Squared errors of the sample, [multiples, groups]; None to cover all values.
        share: Share of the values that are in the sample.
    """
    from swarm_ft.codec.kernels import cpu_plan  # compilers take seconds

    reach = _reach(spec)
    # With dither the error is independent of the value only if no value is clipped.
    covered = max(reach - 0.5, 0.5) if spec.dither else reach
    scales: Floats = np.maximum(peaks / np.float32(covered), np.float32(MIN_SCALE))
    if errors is not None:
        penalties = _clipped_peaks(spec.bits, spec.axis) * np.float32(share if share < 1 else 0)
        cpu_plan.fit(scales, errors, penalties, _multiples(spec.bits, spec.axis).numpy())
    cpu_plan.to_bfloat16(scales, _largest_scale(reach + 1))
    scales[peaks == 0] = 0
    return scales


@functools.cache
def _multiples(bits: int, axis: Axis | None) -> Tensor:
    """Return the candidate scales relative to the covering one."""
    if axis is not Axis.FRAME and bits in _MULTIPLES_OF_MORE:
        return torch.tensor(_MULTIPLES_OF_MORE[bits])
    is_far_reaching = bits <= 2 or axis is Axis.FRAME
    multiples = _MULTIPLES + (_FINE_MULTIPLES if is_far_reaching else ())
    return torch.tensor(multiples + (_ZERO_MULTIPLES if bits > 1 else ()))


@functools.cache
def _clipped_peaks(bits: int, axis: Axis | None) -> Floats:
    """Return the squared clipping error of a group's largest value, in squared covering scales.

    The sample seldom has that value, so its error is added as a penalty.
    """
    multiples, reach = _multiples(bits, axis).numpy(), ((1 << bits) - 1) / 2
    ends = np.where(multiples < 0, reach - 0.5, reach) * np.abs(multiples)
    errors: Floats = np.square(np.maximum(reach - ends, 0)).astype(np.float32)
    return errors


def _largest_scale(reach: float) -> np.float32:
    """Return the largest bfloat16 whose product with `reach` is finite."""
    return np.float32((np.float32(_MAX_FLOAT / reach).view(np.int32) & -(1 << 16)).view(np.float32))


def _some_tokens(x: Tensor, base: Tensor | None) -> Tensor:
    every = _every(len(x))
    return x[::every] if base is None else x[::every] - base[::every]


def _some_columns(x: Tensor, base: Tensor | None) -> Tensor:
    every = _every(x.shape[1])
    return x[:, ::every] if base is None else x[:, ::every] - base[:, ::every]


def _every(count: int) -> int:
    """Return the sampling stride within a group."""
    return max(1, count // _FIT_VALUES)
