"""`qkS`, `aqkS`: first activations and changes along the directions of a learned basis.

At constant quality: the step is S times the activation's own spread, whatever bits that takes.
Changes that follow few directions, as those of a model that is fine-tuned do, then take few bits:
what a sample's last visit lost has no direction, and mostly lies below the step.

A frame names the basis that it needs, and both ends hold it (`basis`). Payload: the name; if it is
`PLAIN`, what `wide` writes of the channels themselves; else a header, the classes of tokens if they
pay, the large codes, the symbols' tables and their stream.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import Codec, as_tensor, check_finite, checked_peak, peak_of
from swarm_ft.codec.basis import MAX_DIRECTIONS, NAME_BYTES, PLAIN, Basis, powers_of_two
from swarm_ft.codec.entropy import (
    CLASSES,
    MAX_CONTEXTS,
    MAX_SCALE,
    SYMBOLS,
    Tables,
    max_stream_bytes,
    read_stream,
    stream_bits,
    write_stream,
)
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import (
    EXACT_CODE,
    MAX_CODE,
    MIN_SCALE,
    UNITS,
    Kernels,
    Scales,
    WideGrid,
)
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.codec.wide import WideCodec, read_escaped, write_at_scale
from swarm_ft.codec.wide_plan import FIRST_SYMBOL, SYMBOL_ZERO, to_symbols
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor

_HEADER = struct.Struct("<HBBI")
_SILENT = _HEADER.pack(0, 0, 0, 0)
_CLASS_BITS = 3
_SHRINK, _BY_TOKEN, _FEW, _FORETOLD = 15, 16, 32, 64
"""In the header's flags: of the shrink, and whether tokens have classes, tables are of few numbers,
and codes are of what the forecast left."""
_MOST_FLAGS = 127
_DEAD_ZONE = 0.4
"""To begin with, codes are rounded up from 0.6."""
_BIT_SQUARES = 0.12
"""A bit is worth so much squared error, in steps: about the slope of rate and distortion there."""
_RARE, _LATEST = 1e-4, 0.9
_FINER = 4
"""Steps of what all tokens have in common, to one of their own: what is left of it is theirs."""
_EXACT_BITS = 24
_PACKING = ReferenceKernels()
Counts = NDArray[np.int64]


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
        lengths = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        return float(lengths.median()) / math.sqrt(x.shape[1]) * self.spec.number

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """See `Codec.max_payload_bytes`."""
        count = (1 + tokens) * min(channels, MAX_DIRECTIONS)
        coded = _HEADER.size + tokens + 2 * count + max_stream_bytes(count)
        return NAME_BYTES + max(coded, WideCodec(self.spec).max_payload_bytes(tokens, channels))

    def _write(self, x: Tensor, base: Tensor | None) -> bytes:
        kernels = self.kernels or kernels_for(x.device.type)
        basis, step = self.basis, self.step_of(x)
        if basis is None:
            return PLAIN + write_at_scale(self.spec, x, base, step, kernels)
        change = x if base is None else x - base
        if basis.mean is not None:
            change = change - basis.mean.to(x.device)
        checked_peak(peak_of(change))
        return basis.name + _written(change @ basis.analysis(x.device), base, step, basis, kernels)

    def _read(self, encoded: EncodedTensor, base: Tensor | None) -> Tensor:
        device = torch.device("cpu") if base is None else base.device
        kernels = self.kernels or kernels_for(device.type)
        name, payload = encoded.payload[:NAME_BYTES], encoded.payload[NAME_BYTES:]
        if name == PLAIN:
            plain = replace(encoded, payload=payload)
            return WideCodec(self.spec, kernels).decode(plain, base)
        basis = self.basis
        if basis is None or basis.name != name or basis.channels != encoded.channels:
            raise BadFrame(f"frame: it needs the basis {name.hex()}, which is not here")
        codes, scale, flags = _read_codes(payload, encoded.tokens, basis, device, kernels)
        along = kernels.dequantize(codes[1:].contiguous(), None, _UNIT, WideGrid(flags & _SHRINK))
        along += codes[0].float() / _FINER
        if flags & _FORETOLD:
            along += _foretold(basis, base, scale)
        # Three exact steps and two roundings, each in an operation of its own: nothing is fused.
        value = _exact_product(along, basis) * scale
        if basis.mean is not None:
            value = basis.mean.to(device) + value
        return check_finite(value if base is None else base + value)


_UNIT = Scales(torch.ones(1), torch.ones(1))


def _exact_product(along: Tensor, basis: Basis) -> Tensor:
    """`along` @ synthesis, rounded once: the same bits wherever it is computed.

    All factors are whole numbers over powers of two. Where no sum of magnitudes reaches 2^24 of
    their smallest unit every order of adding float32 numbers is exact; else float64 is.
    """
    directions = basis.synthesis(along.device)
    unit_bits = int(basis.exponents.max()) + UNITS.bit_length() - 1
    reach = (along.abs() @ directions.abs().amax(1)).max().item()
    is_small = reach * 2.0**unit_bits < 2.0 ** (_EXACT_BITS - 1)
    if is_small and torch.get_float32_matmul_precision() == "highest":
        return along @ directions
    return (along.double() @ directions.double()).float()


_BASE_BITS = 10
_MOST_FORETOLD = EXACT_CODE * UNITS


def _foretold(basis: Basis, base: Tensor | None, scale: float) -> Tensor:
    """What the basis' map makes of the base, in whole units of the scale: exact, as a float32.

    A token's base is rounded to 11 bits of its largest value, so that all sums are of whole
    numbers; the same bits everywhere.

    Raises:
        BadFrame: there is no map, or nothing to foretell from.
    """
    if basis.forecast is None or base is None:
        raise BadFrame("frame: a change that is foretold by a basis that foretells none")
    octaves = torch.frexp(base.abs().amax(1))[1].clamp(min=-100)[:, None]
    rounded = (base * powers_of_two(_BASE_BITS - octaves)).round()
    by = basis.forecast.coefficients.to(base.device).float()
    is_small = (rounded.abs() @ by.abs().amax(1)).max().item() < 2.0 ** (_EXACT_BITS - 1)
    if is_small and torch.get_float32_matmul_precision() == "highest":
        sums = rounded @ by
    else:
        sums = (rounded.double() @ by.double()).float()
    shifts = octaves - _BASE_BITS - basis.forecast.exponents.to(base.device).int()
    # Not divided by the scale: how that rounds differs among devices.
    units = (sums * powers_of_two(shifts) * float(np.float32(UNITS / scale))).round()
    return units.clamp(-_MOST_FORETOLD, _MOST_FORETOLD) / UNITS


# ---- what follows the name


def _written(
    along: Tensor, base: Tensor | None, step: float, basis: Basis, kernels: Kernels
) -> bytes:
    """The payload of values along the basis, float32 [tokens, directions]."""
    scale = _scale_for(step, checked_peak(peak_of(along)))
    if scale == 0:
        return _SILENT
    along, is_foretold = _beside_forecast(along, base, scale, basis)
    centre = _centre(along, scale)
    by_class = basis.classes.to(along.device)
    own = along - centre.float() * (scale / _FINER)
    codes, shrink = _quantized(own, scale, by_class, kernels)
    codes = torch.cat((centre[None], codes))
    symbols, upper = to_symbols(codes, 0)
    tokens, counts = _contexts_that_pay(symbols, codes, by_class, kernels)
    contexts = _contexts(tokens, by_class, len(codes))
    escaped = upper[upper.abs() >= SYMBOL_ZERO - FIRST_SYMBOL].cpu().numpy().astype("<i2")
    tables, written, is_few = _tables_that_pay(counts)
    pattern = int(torch.tensor(scale).to(torch.bfloat16).view(torch.int16)) & 0xFFFF
    flags = shrink | _BY_TOKEN * (tokens is not None) | _FEW * is_few | _FORETOLD * is_foretold
    head = _HEADER.pack(pattern, flags, len(counts), len(escaped))
    classes = b"" if tokens is None else _packed(tokens)
    stream = write_stream(symbols.reshape(-1), contexts, tables, kernels)
    return head + classes + escaped.tobytes() + written + stream


def _beside_forecast(
    along: Tensor, base: Tensor | None, scale: float, basis: Basis
) -> tuple[Tensor, bool]:
    """What the forecast leaves of values, where that is less; and whether it is."""
    if basis.forecast is None or base is None:
        return along, False
    left = along - _foretold(basis, base, scale) * scale
    is_less = _energy(left) < _energy(along)
    return (left, True) if is_less else (along, False)


def _energy(along: Tensor) -> float:
    return float((along - along.mean(0)).square().sum())


def _centre(along: Tensor, scale: float) -> Tensor:
    """What all tokens have in common, int16 [directions], in finer steps than their own codes."""
    finer = along.mean(0) * (_FINER / scale)
    return finer.round().clamp(-EXACT_CODE, EXACT_CODE).to(torch.int16)


def _scale_for(step: float, peak: float) -> float:
    """A bfloat16 that codes and floats allow; 0 where all codes would be."""
    if peak == 0:
        return 0.0
    bounded = min(max(step, MIN_SCALE * 4, peak / MAX_CODE), MAX_SCALE / 2)
    return torch.tensor(bounded).to(torch.bfloat16).item()


def _quantized(
    along: Tensor, scale: float, by_class: Tensor, kernels: Kernels
) -> tuple[Tensor, int]:
    """Codes, int16, and their shrink: the nearest, or one nearer to zero that takes fewer bits."""
    sizes = along.abs() / scale
    to_one, to_more = _thresholds((sizes + _DEAD_ZONE).floor(), by_class)
    later = torch.where(sizes < 1, to_one, to_more) - 0.5
    narrowed = along.sign() * (sizes - later).clamp(min=0)
    one = torch.ones(1, device=along.device)
    codes = kernels.quantize(narrowed, None, Scales(one, one), WideGrid())
    found = codes.abs().float()
    few = (found > 0) & (found < 64)
    if not bool(few.any()):
        return codes, 0
    offset = (found - sizes)[few].mean().item()
    return codes, min(max(round(offset * UNITS), 0), 15)


def _thresholds(sizes: Tensor, by_class: Tensor) -> tuple[Tensor, Tensor]:
    """From which fraction on codes are rounded up to one, and to more, by direction.

    Where the squared error, in steps, and a bit's worth of them (a Lagrangian of the rate) balance;
    what a code more takes follows from how often its class has some.
    """
    classes = torch.nn.functional.one_hot(by_class.long(), CLASSES).float()
    some = (sizes > 0).float().mean(0) @ classes / classes.sum(0).clamp(min=1)
    beyond = (sizes - 1).clamp(min=0).mean(0) @ classes / classes.sum(0).clamp(min=1)
    some = some.clamp(_RARE, 1 - _RARE)
    ratio = (beyond / (beyond + some)).clamp(_RARE, 1 - _RARE)
    bits_of_one = torch.log2(2 * (1 - some) / (some * (1 - ratio)))
    bits_of_more = -torch.log2(ratio)
    both = torch.stack((bits_of_one, bits_of_more)) * (_BIT_SQUARES / 2)
    one, more = (both + 0.5).clamp(0.5, _LATEST) @ classes.T
    return one, more


def _contexts_that_pay(
    symbols: Tensor, codes: Tensor, by_class: Tensor, kernels: Kernels
) -> tuple[Tensor | None, Counts]:
    """Classes of tokens, uint8, if they save more than they take; and the counts by context."""
    plain = _counts(symbols, _contexts(None, by_class, len(codes)), kernels)
    sizes = codes[1:].abs().double().mean(1)
    octaves = torch.log2(sizes.clamp(min=1 / codes.shape[1]))
    tokens = ((octaves - octaves.median()) * 2 + CLASSES // 2).round().clamp(0, CLASSES - 1)
    tokens = (tokens - tokens.min()).to(torch.uint8)
    by_both = _counts(symbols, _contexts(tokens, by_class, len(codes)), kernels)
    cost = len(tokens) * _CLASS_BITS
    if _size_bits(by_both) + cost < _size_bits(plain):
        return tokens, by_both
    return None, plain


def _size_bits(counts: Counts) -> float:
    tables, written, _ = _tables_that_pay(counts)
    return stream_bits(counts, tables) + 8 * len(written)


def _contexts(tokens: Tensor | None, by_class: Tensor, count: int) -> Tensor:
    """The context of every code, uint8 [rows * directions]: the first row has one of its own."""
    rows = by_class[None, :].expand(count, -1).clone()
    if tokens is not None:
        rows[1:] += tokens[:, None]
    rows[0] = int(rows.max()) + 1
    return rows.reshape(-1)


def _counts(symbols: Tensor, contexts: Tensor, kernels: Kernels) -> Counts:
    number = int(contexts.max()) + 1
    found: Counts = kernels.histogram(symbols.reshape(-1), contexts, number).cpu().numpy()
    return found


def _packed(classes: Tensor) -> bytes:
    return _PACKING.pack(classes.cpu(), _CLASS_BITS).numpy().tobytes()


def _read_codes(
    data: bytes, tokens: int, basis: Basis, device: torch.device, kernels: Kernels
) -> tuple[Tensor, float, int]:
    """Codes, int16 [1 + tokens, directions], their scale and the flags.

    Raises:
        BadFrame: no encoder writes that.
    """
    shape = 1 + tokens, basis.directions
    if len(data) < _HEADER.size:
        raise BadFrame(f"frame: expected a header of {_HEADER.size} bytes, got {len(data)}")
    pattern, flags, contexts, escapes = _HEADER.unpack_from(data)
    if data == _SILENT:
        return torch.zeros(shape, dtype=torch.int16, device=device), 0.0, 0
    scale = torch.tensor(pattern, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).item()
    if not MIN_SCALE <= scale <= MAX_SCALE or flags > _MOST_FLAGS or escapes > shape[0] * shape[1]:
        raise BadFrame(f"frame: a header that no encoder writes, with a scale of {scale:.4g}")
    by_token, at = None, _HEADER.size
    if flags & _BY_TOKEN:
        size = -(-tokens // 8) * _CLASS_BITS
        _check_size(data, at + size)
        by_token = _PACKING.unpack(as_tensor(data[at : at + size]), tokens, _CLASS_BITS).to(device)
        at += size
    _check_size(data, at + 2 * escapes)
    large = np.frombuffer(data, "<i2", escapes, at).astype(np.int16)
    at += 2 * escapes
    read = Geometric.from_bytes if flags & _FEW else Tables.from_bytes
    tables, size = read(data[at:], _checked_contexts(contexts))
    values = _contexts(by_token, basis.classes.to(device), shape[0])
    symbols = read_stream(data[at + size :], values, tables, kernels)
    return read_escaped(symbols, torch.from_numpy(large)).view(shape), scale, flags


def _checked_contexts(contexts: int) -> int:
    if not 1 <= contexts <= MAX_CONTEXTS:
        raise BadFrame(f"frame: expected 1 to {MAX_CONTEXTS} contexts, got {contexts}")
    return contexts


def _check_size(data: bytes, expected: int) -> None:
    if len(data) < expected:
        raise BadFrame(f"frame: expected {expected} bytes or more, got {len(data)}")


# ---- symbol tables in three bytes: a two-sided geometric distribution with a weight of its own for
# zero. Small frames cannot afford more.

_TABLE_BYTES = 3
_UNUSED, _MOST, _LEVEL = 255, 127, 64
_TOP = 52
"""The weight of zero, in quarters of an octave, as `Tables` has them."""
_SLOPES = np.array([(8 + j % 8) << (j // 8) for j in range(80)], np.int64)
"""How much a code's weight falls from one size to the next, in 1/256 of a quarter of an octave."""


