"""Scales of narrow grids: which one each group of values gets, and its two bytes.

A scale is a bfloat16: 0 for a group of zeros, negative for a grid with zero on it, see
`NarrowGrid`. Knows no codes on the wire.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from swarm_ft.codec.kernels import Kernels, Scales
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.spec.codec_spec import Axis, CodecSpec

SCALE_BYTES = 2

_MAX_FLOAT = torch.finfo(torch.float32).max
MIN_SCALE = 2.0**-120
"""A thirty-second of it is still a normal float32, so units * scale is exact."""
_FIT_BITS = 6
"""With more bits, clipping gains nothing over covering the largest value."""
_MULTIPLES = (1.0, 0.87, 0.75, 0.65, 0.56, 0.48, 0.41, 0.35, 0.29, 0.23, 0.18)
"""Of the covering scale. At few bits a finer grid that clips beats one that covers all."""
_FINE_MULTIPLES = (0.14, 0.11, 0.08, 0.06, 0.04, 0.025)
"""Where the best scale follows the spread alone, however far values reach: at one and two bits,
and for a whole frame, whose largest value is far from most."""
_ZERO_MULTIPLES = (-1.25, -1.0, -0.75, -0.55, -0.4)
"""Grids with zero on them, for groups that are mostly zeros or have rare large values."""
_SPREAD_VALUES, _SPREAD_TOKENS = 256, 512
_FIT_VALUES = 128
"""Of each group: enough to tell good scales from bad ones, few enough to cost no time."""


def choose_scales(
    x: Tensor, base: Tensor | None, spec: CodecSpec, kernels: Kernels
) -> tuple[Scales, Tensor]:
    """Scales with little squared error for narrow grids over x, or x - base; and its peak.

    Args:
        x: float32 [tokens, channels].
        spec: of 1 to 8 bits, with its axis.

    Returns:
        The scales, and the largest magnitude, float32 [1]: not finite where x is not. It stays on
        x's device: whoever looks at it waits for all that the device has to do.
    """
    scales, row_peaks = _scales(x, base, spec, kernels)
    return scales, row_peaks.amax(0, keepdim=True)


def _scales(
    x: Tensor, base: Tensor | None, spec: CodecSpec, kernels: Kernels
) -> tuple[Scales, Tensor]:
    """The scales, and the tokens' peaks."""
    fit = functools.partial(_fit, spec=spec, kernels=kernels)
    if spec.axis is Axis.BOTH:
        inverse = _inverse_spreads(x, base, spec, kernels)
        rows, row_peaks, col_peaks = kernels.balance(x, base, inverse)
        sample = _some_tokens(x, base) / _some_tokens(rows[:, None], None)
        return Scales(rows, fit(sample, col_peaks, len(x))), row_peaks
    _, _, row_peaks, col_peaks = kernels.moments(x, base)
    one = torch.ones(1, device=x.device)
    if spec.axis is Axis.CHANNEL:
        scales = Scales(one, fit(_some_tokens(x, base), col_peaks, len(x)))
    elif spec.axis is Axis.FRAME:
        sample = _some_tokens(x, base).reshape(-1, 1)
        scales = Scales(one, fit(sample, row_peaks.amax(0, keepdim=True), x.numel()))
    else:
        sample = _some_columns(x, base).T.contiguous()
        scales = Scales(fit(sample, row_peaks, x.shape[1]), one)
    return scales, row_peaks


