"""`qkS`, `aqkS`: first activations and changes along the directions of a learned basis.

At constant quality: the step is S times the activation's own spread, whatever bits that takes.
Changes that follow few directions, as those of a model that is fine-tuned do, then take few bits:
what a sample's last visit lost has no direction, and mostly lies below the step. All is dithered:
an error that is the same at every visit costs more than a larger one that is not.

A frame names the basis that it needs, and both ends hold it (`basis`). Payload: the name; if it is
`PLAIN`, what `wide` writes of the channels themselves; else a header, a spread for each class of
directions, the large codes, and the stream of symbols.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
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
    check_finite,
    checked_peak,
    nearest_bfloat16,
    of_bfloat16,
    peak_there,
    to_host,
)
from swarm_ft.codec.basis import MAX_DIRECTIONS, NAME_BYTES, PLAIN, Basis, powers_of_two
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
from swarm_ft.codec.spread_tables import (
    SLICES,
    SPREADS,
    UNDITHERED,
    frequencies,
    nearest_spreads,
)
from swarm_ft.codec.wide import WideCodec, read_escaped, write_at_scale
from swarm_ft.codec.wide_plan import FIRST_SYMBOL, LAST_SYMBOL
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor

Counts = NDArray[np.int64]

_HEADER = struct.Struct("<HBHI")
_SILENT = _HEADER.pack(0, 0, 0, 0)
_FINER = 4
"""Steps of what all tokens have in common, to one of their own: what is left of it is theirs."""
_CENTRE = CLASSES * SLICES
"""The context of what they have in common, behind those of each class and slice of the dither."""
_CONTEXTS = _CENTRE + SLICES
"""As a trellis tells contexts apart that are as likely here."""
_FLIP = flip_of(ALL_SLICES)
_EXACT_BITS = 24


@dataclass(frozen=True, slots=True)
class DirectionalCodec(Codec):
    """See the module's docstring.

    Attributes:
        kernels: the backend; by default the one for the tensor's device.
        basis: what is encoded along, and what a frame that names it is decoded along; None if
            there is none yet: then channels are coded by themselves.
    """

    kernels: Kernels | None = None
    basis: Basis | None = None

    def along(self, basis: Basis | None) -> DirectionalCodec:
        """The same codec with that basis."""
        return replace(self, basis=basis)

    def step_of(self, x: Tensor) -> float:
        """The step in which x, [tokens, channels], or its change, is coded.

        The spread is that of a middling token: a few tokens with massive activations do not
        coarsen all others.
        """
        return self._step(_middling_length(x).item(), x.shape[1])

    def _step(self, length: float, channels: int) -> float:
        return length / math.sqrt(channels) * self.spec.number

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
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
        looks = to_host(_middling_length(x), peak_there(change), peak_there(along))
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
            raise BadFrame(f"frame: it needs the basis {name.hex()}, which is not here")
        if payload == _SILENT:
            along, scale = torch.zeros(encoded.tokens, basis.directions, device=device), 0.0
        else:
            along, scale = _read_along(payload, encoded.tokens, base, basis, device, kernels)
        return check_finite(_value(along, scale, base, basis))


def _value(steps: Tensor, scale: float, base: Tensor | None, basis: Basis) -> Tensor:
    """What so many steps of the scale along the basis are, float32 [tokens, channels]."""
    # Three exact steps and two roundings, each in an operation of its own: nothing is fused.
    value = _exact_product(steps, basis) * scale
    if basis.mean is not None:
        value = basis.mean.to(steps.device) + value
    return value if base is None else base + value


def _middling_length(x: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return lengths.median()


def _exact_product(along: Tensor, basis: Basis) -> Tensor:
    """Values that are so many steps `along` the basis, in steps: float32 [tokens, channels]."""
    unit = 2.0 ** -int(basis.exponents.max()) / UNITS
    return _product(along, basis.synthesis(along.device), unit)


_BASE_BITS = 10
_MOST_FORETOLD = EXACT_CODE * UNITS


def _foretold(basis: Basis, base: Tensor | None, scale: float) -> Tensor:
    """What the basis' map makes of the base, in steps: whole units of them, float32.

    A token's base is rounded to 11 bits of its largest value, so that all sums are of whole
    numbers.

    Raises:
        BadFrame: there is no map, or nothing to foretell from.
    """
    if base is None or (forecast := basis.forecast_on(base.device)) is None:
        raise BadFrame("frame: a change that is foretold by a basis that foretells none")
    octaves = torch.frexp(base.abs().amax(1))[1].clamp(min=-100)[:, None]
    rounded = (base * powers_of_two(_BASE_BITS - octaves)).round()
    sums = _product(rounded, forecast[0], 1.0)
    shifts = octaves - _BASE_BITS - forecast[1]
    # Not divided by the scale: how that rounds differs among devices.
    units = (sums * powers_of_two(shifts) * float(np.float32(UNITS / scale))).round()
    return units.clamp(-_MOST_FORETOLD, _MOST_FORETOLD) / UNITS


def _product(x: Tensor, by: Tensor, unit: float) -> Tensor:
    """X @ by, rounded once to float32: the same bits wherever it is computed.

    All products are whole multiples of the unit, a power of two. Where sums of their magnitudes
    stay below 2^23 of it, float32 numbers add up exactly in any order; else float64 ones do.
    """
    reach = (x.abs() @ by.abs().amax(1)).max().item()
    is_small = reach < unit * 2.0 ** (_EXACT_BITS - 1)
    if is_small and torch.get_float32_matmul_precision() == "highest":
        return x @ by
    return (x.double() @ by.double()).float()


# ---- what follows the name


def _written(
    along: Tensor, base: Tensor | None, scale: float, basis: Basis, kernels: Kernels
) -> tuple[bytes, Callable[[], Tensor]]:
    """Of values along the basis, float32 [tokens, directions]: the payload, and them in steps."""
    if scale == 0:
        return _SILENT, lambda: torch.zeros_like(along)
    along, foretold, salt = _beside_forecast(along, base, scale, basis)
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
    head = _HEADER.pack(bfloat16_pattern(scale), foretold is not None, salt, len(large))
    stream = write_stream(symbols, contexts, tables.frequencies(), kernels)
    data = head + tables.to_bytes() + large.tobytes() + stream
    return data, lambda: _steps(rows, WideGrid(0, salt, shifts), foretold, kernels)


def _read_along(
    data: bytes,
    tokens: int,
    base: Tensor | None,
    basis: Basis,
    device: torch.device,
    kernels: Kernels,
) -> tuple[Tensor, float]:
    """Values in steps, float32 [tokens, directions], and the step.

    Raises:
        BadFrame: no encoder writes that.
    """
    shape = 1 + tokens, basis.directions
    at = _HEADER.size + _Tables.SIZE
    if len(data) < at:
        raise BadFrame(f"frame: expected {at} bytes or more, got {len(data)}")
    pattern, flags, salt, escapes = _HEADER.unpack_from(data)
    scale = of_bfloat16(pattern)
    if not MIN_SCALE <= scale <= MAX_SCALE or flags > 1 or escapes > shape[0] * shape[1]:
        raise BadFrame(f"frame: a header that no encoder writes, with a scale of {scale:.4g}")
    tables = _Tables.from_bytes(data[_HEADER.size : at])
    if len(data) < at + 2 * escapes:
        raise BadFrame(f"frame: expected {at + 2 * escapes} bytes or more, got {len(data)}")
    large = torch.from_numpy(np.frombuffer(data, "<i2", escapes, at).astype(np.int16))
    contexts = _contexts(basis, tokens, salt, device, kernels)
    stream, by = data[at + 2 * escapes :], tables.frequencies()
    symbols = read_stream(stream, contexts, by, kernels, _FLIP)
    shifts = kernels.shifts_of(symbols, lanes_for(len(symbols)))[: tokens * basis.directions]
    rows = read_escaped(symbols, large).view(shape)
    foretold = _foretold(basis, base, scale) if flags else None
    return _steps(rows, WideGrid(0, salt, shifts), foretold, kernels), scale


def _steps(rows: Tensor, grid: WideGrid, foretold: Tensor | None, kernels: Kernels) -> Tensor:
    """What codes stand for, in steps, float32 [tokens, directions].

    Args:
        rows: int16 [tokens + 1, directions], last what all tokens have in common.
        foretold: what was left out of them.
    """
    own = _values(rows[:-1], grid, kernels) + rows[-1].float() / _FINER
    return own if foretold is None else own + foretold


def _beside_forecast(
    along: Tensor, base: Tensor | None, scale: float, basis: Basis
) -> tuple[Tensor, Tensor | None, int]:
    """What the forecast leaves of values, where that is less; the forecast then; and the salt."""
    ways: list[tuple[Tensor, Tensor | None]] = [(along, None)]
    if basis.forecast is not None and base is not None:
        foretold = _foretold(basis, base, scale)
        ways.append((along - foretold * scale, foretold))
    looks = [look for way, _ in ways for look in (_energy(way), _salt(way))]
    found = to_host(*looks)
    energies, salts = found[::2], found[1::2]
    best = min(range(len(ways)), key=lambda way: float(energies[way]))
    return *ways[best], int(salts[best]) & 0xFFFF


def _energy(along: Tensor) -> Tensor:
    return (along - along.mean(0)).square().sum()


def _salt(along: Tensor) -> Tensor:
    """Another number for other values: the sum of their patterns."""
    return along.contiguous().view(torch.int32).sum(dtype=torch.int64)


def _centre(along: Tensor, scale: float) -> Tensor:
    """What all tokens have in common, int16 [directions], in finer steps than their own codes."""
    finer = along.mean(0) * (_FINER / scale)
    return finer.round().clamp(-EXACT_CODE, EXACT_CODE).to(torch.int16)


def _scale_for(step: float, peak: float) -> float:
    """A bfloat16 that codes and floats allow; 0 where all codes would be."""
    if peak == 0:
        return 0.0
    bounded = min(max(step, MIN_SCALE * 4, peak / MAX_CODE), MAX_SCALE / 2)
    return nearest_bfloat16(bounded)


# ---- codes with subtractive dither: no error correlates with the value, so what is too small for a
# code is not left out at every visit alike


def _coded(
    along: Tensor, scale: float, salt: int, basis: Basis, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes along a trellis, each turned so that its dither is positive; see `trellis_symbols`.

    Both ends know the salt, which is another for other values: it has 16 bits of their sum.
    """
    rows = torch.zeros(len(along), dtype=torch.uint8, device=along.device)
    coding = Coding(rows, basis.classes_on(along.device), ALL_SLICES, 0)
    lanes = lanes_for((1 + len(along)) * basis.directions)
    return kernels.trellis_symbols(along, None, _scales(scale, along.device), salt, coding, lanes)