@dataclass(frozen=True, slots=True)
class Geometric:
    """Tables of a few numbers each.

    Attributes:
        numbers: int64 [contexts, 3]: the largest size of a code, how far its weight falls from zero
            to one (above 64) or rises, and the slope from size to size; 255 for an unused context.
    """

    numbers: Counts

    @staticmethod
    def of_counts(counts: Counts) -> Geometric:
        """The likeliest for counts of shape [contexts, 256]."""
        return Geometric(np.array([_fit(row) for row in counts], np.int64))

    @property
    def tables(self) -> Tables:
        """Whole-number arithmetic: the same on every machine."""
        return Tables(np.stack([_weights(*row) for row in self.numbers.tolist()]))

    def to_bytes(self) -> bytes:
        """Three bytes a context."""
        return self.numbers.astype(np.uint8).tobytes()

    @staticmethod
    def from_bytes(data: bytes, contexts: int) -> tuple[Tables, int]:
        """The tables that `to_bytes` wrote at the beginning of `data`, and how many bytes it took.

        Raises:
            BadFrame: it is cut short, or a number is out of its range.
        """
        size = _TABLE_BYTES * contexts
        _check_size(data, size)
        numbers = np.frombuffer(data, np.uint8, size).reshape(-1, _TABLE_BYTES).astype(np.int64)
        used = numbers[numbers[:, 0] != _UNUSED]
        if (used > (_MOST, _MOST, len(_SLOPES) - 1)).any():
            raise BadFrame("frame: a table of symbols that no encoder writes")
        return Geometric(numbers).tables, size


