"""Transform coders `qkS` and `aqkS`, for first activations and for changes along a learned basis.

The encoder subtracts the mean or the linear prediction from the base, transforms along a
Karhunen-Loeve basis (`basis`), and quantises with a trellis (trellis-coded quantisation). The step
is S times the activation's own spread, so the quality is constant and the rate varies. Changes of a
model that is fine-tuned follow few directions, so they take few bits; the error of the last visit
has no preferred direction and lies mostly below the step. All codes have subtractive dither: an
error that repeats at every visit harms training more than a larger random one.

A frame names its basis, and both ends hold it. Payload: the name; for `PLAIN` the payload of `wide`
along the channels; else a header, a spread for each class of directions, the codes that are too
large for a symbol, and the stream of symbols.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import (
    Codec,
    Payload,
    bfloat16_pattern,
    bfloat16_value,
    check_finite,
    checked_peak,
    nearest_bfloat16,
    peak_tensor,
    to_host,
)
from swarm_ft.codec.basis import MAX_DIRECTIONS, Basis, learn_basis, powers_of_two
from swarm_ft.codec.entropy import (
    CLASSES,
    MAX_SCALE,
    SYMBOLS,
    lanes_for,
    max_stream_bytes,
    read_stream,
    write_stream,
)
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import (
    EXACT_CODE,
    LARGEST_SYMBOL,
    MAX_CODE,
    MIN_SCALE,
    SYMBOL_ZERO,
    UNITS,
    Coding,
    Kernels,
    Scales,
    WideGrid,
    flip_of,
)
from swarm_ft.codec.kernels.base import SLICES as ALL_SLICES
from swarm_ft.codec.side_info import (
    NAME_BYTES,
    PLAIN,
    Learning,
    Observation,
    SideInfo,
    observed,
)
from swarm_ft.codec.spread_tables import (
    SLICES,
    SPREADS,
    UNDITHERED,
    frequencies,
    nearest_spreads,
)
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.wide import WideCodec, read_escaped, write_at_scale
from swarm_ft.codec.wide_plan import FIRST_SYMBOL, LAST_SYMBOL
from swarm_ft.errors import BadFrame

Counts = NDArray[np.int64]

_HEADER = struct.Struct("<HBHI")
_SILENT = _HEADER.pack(0, 0, 0, 0)
_FINER = 4
"""Resolution of the mean over tokens: its step is a quarter of a token's step."""
_CENTRE = CLASSES * SLICES
"""Context of the mean over tokens, after those of each class and slice of the dither."""
_CONTEXTS = _CENTRE + SLICES
"""Number of contexts; the trellis distinguishes contexts that have equal frequencies here."""
_FLIP = flip_of(ALL_SLICES)
_EXACT_BITS = 24
_LEARNING_OF_VALUES = Learning(tokens_a_channel=64)
_LEARNING_OF_CHANGES = Learning(tokens_a_channel=128)


