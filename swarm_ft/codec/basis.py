"""Learned bases of transform coders: directions over channels, with a predictor or a codebook.

Changes of activations between two visits of a sample lie in few directions. A Karhunen-Loeve basis,
the eigenvectors of their covariance, spans these. About half of the changes' energy is a linear
function of the old activation, because few changes of weights cause them. After the transform and
the subtraction of a linear prediction most values quantise to zero. The sender learns basis and
predictor from the tensors of one step, and sends them to the receiver before the first frame that
needs them. `directional` and `codebook` code with them.
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
    bfloat16_value,
    nearest_bfloat16,
    read_bfloat16,
)
from swarm_ft.codec.entropy import CLASSES, max_stream_bytes, read_symbols, write_symbols
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.side_info import NAME_BYTES, PLAIN
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import BadFrame

MAX_DIRECTIONS = 1024
_HEADER = struct.Struct("<HIB")
_CODEBOOK = struct.Struct("<BH")
_SYMBOL_ZERO = 128
_LARGEST = 127
_COARSE, _WIDE_STEPS = 31, 40.0
"""Largest coefficients of a direction, and the spread in steps above which 8 bits replace 6. With
smaller spreads the rounding of directions is lost in the quantisation error."""
_LEAST_EXPONENT, _MOST_EXPONENT = 4, 13
"""Range of a direction's exponent; the largest coefficient of a unit vector is between 1 /
sqrt(channels) and 1."""
_FLOOR, _FLOOR_OF_FIRST = 0.3, 0.15
"""Smallest useful spread along a direction, in steps, for changes and for first activations.
Narrower directions nearly always quantise to zero; the error of a uniform quantiser is 1 / sqrt(12)
= 0.29 steps (reverse water-filling, Cover and Thomas, section 10.3.3). First activations drift away
from a basis sooner, and no later frame corrects what it lacks."""
_WHOLE_CHANNELS = 512
"""Number of channels up to which all eigenvectors are computed; above it subspace iteration finds
the leading ones."""
_FIRST_RANK, _SPARE, _ITERATIONS = 128, 16, 2
_AN_OCTAVE = 2.0
_RIDGE = 1e-6
"""Regularisation of the directions' Gram matrix, whose diagonal is about 1."""
_MOST_FORECAST_EXPONENT = 30
_RIDGES = (0.01, 0.1, 1.0)
"""Candidate ridge parameters, relative to the mean square of a channel of the base."""
_WORTH = 0.9
"""Largest share of a change's energy that a predictor may leave; a weaker one is not worth its
bytes."""
_TINY = 1e-30
_HALVES = 2
_HAS_MEAN, _HAS_FORECAST, _HAS_CODEBOOK = 1, 2, 4
MOST_ENTRY_BITS = 10
_LEAST_CODE, _LARGEST_CODE = 2.0**-24, 1.0
"""Range of the scale of a codebook's entries, which have unit length."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearPredictor:
    """Linear predictor of a change along the directions, from the base.

    Attributes:
        coefficients: int8 [channels, directions].
        exponents: uint8 [directions]; column r of the map is coefficients[:, r] * 2^-exponents[r].
    """

    coefficients: Tensor
    exponents: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codebook:
    """Codebook of a vector quantiser for tokens' gradients, in the coordinates of a basis.

    Attributes:
        codes: int8 [entries, directions]; the number of entries is a power of two.
        scale: Value of one code unit; exactly a bfloat16.
    """

    codes: Tensor
    scale: float

    @property
    def bits(self) -> int:
        """Bits of an entry's number."""
        return len(self.codes).bit_length() - 1

    def to_bytes(self) -> bytes:
        """Encode the number of entries and the scale."""
        return _CODEBOOK.pack(self.bits, bfloat16_pattern(self.scale))

    @staticmethod
    def shape_in(data: bytes) -> tuple[int, float]:
        """Decode the number of entries and the scale from the bytes of `to_bytes`.

        Raises:
            BadFrame: The number of entries or the scale is out of its range.
        """
        bits, pattern = _CODEBOOK.unpack(data)
        scale = bfloat16_value(pattern)
        if not 1 <= bits <= MOST_ENTRY_BITS or not _LEAST_CODE <= scale <= _LARGEST_CODE:
            raise BadFrame(f"basis: a codebook of 2^{bits} entries, in steps of {scale:.4g}")
        return 1 << bits, scale