def _inverse_spreads(x: Tensor, base: Tensor | None, spec: CodecSpec, kernels: Kernels) -> Tensor:
    """One over each channel's spread once tokens are brought to one, float32 [channels].

    Otherwise one token that sticks out would be all that a channel's spread tells of. Channels
    and tokens are brought to one spread in turn, so that neither hides the other; over some of the
    tokens, which tell as much as all do. Where a grid may clip, only some channels count, others
    are 0: a token's rare large values are to be clipped, not to widen its scale.
    """
    may_clip = spec.bits <= _FIT_BITS
    across = max(1, x.shape[1] // _SPREAD_VALUES) if may_clip else 1
    down = max(1, len(x) // (_SPREAD_TOKENS if may_clip else _FIT_VALUES))
    part = slice(None, None, down), slice(None, None, across)
    some = x[part].contiguous() if base is None else x[part] - base[part]
    by_channel = _inverse_roots(kernels.moments(some, None)[1] / len(some))
    rows, _, _ = kernels.balance(some, None, by_channel)
    squares = kernels.moments(some / rows[:, None], None)[1] / len(some)
    inverse = torch.zeros_like(x[0])
    inverse[::across] = _inverse_roots(squares * across)
    return inverse


def _inverse_roots(squares: Tensor) -> Tensor:
    return torch.where(squares > 0, squares.rsqrt().clamp(max=_MAX_FLOAT), 0.0).float()


def scales_for(axis: Axis, tokens: int, channels: int) -> tuple[int, int]:
    """How many scales there are by token and by channel."""
    rows = tokens if axis in (Axis.TOKEN, Axis.BOTH) else 0
    cols = {Axis.CHANNEL: channels, Axis.BOTH: channels, Axis.FRAME: 1}.get(axis, 0)
    return rows, cols


def scale_patterns(scales: Scales, axis: Axis) -> Tensor:
    """The scales that the axis has as bfloat16 patterns, int16, by token and then by channel."""
    rows, cols = scales_for(axis, len(scales.rows), len(scales.cols))
    kept = torch.cat([scales.rows[:rows], scales.cols[:cols]])
    return kept.to(torch.bfloat16).view(torch.int16)


def read_scales(payload: bytes, axis: Axis, tokens: int, channels: int) -> Scales:
    """The scales that a payload begins with, on the CPU.

    Raises:
        BadFrame: a scale that is infinite, NaN, or neither zero nor of at least MIN_SCALE.
    """
    rows, cols = scales_for(axis, tokens, channels)
    patterns = np.frombuffer(payload, "<i2", count=rows + cols).astype(np.int16)
    scales = torch.from_numpy(patterns).view(torch.bfloat16).float()
    sizes = scales.abs()
    bad = scales[~((sizes <= _MAX_FLOAT) & ((sizes >= MIN_SCALE) | (sizes == 0)))]  # NaN is bad
    if len(bad):
        raise BadFrame(f"frame: expected scales of 0 or {MIN_SCALE:.4g} and more, got {bad[0]:.4g}")
    one = torch.ones(1)
    return Scales(scales[:rows] if rows else one, scales[rows:] if cols else one)


def nearest_scale(scales: Tensor) -> Tensor:
    """The nearest bfloat16 there is for each scale; 0 for what is too small to be one."""
    rounded = scales.clamp(-_MAX_FLOAT, _MAX_FLOAT).to(torch.bfloat16).float()
    rounded = torch.where(rounded.isinf(), scales.sign() * torch.finfo(torch.bfloat16).max, rounded)
    return torch.where(rounded.abs() < MIN_SCALE, 0.0, rounded)


def _fit(sample: Tensor, peaks: Tensor, count: int, *, spec: CodecSpec, kernels: Kernels) -> Tensor:
    """The scale of each group: of some multiples of the covering one, the one that errs least.

    Args:
        sample: float32 [values, groups], some of each group's values.
        peaks: float32 [groups], the largest magnitude of all of its values.
        count: of all values of a group.
    """
    reach = ((1 << spec.bits) - 1) / 2
    covering = (peaks / reach).clamp(min=MIN_SCALE)
    scales = covering
    if spec.dither:
        # Only values that are never clipped have an error that is not theirs.
        scales = peaks.clamp(min=MIN_SCALE) / max(reach - 0.5, 0.5)
    elif spec.bits <= _FIT_BITS:
        multiples = _multiples(spec).to(sample.device)
        errors = kernels.grid_errors(sample, None, covering, multiples, spec.bits)
        if len(sample) < count:
            errors += _clipped_peak(multiples, spec.bits, reach) * (len(sample) / count)
        scales = covering * multiples[errors.argmin(0)]
    return torch.where(peaks == 0, 0.0, _within_range(nearest_scale(scales), reach + 0.5))


def _multiples(spec: CodecSpec) -> Tensor:
    is_far_reaching = spec.bits <= 2 or spec.axis is Axis.FRAME
    multiples = _MULTIPLES + (_FINE_MULTIPLES if is_far_reaching else ())
    return torch.tensor(multiples + (_ZERO_MULTIPLES if spec.bits > 1 else ()))


def _clipped_peak(multiples: Tensor, bits: int, reach: float) -> Tensor:
    # The largest value is seldom in the sample, and clipping it is what a finer grid costs.
    ends = torch.where(multiples < 0, (1 << bits - 1) - 1, reach) * multiples.abs()
    return (reach - ends).clamp(min=0).square()[:, None]


def _within_range(scales: Tensor, reach: float) -> Tensor:
    limit = (torch.tensor(_MAX_FLOAT / (reach + 0.5)).view(torch.int32) & -(1 << 16)).view(
        torch.float32
    )
    return scales.clamp(-limit.item(), limit.item())


def _some_tokens(x: Tensor, base: Tensor | None) -> Tensor:
    every = max(1, len(x) // _FIT_VALUES)
    return x[::every] if base is None else x[::every] - base[::every]


def _some_columns(x: Tensor, base: Tensor | None) -> Tensor:
    every = max(1, x.shape[1] // _FIT_VALUES)
    return x[:, ::every] if base is None else x[:, ::every] - base[:, ::every]