@dataclass(frozen=True, slots=True)
class DirectionalCodec(Codec):
    """Transform coder along a learned basis; see the module's docstring.

    Attributes:
        kernels: Backend of the arithmetic; None for that of the tensor's device.
        basis: Basis to encode and decode with; None if there is none yet, which codes along
            channels.
    """

    kernels: Kernels | None = None
    basis: Basis | None = None

    @property
    def learning(self) -> Learning:
        """Rule by which the codec learns bases."""
        return _LEARNING_OF_CHANGES if self.spec.is_delta else _LEARNING_OF_VALUES

    def with_side_info(self, info: SideInfo | None) -> DirectionalCodec:
        """Return the codec with a basis."""
        return replace(self, basis=info if isinstance(info, Basis) else None)

    def observe(self, x: Tensor, base: Tensor | None = None) -> Observation:
        """Return rows of a sample with its step size; see `Codec.observe`."""
        return observed(x, base, self.step_of(x))

    def learn(self, seen: Sequence[Observation]) -> Basis | None:
        """Return a basis of these values or changes."""
        rows = [one.rows.float() for one in seen if one.rows is not None]
        bases = [one.base.float() for one in seen if one.base is not None]
        step_size = statistics.fmean(one.step_size for one in seen)
        return learn_basis(rows, step_size, old_values=bases, has_mean=not self.spec.is_delta)

    def step_of(self, x: Tensor) -> float:
        """Return the quantisation step for x, [tokens, channels], or its change.

        The spread is that of the token with the median norm, so that a few tokens with massive
        activations do not coarsen all others.
        """
        return self._step(_median_norm(x).item(), x.shape[1])

    def _step(self, length: float, channels: int) -> float:
        return length / math.sqrt(channels) * self.spec.number

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of the payload's size."""
        count = (1 + tokens) * min(channels, MAX_DIRECTIONS)
        coded = _HEADER.size + _Tables.SIZE + 2 * count + max_stream_bytes(count)
        return NAME_BYTES + max(coded, WideCodec(self.spec).max_payload_bytes(tokens, channels))

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        kernels = self.kernels or kernels_for(x.device.type)
        basis = self.basis
        if basis is None:
            plain = write_at_scale(self.spec, x, base, self.step_of(x), kernels)
            return replace(plain, data=PLAIN + plain.data)
        change = x if base is None else x - base
        if basis.mean is not None:
            change = change - basis.mean.to(x.device)
        along = change @ basis.analysis(x.device)
        looks = to_host(_median_norm(x), peak_tensor(change), peak_tensor(along))
        length, peak, peak_along = (float(look) for look in looks)
        checked_peak(peak)
        scale = _scale_for(self._step(length, x.shape[1]), checked_peak(peak_along))
        data, steps = _written(along, base, scale, basis, kernels)
        return Payload(basis.name + data, lambda: _value(steps(), scale, base, basis))

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        kernels = self.kernels or kernels_for(device.type)
        name, payload = encoded.payload[:NAME_BYTES], encoded.payload[NAME_BYTES:]
        if name == PLAIN:
            plain = replace(encoded, payload=payload)
            return WideCodec(self.spec, kernels).decode(plain, base, device=device)
        basis = self.basis
        if basis is None or basis.name != name or basis.channels != encoded.channels:
            raise BadFrame(f"frame: it needs the basis {name.hex()}, which this end does not have")
        if payload == _SILENT:
            along, scale = torch.zeros(encoded.tokens, basis.directions, device=device), 0.0
        else:
            along, scale = _read_along(payload, encoded.tokens, base, basis, device, kernels)
        return check_finite(_value(along, scale, base, basis))


def _value(steps: Tensor, scale: float, base: Tensor | None, basis: Basis) -> Tensor:
    """Reconstruct values, float32 [tokens, channels], from coordinates in steps."""
    # Three operations are exact and two round. Each is an operation of its own, so that no
    # compiler fuses them.
    value = _exact_product(steps, basis) * scale
    if basis.mean is not None:
        value = basis.mean.to(steps.device) + value
    return value if base is None else base + value