@dataclass(frozen=True, eq=False)
class Basis:
    """A nearly orthonormal basis over channels, in order of falling variance.

    Attributes:
        coefficients: int8 [directions, channels].
        exponents: uint8 [directions]; direction r is coefficients[r] * 2^-exponents[r].
        classes: uint8 [directions], 0 to 7; class of the spread of values along a direction.
        mean: float32 [channels], exactly bfloat16s, subtracted before the transform; None for zero.
        predictor: Linear predictor of changes; None without one.
        codebook: Codebook of gradients; None without one.
    """

    coefficients: Tensor
    exponents: Tensor
    classes: Tensor
    mean: Tensor | None = None
    predictor: LinearPredictor | None = None
    codebook: Codebook | None = None
    _cache: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    """Cache of derived tensors by device."""

    @property
    def directions(self) -> int:
        """Number of directions."""
        return len(self.coefficients)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.coefficients.shape[1]

    @functools.cached_property
    def name(self) -> bytes:
        """Fingerprint of all numbers; frames refer to the basis by it."""
        mean = b"" if self.mean is None else bfloat16_bytes(self.mean)
        rest = b"".join(part.numpy().tobytes() for part in self.numbers())
        name = fingerprint_of(_HEADER.pack(*self._counts()), mean, rest)[:NAME_BYTES]
        return name if name != PLAIN else bytes([1] * NAME_BYTES)

    def synthesis(self, device: torch.device) -> Tensor:
        """Return the directions, exact float32 [directions, channels]: codes to values."""
        return self._cached("synthesis", device, self._made_synthesis)

    def _made_synthesis(self) -> Tensor:
        return self.coefficients.float() * powers_of_two(-self.exponents.int())[:, None]

    def analysis(self, device: torch.device) -> Tensor:
        """Return the least-squares inverse, float32 [channels, directions]: values to codes."""
        return self._cached("analysis", device, self._made_analysis)

    def _made_analysis(self) -> Tensor:
        rows = self._made_synthesis().double()
        # The ridge keeps the matrix regular: rounding may have made two directions equal, and a
        # received basis may be arbitrary.
        products = rows @ rows.T + _RIDGE * torch.eye(len(rows))
        made: Tensor = rows.T @ torch.linalg.inv(products)
        return made.float()

    def classes_on(self, device: torch.device) -> Tensor:
        """Return the spread classes on a device."""
        return self._cached("classes", device, lambda: self.classes)

    def predictor_on(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the predictor's coefficients (float32) and exponents (int32); None without one."""
        if (forecast := self.predictor) is None:
            return None
        by = self._cached("forecast", device, lambda: forecast.coefficients.float())
        return by, self._cached("its exponents", device, lambda: forecast.exponents.int())

    def entries(self, device: torch.device) -> Tensor:
        """Return the codebook's entries, float32 [entries, channels]: exact sums, rounded once."""
        return self._cached("entries", device, self._made_entries)

    def _made_entries(self) -> Tensor:
        if self.codebook is None:
            raise BadFrame(f"basis {self.name.hex()}: it has no codebook")
        # The terms are multiples of 2^-13 below 2^24, which float64 adds exactly in any order.
        sums = self.codebook.codes.double() @ self._made_synthesis().double()
        return sums.float() * self.codebook.scale

    def _cached(self, what: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        found = self._cache.get((what, device))
        if found is None:
            self._cache[what, device] = found = make().to(device)
        return found

    @functools.cached_property
    def data(self) -> bytes:
        """Encoded form: counts, mean, exponents and classes, and entropy-coded coefficients."""
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
        flags = _HAS_MEAN * (self.mean is not None) | _HAS_FORECAST * (self.predictor is not None)
        flags |= _HAS_CODEBOOK * (self.codebook is not None)
        return self.directions, self.channels, flags

    def numbers(self) -> list[Tensor]:
        """Return the arrays in wire order: exponents with classes, predictor, coefficients.

        With a codebook, its header precedes the coefficients, and its codes are the last of them.
        """
        parts, coefficients = [self.exponents << 4 | self.classes], [self.coefficients.reshape(-1)]
        if self.predictor is not None:
            parts.append(self.predictor.exponents)
            coefficients.append(self.predictor.coefficients.reshape(-1))
        if self.codebook is not None:
            parts.append(as_tensor(self.codebook.to_bytes()))
            coefficients.append(self.codebook.codes.reshape(-1))
        return [*parts, torch.cat(coefficients)]

    @staticmethod
    def from_bytes(data: bytes, channels: int) -> Basis:
        """Decode a basis from possibly hostile bytes.

        Raises:
            BadFrame: The bytes are not a basis of this many channels.
        """
        if len(data) < _HEADER.size:
            raise BadFrame(f"basis: expected a header of {_HEADER.size} bytes, got {len(data)}")
        directions, claimed, flags = _HEADER.unpack_from(data)
        most = max_directions(channels)
        if claimed != channels or not 1 <= directions <= most:
            raise BadFrame(
                f"basis: expected 1 to {most} directions over {channels} channels, got "
                f"{directions} over {claimed}"
            )
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
        # The rest belongs to a predictor or a codebook; directions are stored row by row.
        rest = coefficients[channels:]
        return _checked(
            Basis(
                coefficients=coefficients[:channels].reshape(directions, channels),
                exponents=exponents,
                classes=classes,
                mean=read_bfloat16(mean) if mean else None,
                predictor=LinearPredictor(rest, as_tensor(small[1])) if maps > 1 else None,
                codebook=Codebook(rest, scale) if entries else None,
            )
        )


def _contexts(count: int, classes: Tensor, entries: int) -> Tensor:
    """Return the entropy coder's context of each coefficient, uint8 [count].

    The codes of a codebook come last; the class of their direction is their context.
    """
    contexts = torch.zeros(count, dtype=torch.uint8)
    if entries:
        contexts[-entries * len(classes) :] = (1 + classes).repeat(entries)
    return contexts


def _checked(basis: Basis) -> Basis:
    """Return a received basis if all its numbers are in range.

    Raises:
        BadFrame: A number is not.
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
    if (
        basis.predictor is not None
        and int(basis.predictor.exponents.max()) > _MOST_FORECAST_EXPONENT
    ):
        raise BadFrame(f"basis: exponents up to {basis.predictor.exponents.max()} in its forecast")
    return basis


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^exponents as float32, exact on every device (`pow` need not be), at least 2^-126."""
    return (exponents.clamp(-126, 127) + 127 << 23).to(torch.int32).view(torch.float32)


def max_directions(channels: int) -> int:
    """Return the largest number of directions over this many channels."""
    return min(channels, MAX_DIRECTIONS)


def max_basis_bytes(channels: int) -> int:
    """Return an upper bound of the encoded size of a basis over this many channels."""
    directions = max_directions(channels)
    coded = max_stream_bytes(directions * (channels + max(channels, 1 << MOST_ENTRY_BITS)))
    return _HEADER.size + _CODEBOOK.size + 2 * channels + 2 * directions + coded


# ---- learning one


def learn_basis(
    rows: Sequence[Tensor],
    step: float,
    *,
    old_values: Sequence[Tensor] = (),
    has_mean: bool = False,
) -> Basis | None:
    """Learn a Karhunen-Loeve basis of rows for a quantisation step.

    The basis has as many directions as vary by more than the quantisation error (reverse
    water-filling).

    Args:
        rows: Samples' rows, float32 [n, channels] each: values of some tokens, or their changes.
        step: Quantisation step in the rows' units.
        old_values: Old values of changes, shapes as in `rows`; a predictor is learned from them.
        has_mean: Whether the rows have a mean other than zero.

    Returns:
        The basis; None if no direction varies enough, or the rows' squares or the step are not
        finite.
    """
    all_rows = torch.cat(list(rows))
    mean = all_rows.mean(0).to(torch.bfloat16).float() if has_mean else None
    centred = all_rows if mean is None else all_rows - mean
    if not (math.isfinite(step) and step > 0 and bool(centred.square().sum().isfinite())):
        return None
    floor = (_FLOOR_OF_FIRST if has_mean else _FLOOR) * step
    spreads, vectors = _leading(centred, floor)
    count = min(int((spreads > floor).sum()), max_directions(all_rows.shape[1]))
    if count == 0:
        return None
    spreads, vectors = spreads[:count], vectors[:, :count]
    forecast = None
    if old_values:
        spreads, vectors, forecast = _with_forecast(spreads, vectors.float(), rows, old_values)
    largest = _COARSE if spreads[0] < _WIDE_STEPS * step else _LARGEST
    ends = _LEAST_EXPONENT, _MOST_EXPONENT
    coefficients, exponents = _rounded(vectors.T.contiguous(), largest, *ends)
    return Basis(coefficients, exponents, _classes(spreads), mean, forecast)


def with_codebook(entries: Tensor, step: float) -> Basis | None:
    """Return the basis of a codebook's entries, with the entries in its coordinates.

    Args:
        entries: float32 [entries, channels] of unit length; their number is a power of two.
        step: Rounding step of the coordinates.
    """
    spreads, vectors = _leading(entries, _FLOOR * step)
    count = min(int((spreads > _FLOOR * step).sum()), max_directions(entries.shape[1]))
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
) -> tuple[Tensor, Tensor, LinearPredictor | None]:
    """Return a predictor, and spreads and directions of its residual within the same span."""
    if len(rows) < _HALVES:
        return spreads, vectors, None
    seen = [
        _Sums.of(
            [_centred(one) for one in bases[k::_HALVES]],
            [_centred(one) @ vectors for one in rows[k::_HALVES]],
        )
        for k in range(_HALVES)
    ]
    ridge = _best_ridge(*seen)
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
    """Sufficient statistics of least squares from rows x to rows y, in float64.

    Attributes:
        count: Number of rows.
        xx, xy, yy: Sums of products: [channels, channels], [channels, directions], and so on.
    """

    count: int
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @staticmethod
    def of(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> _Sums:
        x, y = torch.cat(list(inputs)), torch.cat(list(targets))
        return _Sums(len(x), (x.T @ x).double(), (x.T @ y).double(), (y.T @ y).double())

    def __add__(self, other: _Sums) -> _Sums:
        count, xx, xy = self.count + other.count, self.xx + other.xx, self.xy + other.xy
        return _Sums(count, xx, xy, self.yy + other.yy)

    def regression(self, ridge: float) -> Tensor:
        """Return the ridge regression from x to y, [channels, directions]."""
        channels = len(self.xx)
        spread = ridge * self.xx.trace() / channels + _TINY
        found: Tensor = torch.linalg.solve(self.xx + spread * torch.eye(channels), self.xy)
        return found

    def left_by(self, found: Tensor) -> Tensor:
        """Return the sums of products of y's residual under a map, [directions, directions]."""
        both = found.T @ self.xy
        return self.yy - both - both.T + found.T @ self.xx @ found


def _best_ridge(one: _Sums, other: _Sums) -> float | None:
    """Return the ridge whose map from one half of the samples predicts the other half best.

    None means that no map leaves less than `_WORTH` of the energy.
    """
    left = {ridge: other.left_by(one.regression(ridge)).trace().item() for ridge in _RIDGES}
    best = min(left, key=left.__getitem__)
    return best if left[best] < _WORTH * other.yy.trace().item() else None


def _rounded_map(found: Tensor) -> LinearPredictor:
    coefficients, exponents = _rounded(found.T, _COARSE, 0, _MOST_FORECAST_EXPONENT)
    return LinearPredictor(coefficients.T.contiguous(), exponents)


def _leading(rows: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return falling spreads [k] and unit vectors [channels, k], at least all above the floor."""
    count, channels = rows.shape
    if channels <= _WHOLE_CHANNELS:
        exact = rows.double()
        squares, vectors = torch.linalg.eigh(exact.T @ exact / count)
        return squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    rank, most = _FIRST_RANK, min(max_directions(channels), count)
    while True:
        span = _leading_span(rows, min(rank + _SPARE, channels, count))
        _, values, vectors = torch.linalg.svd(rows @ span, full_matrices=False)
        spreads = values[:rank] / math.sqrt(count)
        if rank >= most or float(spreads[-1]) <= floor:
            return spreads, span @ vectors[:rank].T
        rank *= 2


def _leading_span(rows: Tensor, rank: int) -> Tensor:
    """Return an orthonormal [channels, rank] that spans nearly all of the leading variance."""
    # The method is algorithm 4.4 of Halko, Martinsson and Tropp (2011). A separate generator keeps
    # the global random state untouched.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(rows), rank, generator=generator).to(rows.device)
    span: Tensor = torch.linalg.qr(rows.T @ drawn)[0]
    for _ in range(_ITERATIONS):
        span = torch.linalg.qr(rows.T @ torch.linalg.qr(rows @ span)[0])[0]
    return span


def _rounded(vectors: Tensor, largest: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Round rows to integer coefficients and exponents within these bounds; on the CPU."""
    exact = vectors.double().cpu()
    peaks = exact.abs().amax(1, keepdim=True)
    exponents = torch.log2(largest / peaks).floor().clamp(least, most)
    scaled = torch.round(exact * 2.0**exponents)
    coefficients = scaled.clamp(-largest, largest).to(torch.int8)
    return coefficients, exponents[:, 0].to(torch.uint8)


def _classes(spreads: Tensor) -> Tensor:
    """Return spread classes of half an octave each, or wider if the spreads' range needs it."""
    octaves = np.log2(spreads.double().cpu().numpy())
    low, high = octaves[-1], octaves[min(len(octaves) - 1, len(octaves) // 50)]
    an_octave = min(_AN_OCTAVE, (CLASSES - 1) / max(high - low, 1e-9))
    found = np.rint((octaves - low) * an_octave).clip(0, CLASSES - 1)
    return torch.from_numpy(found.astype(np.uint8))
