"""A basis for what crosses a boundary: the directions over channels in which it varies.

Changes of activations between two visits lie in few directions (their Karhunen-Loeve basis, the
eigenvectors of their covariance), and half of their energy is a linear map of the activation that
was there: they come of few changes of the weights. Coded along these directions, beside what the
map foretells, most values are zero. The sender learns both from what it sent in one step and says
them to the receiver before the first frame that needs them; `directional` codes with them.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from swarm_ft.codec.base import (
    as_tensor,
    bfloat16_bytes,
    bfloat16_pattern,
    nearest_bfloat16,
    of_bfloat16,
    read_bfloat16,
)
from swarm_ft.codec.entropy import CLASSES, max_stream_bytes, read_symbols, write_symbols
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.spec.digest import fingerprint_of

MAX_DIRECTIONS = 1024
NAME_BYTES = 4
PLAIN = bytes(NAME_BYTES)
"""In place of a name: coded along the channels themselves."""
_HEADER = struct.Struct("<HIB")
_CODEBOOK = struct.Struct("<BH")
_SYMBOL_ZERO = 128
_LARGEST = 127
_COARSE, _WIDE_STEPS = 31, 40.0
"""Six bits do where no direction varies by more steps: what they tilt is lost in the coding."""
_LEAST_EXPONENT, _MOST_EXPONENT = 4, 13
"""A unit vector's largest coefficient is between 1 / sqrt(channels) and 1."""
_FLOOR, _FLOOR_OF_FIRST = 0.3, 0.15
"""Of a step: what varies less along a direction is nearly always a code of zero; a uniform
quantiser's error is 1 / sqrt(12) = 0.29 steps (reverse water-filling, Cover and Thomas 10.3.3).
First activations move away from a basis sooner, and nothing mends what it lacks."""
_WHOLE_CHANNELS = 512
"""Up to here all eigenvectors are found, beyond it the leading ones, by subspace iteration."""
_FIRST_RANK, _SPARE, _ITERATIONS = 128, 16, 2
_AN_OCTAVE = 2.0
_RIDGE = 1e-6
"""Beside the squares of directions, which are about 1."""
_MOST_FORECAST_EXPONENT = 30
_RIDGES = (0.01, 0.1, 1.0)
"""Of the mean square of a channel of the base."""
_WORTH = 0.9
"""A forecast that leaves more than this of a change's energy is not worth its bytes."""
_TINY = 1e-30
_HALVES = 2
_HAS_MEAN, _HAS_FORECAST, _HAS_CODEBOOK = 1, 2, 4
MOST_ENTRY_BITS = 10
_LEAST_CODE, _LARGEST_CODE = 2.0**-24, 1.0
"""Of a codebook's entries, which are of unit length."""


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """What a change will be along the directions, as a linear map of the base.

    Attributes:
        coefficients: int8 [channels, directions].
        exponents: uint8 [directions]: column r of the map is of coefficients times 2^-exponents[r].
    """

    coefficients: Tensor
    exponents: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """Likely directions of tokens' gradients, along those of a basis.

    Attributes:
        codes: int8 [entries, directions]; as many entries as `bits` can tell.
        scale: of a code of one; exactly a bfloat16.
    """

    codes: Tensor
    scale: float

    @property
    def bits(self) -> int:
        """Of an entry's number."""
        return len(self.codes).bit_length() - 1

    def to_bytes(self) -> bytes:
        """All but the codes."""
        return _CODEBOOK.pack(self.bits, bfloat16_pattern(self.scale))

    @staticmethod
    def shape_in(data: bytes) -> tuple[int, float]:
        """How many entries there are and their scale, of what `to_bytes` wrote.

        Raises:
            BadFrame: a codebook has not so many, or none of such a scale.
        """
        bits, pattern = _CODEBOOK.unpack(data)
        scale = of_bfloat16(pattern)
        if not 1 <= bits <= MOST_ENTRY_BITS or not _LEAST_CODE <= scale <= _LARGEST_CODE:
            raise BadFrame(f"basis: a codebook of 2^{bits} entries, in steps of {scale:.4g}")
        return 1 << bits, scale


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions over channels, in order of falling variance; nearly orthonormal.

    Attributes:
        coefficients: int8 [directions, channels].
        exponents: uint8 [directions]: direction r is coefficients[r] * 2^-exponents[r].
        classes: uint8 [directions], 0 to 7: how widely values along it spread.
        mean: float32 [channels], exactly bfloat16s: what is subtracted first; None for nothing.
        forecast: of changes; None for none.
        codebook: of gradients; None for none.
    """

    coefficients: Tensor
    exponents: Tensor
    classes: Tensor
    mean: Tensor | None = None
    forecast: Forecast | None = None
    codebook: Codebook | None = None
    _there: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    """What frames need of it, on the devices where they were coded."""

    @property
    def directions(self) -> int:
        """How many."""
        return len(self.coefficients)

    @property
    def channels(self) -> int:
        """How many."""
        return self.coefficients.shape[1]

    @functools.cached_property
    def name(self) -> bytes:
        """What frames call it: a fingerprint of all its numbers."""
        mean = b"" if self.mean is None else bfloat16_bytes(self.mean)
        rest = b"".join(part.numpy().tobytes() for part in self.numbers())
        name = fingerprint_of(_HEADER.pack(*self._counts()), mean, rest)[:NAME_BYTES]
        return name if name != PLAIN else bytes([1] * NAME_BYTES)

    def synthesis(self, device: torch.device) -> Tensor:
        """The directions as exact float32 [directions, channels]: codes times it make values."""
        return self._kept("synthesis", device, self._made_synthesis)

    def _made_synthesis(self) -> Tensor:
        return self.coefficients.float() * powers_of_two(-self.exponents.int())[:, None]

    def analysis(self, device: torch.device) -> Tensor:
        """float32 [channels, directions]: values times it are their least-squares codes."""
        return self._kept("analysis", device, self._made_analysis)

    def _made_analysis(self) -> Tensor:
        rows = self._made_synthesis().double()
        # Rounding may have made two directions one, and a restored basis may be anything.
        products = rows @ rows.T + _RIDGE * torch.eye(len(rows))
        made: Tensor = rows.T @ torch.linalg.inv(products)
        return made.float()

    def classes_on(self, device: torch.device) -> Tensor:
        """The classes there."""
        return self._kept("classes", device, lambda: self.classes)

    def forecast_on(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The forecast's coefficients as float32, and its exponents as int32."""
        if (forecast := self.forecast) is None:
            return None
        by = self._kept("forecast", device, lambda: forecast.coefficients.float())
        return by, self._kept("its exponents", device, lambda: forecast.exponents.int())

    def entries(self, device: torch.device) -> Tensor:
        """The codebook's entries, float32 [entries, channels]: exact sums, rounded once, scaled."""
        return self._kept("entries", device, self._made_entries)

    def _made_entries(self) -> Tensor:
        if self.codebook is None:
            raise BadFrame(f"basis {self.name.hex()}: it has no codebook")
        # Whole multiples of 2^-13 below 2^24: float64 adds them up exactly in any order.
        sums = self.codebook.codes.double() @ self._made_synthesis().double()
        return sums.float() * self.codebook.scale

    def _kept(self, what: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        found = self._there.get((what, device))
        if found is None:
            self._there[what, device] = found = make().to(device)
        return found

    @functools.cached_property
    def data(self) -> bytes:
        """As it is sent: counts, mean, exponents and classes, and coefficients, entropy-coded."""
        mean = b"" if self.mean is None else bfloat16_bytes(self.mean)
        *small, coefficients = self.numbers()
        symbols = (coefficients.int() + _SYMBOL_ZERO).to(torch.uint8)
        kernels = kernels_for("cpu")
        entries = 0 if self.codebook is None else len(self.codebook.codes)
        contexts = _contexts(len(symbols), self.classes, entries)
        counts = kernels.histogram(symbols, contexts, 1 + int(contexts.max())).numpy()
        head = _HEADER.pack(*self._counts()) + mean
        rest = b"".join(part.numpy().tobytes() for part in small)
        return head + rest + write_symbols(symbols, contexts, counts, kernels)

    def _counts(self) -> tuple[int, int, int]:
        flags = _HAS_MEAN * (self.mean is not None) | _HAS_FORECAST * (self.forecast is not None)
        flags |= _HAS_CODEBOOK * (self.codebook is not None)
        return self.directions, self.channels, flags

    def numbers(self) -> list[Tensor]:
        """Exponents and classes of directions, exponents of the forecast, all coefficients.

        With a codebook: what it says of its codes, before all coefficients; they come last.
        """
        parts, coefficients = [self.exponents << 4 | self.classes], [self.coefficients.reshape(-1)]
        if self.forecast is not None:
            parts.append(self.forecast.exponents)
            coefficients.append(self.forecast.coefficients.reshape(-1))
        if self.codebook is not None:
            parts.append(as_tensor(self.codebook.to_bytes()))
            coefficients.append(self.codebook.codes.reshape(-1))
        return [*parts, torch.cat(coefficients)]

    @staticmethod
    def from_bytes(data: bytes, channels: int) -> Basis:
        """The basis of such `data`; it may come from a stranger.

        Raises:
            BadFrame: it is none for so many channels.
        """
        if len(data) < _HEADER.size:
            raise BadFrame(f"basis: expected a header of {_HEADER.size} bytes, got {len(data)}")
        directions, claimed, flags = _HEADER.unpack_from(data)
        if claimed != channels or not 1 <= directions <= most_directions(channels):
            raise BadFrame(f"basis: {directions} directions of {claimed} channels; {channels} here")
        if flags > _HAS_CODEBOOK:
            raise BadFrame(f"basis: parts {flags}")
        maps, num_heads = 1 + (flags >> 1 & 1), flags // _HAS_CODEBOOK
        mean_bytes, head_bytes = 2 * channels * (flags & 1), num_heads * _CODEBOOK.size
        sizes = [mean_bytes, *[directions] * maps, head_bytes]
        at = _HEADER.size + sum(sizes)
        if len(data) < at:
            raise BadFrame(f"basis: expected {at} bytes or more, got {len(data)}")
        ends = itertools.accumulate(sizes, initial=_HEADER.size)
        mean, *small, head = (data[at : at + size] for at, size in zip(ends, sizes, strict=False))
        entries, scale = Codebook.shape_in(head) if head else (0, 0.0)
        numbers = as_tensor(small[0])
        exponents, classes = numbers >> 4, numbers & 15
        count = directions * (channels * maps + entries)
        contexts = _contexts(count, classes, entries)
        symbols = read_symbols(data[at:], contexts, kernels_for("cpu"))
        coefficients = (symbols.int() - _SYMBOL_ZERO).to(torch.int8).view(-1, directions)
        # Of a forecast or of entries; and those of directions are said row by row.
        rest = coefficients[channels:]
        return _checked(
            Basis(
                coefficients=coefficients[:channels].reshape(directions, channels),
                exponents=exponents,
                classes=classes,
                mean=read_bfloat16(mean) if mean else None,
                forecast=Forecast(rest, as_tensor(small[1])) if maps > 1 else None,
                codebook=Codebook(rest, scale) if entries else None,
            )
        )


def _contexts(count: int, classes: Tensor, entries: int) -> Tensor:
    """Of so many coefficients, uint8: the last are entries' codes, which spread by their class."""
    contexts = torch.zeros(count, dtype=torch.uint8)
    if entries:
        contexts[-entries * len(classes) :] = (1 + classes).repeat(entries)
    return contexts


def _checked(basis: Basis) -> Basis:
    """A basis of a stranger, if all its numbers are in their ranges.

    Raises:
        BadFrame: one is not.
    """
    low, high = basis.exponents.aminmax()
    if int(low) < _LEAST_EXPONENT or int(high) > _MOST_EXPONENT:
        raise BadFrame(f"basis: exponents {low} to {high}")
    if int(basis.numbers()[-1].min()) < -_LARGEST:
        raise BadFrame(f"basis: a coefficient beyond {_LARGEST}")
    if int(basis.classes.max()) >= CLASSES:
        raise BadFrame(f"basis: a class of {basis.classes.max()}")
    if basis.mean is not None and not bool(basis.mean.isfinite().all()):
        raise BadFrame("basis: a mean that is not finite")
    if basis.forecast is not None and int(basis.forecast.exponents.max()) > _MOST_FORECAST_EXPONENT:
        raise BadFrame(f"basis: exponents up to {basis.forecast.exponents.max()} in its forecast")
    return basis


def powers_of_two(exponents: Tensor) -> Tensor:
    """float32 of int32: exact on every device, as `pow` need not be; 2^-126 where it is less."""
    return (exponents.clamp(-126, 127) + 127 << 23).to(torch.int32).view(torch.float32)


def most_directions(channels: int) -> int:
    """No basis of so many channels has more."""
    return min(channels, MAX_DIRECTIONS)


def most_bytes(channels: int) -> int:
    """No basis of so many channels has more, whatever its parts."""
    directions = most_directions(channels)
    coded = max_stream_bytes(directions * (channels + max(channels, 1 << MOST_ENTRY_BITS)))
    return _HEADER.size + _CODEBOOK.size + 2 * channels + 2 * directions + coded


def name_in(payload: bytes) -> bytes:
    """The name of the basis that a frame's payload needs; empty if it needs none."""
    name = payload[:NAME_BYTES]
    return b"" if name == PLAIN else name


# ---- learning one


def learned(
    rows: Sequence[Tensor], step: float, *, bases: Sequence[Tensor] = (), has_mean: bool = False
) -> Basis | None:
    """The basis of rows like these, for values that are coded in such steps.

    As many directions as vary by more than the coding errs along any (reverse water-filling).

    Args:
        rows: float32 [n, channels] of each sample: some tokens' values, or their changes.
        step: of the quantiser, in the rows' units.
        bases: of changes, what they changed: of the rows' shapes.
        has_mean: whether rows vary around another value than zero.

    Returns:
        None if nothing varies so much, or the rows' squares or the step are not finite.
    """
    all_rows = torch.cat(list(rows))
    mean = all_rows.mean(0).to(torch.bfloat16).float() if has_mean else None
    centred = all_rows if mean is None else all_rows - mean
    if not (math.isfinite(step) and step > 0 and bool(centred.square().sum().isfinite())):
        return None
    floor = (_FLOOR_OF_FIRST if has_mean else _FLOOR) * step
    spreads, vectors = _leading(centred, floor)
    count = min(int((spreads > floor).sum()), most_directions(all_rows.shape[1]))
    if count == 0:
        return None
    spreads, vectors = spreads[:count], vectors[:, :count]
    forecast = None
    if bases:
        spreads, vectors, forecast = _with_forecast(spreads, vectors.float(), rows, bases)
    largest = _COARSE if spreads[0] < _WIDE_STEPS * step else _LARGEST
    ends = _LEAST_EXPONENT, _MOST_EXPONENT
    coefficients, exponents = _rounded(vectors.T.contiguous(), largest, *ends)
    return Basis(coefficients, exponents, _classes(spreads), mean, forecast)


def with_codebook(entries: Tensor, step: float) -> Basis | None:
    """The basis of a codebook's entries, and these along it.

    Args:
        entries: float32 [entries, channels], of unit length; a power of two.
        step: in which they are rounded.
    """
    spreads, vectors = _leading(entries, _FLOOR * step)
    count = min(int((spreads > _FLOOR * step).sum()), most_directions(entries.shape[1]))
    if count == 0:
        return None
    spreads, vectors = spreads[:count], vectors[:, :count].float()
    scale = nearest_bfloat16(step)
    codes = (entries @ vectors / scale).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    ends = _LEAST_EXPONENT, _MOST_EXPONENT
    coefficients, exponents = _rounded(vectors.T.contiguous(), _COARSE, *ends)
    book = Codebook(codes, scale)
    return Basis(coefficients, exponents, _classes(spreads), codebook=book)


def _with_forecast(
    spreads: Tensor, vectors: Tensor, rows: Sequence[Tensor], bases: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Forecast | None]:
    """The same span, along what is left of the rows where their bases have foretold them.

    What a sample's tokens have in common is no part of it: frames say that by themselves.
    """
    if len(rows) < _HALVES:
        return spreads, vectors, None
    seen = [
        _Sums.of(
            [_centred(one) for one in bases[k::_HALVES]],
            [_centred(one) @ vectors for one in rows[k::_HALVES]],
        )
        for k in range(_HALVES)
    ]
    ridge = _ridge_that_pays(*seen)
    if ridge is None:
        return spreads, vectors, None
    total = seen[0] + seen[1]
    found = total.regression(ridge)
    squares, turned = torch.linalg.eigh(total.left_by(found) / total.count)
    turned = turned.flip(1)
    spreads = squares.flip(0).clamp(min=0).sqrt()
    return spreads, vectors @ turned.float(), _rounded_map(found @ turned)


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(0)


@dataclass(frozen=True, slots=True)
class _Sums:
    """What least squares need to know of rows x that are to foretell rows y; float64.

    Attributes:
        count: of rows.
        xx, xy, yy: sums of products, [channels, channels], [channels, directions] and so on.
    """

    count: int
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @staticmethod
    def of(given: Sequence[Tensor], sought: Sequence[Tensor]) -> _Sums:
        x, y = torch.cat(list(given)), torch.cat(list(sought))
        return _Sums(len(x), (x.T @ x).double(), (x.T @ y).double(), (y.T @ y).double())

    def __add__(self, other: _Sums) -> _Sums:
        count, xx, xy = self.count + other.count, self.xx + other.xx, self.xy + other.xy
        return _Sums(count, xx, xy, self.yy + other.yy)

    def regression(self, ridge: float) -> Tensor:
        """The map from x to y, [channels, directions], that ridge regression finds."""
        channels = len(self.xx)
        spread = ridge * self.xx.trace() / channels + _TINY
        found: Tensor = torch.linalg.solve(self.xx + spread * torch.eye(channels), self.xy)
        return found

    def left_by(self, found: Tensor) -> Tensor:
        """Sums of products of what a map leaves of y, [directions, directions]."""
        both = found.T @ self.xy
        return self.yy - both - both.T + found.T @ self.xx @ found


def _ridge_that_pays(one: _Sums, other: _Sums) -> float | None:
    """The ridge with which one half of the samples foretells the other best, if any does well."""
    left = {ridge: other.left_by(one.regression(ridge)).trace().item() for ridge in _RIDGES}
    best = min(left, key=left.__getitem__)
    return best if left[best] < _WORTH * other.yy.trace().item() else None


def _rounded_map(found: Tensor) -> Forecast:
    coefficients, exponents = _rounded(found.T, _COARSE, 0, _MOST_FORECAST_EXPONENT)
    return Forecast(coefficients.T.contiguous(), exponents)


def _leading(rows: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Spreads, falling, and their unit vectors, [k] and [channels, k]: all that reach the floor."""
    count, channels = rows.shape
    if channels <= _WHOLE_CHANNELS:
        exact = rows.double()
        squares, vectors = torch.linalg.eigh(exact.T @ exact / count)
        return squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    rank, most = _FIRST_RANK, min(most_directions(channels), count)
    while True:
        span = _leading_span(rows, min(rank + _SPARE, channels, count))
        _, values, vectors = torch.linalg.svd(rows @ span, full_matrices=False)
        spreads = values[:rank] / math.sqrt(count)
        if rank >= most or float(spreads[-1]) <= floor:
            return spreads, span @ vectors[:rank].T
        rank *= 2


def _leading_span(rows: Tensor, rank: int) -> Tensor:
    """An orthonormal [channels, rank] that holds about all that rows vary by most."""
    # Halko, Martinsson and Tropp 2011, algorithm 4.4; drawn by a generator of its own.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(rows), rank, generator=generator).to(rows.device)
    span: Tensor = torch.linalg.qr(rows.T @ drawn)[0]
    for _ in range(_ITERATIONS):
        span = torch.linalg.qr(rows.T @ torch.linalg.qr(rows @ span)[0])[0]
    return span


def _rounded(vectors: Tensor, largest: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Rows as coefficients up to `largest`, and their exponents, `least` to `most`; on the CPU."""
    exact = vectors.double().cpu()
    peaks = exact.abs().amax(1, keepdim=True)
    exponents = torch.log2(largest / peaks).floor().clamp(least, most)
    scaled = torch.round(exact * 2.0**exponents)
    coefficients = scaled.clamp(-largest, largest).to(torch.int8)
    return coefficients, exponents[:, 0].to(torch.uint8)


def _classes(spreads: Tensor) -> Tensor:
    """Half an octave each, or wider where there is more between the widest and the narrowest."""
    octaves = np.log2(spreads.double().cpu().numpy())
    low, high = octaves[-1], octaves[min(len(octaves) - 1, len(octaves) // 50)]
    an_octave = min(_AN_OCTAVE, (CLASSES - 1) / max(high - low, 1e-9))
    found = np.rint((octaves - low) * an_octave).clip(0, CLASSES - 1)
    return torch.from_numpy(found.astype(np.uint8))