def _median_norm(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return lengths.median()


def _exact_product(along: Tensor, basis: Basis) -> Tensor:
    """Return coordinates times the basis, in steps: float32 [tokens, channels]."""
    unit = 2.0 ** -int(basis.exponents.max()) / UNITS
    return _product(along, basis.synthesis(along.device), unit)


_BASE_BITS = 10
_MAX_PREDICTION = EXACT_CODE * UNITS


def _predicted(basis: Basis, base: Tensor | None, scale: float) -> Tensor:
    """Return the prediction from the base in steps: float32 multiples of 1 / UNITS.

    A token's base is rounded to 11 bits of its largest value, so that all sums are sums of
    integers.

    Raises:
        BadFrame: The basis has no predictor, or there is no base.
    """
    if base is None or (forecast := basis.predictor_on(base.device)) is None:
        raise BadFrame("frame: a predicted change, with a basis without a predictor")
    octaves = torch.frexp(base.abs().amax(1))[1].clamp(min=-100)[:, None]
    rounded = (base * powers_of_two(_BASE_BITS - octaves)).round()
    sums = _product(rounded, forecast[0], 1.0)
    shifts = octaves - _BASE_BITS - forecast[1]
    # Devices round divisions differently, so the reciprocal of the scale is multiplied.
    units = (sums * powers_of_two(shifts) * float(np.float32(UNITS / scale))).round()
    return units.clamp(-_MAX_PREDICTION, _MAX_PREDICTION) / UNITS


def _product(x: Tensor, by: Tensor, unit: float) -> Tensor:
    """Return x @ by, rounded once to float32, with the same bits on every device.

    All products are multiples of `unit`, a power of two. If the sums of their magnitudes stay below
    2^23 units, float32 adds them exactly in any order; otherwise float64 does.
    """
    reach = (x.abs() @ by.abs().amax(1)).max().item()
    is_small = reach < unit * 2.0 ** (_EXACT_BITS - 1)
    if is_small and torch.get_float32_matmul_precision() == "highest":
        return x @ by
    return (x.double() @ by.double()).float()


# ---- the payload behind the name


def _written(
    along: Tensor, base: Tensor | None, scale: float, basis: Basis, kernels: Kernels
) -> tuple[bytes, Callable[[], Tensor]]:
    """Encode coordinates, float32 [tokens, directions]; return payload and decoded value."""
    if scale == 0:
        return _SILENT, lambda: torch.zeros_like(along)
    along, predicted, salt = _without_prediction(along, base, scale, basis)
    centre = _centre(along, scale)
    own = along - centre.float() * (scale / _FINER)
    codes, symbols, contexts, shifts = _coded(own, scale, salt, basis, kernels)
    rows = torch.cat((codes, centre)).view(-1, basis.directions)
    symbols = torch.cat((symbols, kernels.symbols(centre, 0)))
    contexts = torch.cat((contexts, torch.full_like(centre, _CENTRE, dtype=torch.uint8)))
    (counts,) = to_host(kernels.histogram(symbols, contexts, _CONTEXTS))
    tables, large = _Tables.of_counts(counts), np.zeros(0, "<i2")
    if counts[:, (FIRST_SYMBOL, LAST_SYMBOL)].any():
        large = to_host(rows[rows.abs() >= LARGEST_SYMBOL])[0].astype("<i2")
    head = _HEADER.pack(bfloat16_pattern(scale), predicted is not None, salt, len(large))
    stream = write_stream(symbols, contexts, tables.frequencies(), kernels)
    data = head + tables.to_bytes() + large.tobytes() + stream
    return data, lambda: _steps(rows, WideGrid(0, salt, shifts), predicted, kernels)


def _read_along(
    data: bytes,
    tokens: int,
    base: Tensor | None,
    basis: Basis,
    device: torch.device,
    kernels: Kernels,
) -> tuple[Tensor, float]:
    """Decode coordinates in steps, float32 [tokens, directions], and the step.

    Raises:
        BadFrame: The bytes are invalid.
    """
    shape = 1 + tokens, basis.directions
    at = _HEADER.size + _Tables.SIZE
    if len(data) < at:
        raise BadFrame(f"frame: expected {at} bytes or more, got {len(data)}")
    pattern, flags, salt, escapes = _HEADER.unpack_from(data)
    scale = bfloat16_value(pattern)
    if not MIN_SCALE <= scale <= MAX_SCALE or flags > 1 or escapes > shape[0] * shape[1]:
        raise BadFrame(f"frame: an invalid header, with a scale of {scale:.4g}")
    tables = _Tables.from_bytes(data[_HEADER.size : at])
    if len(data) < at + 2 * escapes:
        raise BadFrame(f"frame: expected {at + 2 * escapes} bytes or more, got {len(data)}")
    large = torch.from_numpy(np.frombuffer(data, "<i2", escapes, at).astype(np.int16))
    contexts = _contexts(basis, tokens, salt, device, kernels)
    stream, by = data[at + 2 * escapes :], tables.frequencies()
    symbols = read_stream(stream, contexts, by, kernels, _FLIP)
    shifts = kernels.shifts_of(symbols, lanes_for(len(symbols)))[: tokens * basis.directions]
    rows = read_escaped(symbols, large).view(shape)
    predicted = _predicted(basis, base, scale) if flags else None
    return _steps(rows, WideGrid(0, salt, shifts), predicted, kernels), scale


def _steps(rows: Tensor, grid: WideGrid, predicted: Tensor | None, kernels: Kernels) -> Tensor:
    """Return the decoded coordinates in steps, float32 [tokens, directions].

    Args:
        rows: int16 [tokens + 1, directions]; the last row is the mean over tokens.
        grid: Dither and trellis shifts of the codes.
        predicted: Prediction to add; None without one.
        kernels: Backend of the arithmetic.
    """
    own = _values(rows[:-1], grid, kernels) + rows[-1].float() / _FINER
    return own if predicted is None else own + predicted


def _without_prediction(
    along: Tensor, base: Tensor | None, scale: float, basis: Basis
) -> tuple[Tensor, Tensor | None, int]:
    """Return the prediction residual with the prediction and its salt, if that has less energy.

    Otherwise return the coordinates themselves with None for the prediction.
    """
    ways: list[tuple[Tensor, Tensor | None]] = [(along, None)]
    if basis.predictor is not None and base is not None:
        predicted = _predicted(basis, base, scale)
        ways.append((along - predicted * scale, predicted))
    looks = [look for way, _ in ways for look in (_energy(way), _salt(way))]
    found = to_host(*looks)
    energies, salts = found[::2], found[1::2]
    best = min(range(len(ways)), key=lambda way: float(energies[way]))
    return *ways[best], int(salts[best]) & 0xFFFF


def _energy(along: Tensor) -> Tensor:
    return (along - along.mean(0)).square().sum()


def _salt(along: Tensor) -> Tensor:
    """Return a number that differs between tensors: the sum of their bit patterns."""
    return along.contiguous().view(torch.int32).sum(dtype=torch.int64)


def _centre(along: Tensor, scale: float) -> Tensor:
    """Return the mean over tokens, int16 [directions], in a quarter of a token's step."""
    finer = along.mean(0) * (_FINER / scale)
    return finer.round().clamp(-EXACT_CODE, EXACT_CODE).to(torch.int16)


def _scale_for(step: float, peak: float) -> float:
    """Return the step as a bfloat16 within the range of codes and floats; 0 if all codes are 0."""
    if peak == 0:
        return 0.0
    bounded = min(max(step, MIN_SCALE * 4, peak / MAX_CODE), MAX_SCALE / 2)
    return nearest_bfloat16(bounded)


# ---- codes with subtractive dither: the error does not correlate with the value, so values below a
# step are not dropped at every visit


def _coded(
    along: Tensor, scale: float, salt: int, basis: Basis, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encode along a trellis with dither folded to positive values; see `Kernels.trellis_symbols`.

    The salt seeds the dither; it has 16 bits of the sum of the values' patterns.
    """
    rows = torch.zeros(len(along), dtype=torch.uint8, device=along.device)
    coding = Coding(rows, basis.classes_on(along.device), ALL_SLICES, 0)
    lanes = lanes_for((1 + len(along)) * basis.directions)
    return kernels.trellis_symbols(along, None, _scales(scale, along.device), salt, coding, lanes)


def _values(codes: Tensor, grid: WideGrid, kernels: Kernels) -> Tensor:
    """Return the values of dithered codes in steps, float32."""
    turned = kernels.flip_signs(codes.contiguous(), grid.seed or 0, grid.shifts)
    return kernels.dequantize(turned, None, _scales(1.0, codes.device), grid)


def _contexts(
    basis: Basis, tokens: int, salt: int, device: torch.device, kernels: Kernels
) -> Tensor:
    """Return the contexts of a frame's codes, uint8 [(1 + tokens) * directions]."""
    classes = basis.classes_on(device)
    each = classes.expand(tokens, -1).reshape(-1).contiguous()
    own = kernels.slice_contexts(each, salt, ALL_SLICES)
    return torch.cat((own, torch.full_like(classes, _CENTRE)))


def _scales(scale: float, device: torch.device) -> Scales:
    one = torch.ones(1, device=device)
    return Scales(one, one * scale)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Symbol tables: a spread for each class of directions and for the mean over tokens.

    Attributes:
        spreads: int64 [classes + 1]; numbers of `spread_of`.
        largest: int64 [classes + 1]; largest code that has a symbol.
    """

    spreads: Counts
    largest: Counts
    SIZE: ClassVar[int] = 2 * (CLASSES + 1)

    @staticmethod
    def of_counts(counts: Counts) -> _Tables:
        """Return the maximum-likelihood tables of a histogram [contexts, 256]."""
        by_class = counts[:_CENTRE].reshape(CLASSES, SLICES, SYMBOLS)[:, ::-1]
        centre = np.zeros((1, SLICES + 1, SYMBOLS), np.int64)
        centre[0, UNDITHERED] = counts[_CENTRE]
        spreads = np.concatenate((nearest_spreads(by_class), nearest_spreads(centre)))
        found = np.concatenate((by_class.sum(1), counts[_CENTRE : _CENTRE + 1]))
        sizes = np.where(found > 0, np.abs(np.arange(SYMBOLS) - SYMBOL_ZERO), 0)
        return _Tables(spreads, sizes.max(1))

    def frequencies(self) -> NDArray[np.int32]:
        """Return the frequencies of all contexts, int32 [contexts, 256]."""
        spreads, largest = (np.repeat(numbers, SLICES) for numbers in (self.spreads, self.largest))
        return frequencies(spreads, _SLICES_OF_CONTEXTS, largest)

    def to_bytes(self) -> bytes:
        """Encode two bytes for each class."""
        return np.stack((self.spreads, self.largest), 1).astype(np.uint8).tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> _Tables:
        """Decode the bytes of `to_bytes`.

        Raises:
            BadFrame: A number is out of its range.
        """
        numbers = np.frombuffer(data, np.uint8).reshape(-1, 2).astype(np.int64)
        if (numbers > (SPREADS - 1, LARGEST_SYMBOL)).any():
            raise BadFrame("frame: an invalid spread")
        return _Tables(numbers[:, 0], numbers[:, 1])


# `slice_contexts` counts from the farthest dither on, tables from the nearest.
_SLICES_OF_CONTEXTS = np.append(np.tile(np.arange(SLICES)[::-1], CLASSES), [UNDITHERED] * SLICES)