def _tables_that_pay(counts: Counts) -> tuple[Tables, bytes, bool]:
    """Tables, how they are written, and whether that is in few numbers."""
    few, whole = Geometric.of_counts(counts), Tables.of_counts(counts)
    tables, written = few.tables, whole.to_bytes()
    saved_bits = stream_bits(counts, tables) - stream_bits(counts, whole)
    if saved_bits <= 8 * (len(written) - _TABLE_BYTES * len(counts)):
        return tables, few.to_bytes(), True
    return whole, written, False


def _fit(counts: Counts) -> tuple[int, int, int]:
    sizes = counts[SYMBOL_ZERO:].copy()
    sizes[1:] += counts[SYMBOL_ZERO - 1 : 0 : -1]
    some = int(sizes[1:].sum())
    if some == 0:
        return (0 if sizes[0] else _UNUSED), 0, 0
    beyond = float(sizes[1:] @ np.arange(len(sizes) - 1)) / some
    ratio = min(max(beyond / (1 + beyond), 2.0**-15), 1 - 2.0**-9)
    slope = int(np.abs(np.log(_SLOPES / 256) - math.log(-4 * math.log2(ratio))).argmin())
    fall = round(4 * math.log2(max(int(sizes[0]), 0.5) / (some / 2 * (1 - ratio))))
    return int(np.flatnonzero(sizes).max()), min(max(fall + _LEVEL, 0), _MOST), slope


def _weights(largest: int, fall: int, slope: int) -> NDArray[np.uint8]:
    weights = np.zeros(SYMBOLS, np.uint8)
    if largest == _UNUSED:
        return weights
    down = np.arange(largest, dtype=np.int64) * _SLOPES[slope] >> 8
    sizes = np.maximum(_TOP - max(fall - _LEVEL, 0) - down, 1).astype(np.uint8)
    weights[SYMBOL_ZERO] = max(_TOP - max(_LEVEL - fall, 0), 1)
    weights[SYMBOL_ZERO + 1 : SYMBOL_ZERO + 1 + largest] = sizes
    weights[SYMBOL_ZERO - largest : SYMBOL_ZERO] = sizes[::-1]
    return weights