def _values(codes: Tensor, grid: WideGrid, kernels: Kernels) -> Tensor:
    """What such codes stand for, in steps, float32."""
    turned = kernels.turn(codes.contiguous(), grid.seed or 0, grid.shifts)
    return kernels.dequantize(turned, None, _scales(1.0, codes.device), grid)


def _contexts(
    basis: Basis, tokens: int, salt: int, device: torch.device, kernels: Kernels
) -> Tensor:
    """Of a frame's codes, uint8 [(1 + tokens) * directions]."""
    classes = basis.classes_on(device)
    each = classes.expand(tokens, -1).reshape(-1).contiguous()
    own = kernels.slice_contexts(each, salt, ALL_SLICES)
    return torch.cat((own, torch.full_like(classes, _CENTRE)))


def _scales(scale: float, device: torch.device) -> Scales:
    one = torch.ones(1, device=device)
    return Scales(one, one * scale)


@dataclass(frozen=True, slots=True)
class _Tables:
    """The spread of each class of directions, and of what tokens have in common.

    Attributes:
        spreads: int64 [classes and one], numbers of `spread_of`.
        largest: int64 [classes and one]: no code with a symbol is larger.
    """

    spreads: Counts
    largest: Counts
    SIZE: ClassVar[int] = 2 * (CLASSES + 1)

    @staticmethod
    def of_counts(counts: Counts) -> _Tables:
        """The likeliest for a histogram, [contexts, 256]."""
        by_class = counts[:_CENTRE].reshape(CLASSES, SLICES, SYMBOLS)[:, ::-1]
        centre = np.zeros((1, SLICES + 1, SYMBOLS), np.int64)
        centre[0, UNDITHERED] = counts[_CENTRE]
        spreads = np.concatenate((nearest_spreads(by_class), nearest_spreads(centre)))
        found = np.concatenate((by_class.sum(1), counts[_CENTRE : _CENTRE + 1]))
        sizes = np.where(found > 0, np.abs(np.arange(SYMBOLS) - SYMBOL_ZERO), 0)
        return _Tables(spreads, sizes.max(1))

    def frequencies(self) -> NDArray[np.int32]:
        """Of all contexts, int32 [contexts, 256]."""
        spreads, largest = (np.repeat(numbers, SLICES) for numbers in (self.spreads, self.largest))
        return frequencies(spreads, _SLICES_OF_CONTEXTS, largest)

    def to_bytes(self) -> bytes:
        """Two bytes each."""
        return np.stack((self.spreads, self.largest), 1).astype(np.uint8).tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> _Tables:
        """What `to_bytes` wrote.

        Raises:
            BadFrame: a number is out of its range.
        """
        numbers = np.frombuffer(data, np.uint8).reshape(-1, 2).astype(np.int64)
        if (numbers > (SPREADS - 1, LARGEST_SYMBOL)).any():
            raise BadFrame("frame: a spread that no encoder writes")
        return _Tables(numbers[:, 0], numbers[:, 1])


# `slice_contexts` counts from the farthest dither on, tables from the nearest.
_SLICES_OF_CONTEXTS = np.append(np.tile(np.arange(SLICES)[::-1], CLASSES), [UNDITHERED] * SLICES)
