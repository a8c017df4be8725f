"""Gain-shape vector quantisation of tokens' gradients, before a codec of the residual.

A token's gradient depends mostly on its target through the head's weights. Targets are few and
recur in unseen samples: the nearest of a thousand directions holds four fifths of the energy. The
sender of gradients learns these directions from some steps by spherical k-means (Dhillon and Modha
2001), and sends them to the receiver as part of a `basis`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    packed_numbers,
    peak_tensor,
    to_host,
    unpacked_numbers,
)
from swarm_ft.codec.basis import (
    MOST_ENTRY_BITS,
    Basis,
    Codebook,
    with_codebook,
)
from swarm_ft.codec.entropy import MAX_SCALE
from swarm_ft.codec.feedback import shrunk_estimate
from swarm_ft.codec.kernels.base import MIN_SCALE, packed_bytes
from swarm_ft.codec.side_info import NAME_BYTES, PLAIN, Learning, Observation, SideInfo
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.wide import WideCodec
from swarm_ft.errors import BadFrame

# ---- learning one

_ROWS_AN_ENTRY = 4
"""Minimum number of rows for each entry; an entry of fewer is mostly noise."""
_LEAST_ENTRIES = 16
LEAST_ROWS = _LEAST_ENTRIES * _ROWS_AN_ENTRY
"""Minimum number of rows to learn a codebook from."""
_LEARNING = Learning(tokens_a_channel=256, early_every=2, gathers=True, least_rows=LEAST_ROWS)
_ROUNDS = 8
_STEP = 1.0
"""Rounding step of an entry's coordinates, relative to the root mean square of its channels.
Rounding then costs less than a tenth of an entry's energy, and tokens differ from entries by a
fifth."""
_TINY = 1e-30


def learn_codebook(rows: Sequence[Tensor]) -> Basis | None:
    """Learn a codebook of the directions of rows.

    Args:
        rows: Samples' rows, float32 [n, channels] each: gradients of some tokens.

    Returns:
        A basis with the codebook; None with too few rows, or if their norms are not finite.
    """
    all_rows = torch.cat(list(rows))
    lengths = all_rows.norm(dim=1)
    if not bool(lengths.isfinite().all()):
        return None
    all_rows, lengths = all_rows[lengths > _TINY], lengths[lengths > _TINY]
    count = min(1 << MOST_ENTRY_BITS, _power_of_two(len(all_rows) // _ROWS_AN_ENTRY))
    if count < _LEAST_ENTRIES:
        return None
    entries = _entries(all_rows / lengths[:, None], lengths, count)
    return with_codebook(entries, _STEP / math.sqrt(all_rows.shape[1]))


def _power_of_two(most: int) -> int:
    return 1 << most.bit_length() >> 1


def _entries(directions: Tensor, weights: Tensor, count: int) -> Tensor:
    """Return unit vectors [count, channels]: weighted means of clusters (spherical k-means)."""
    drawn = torch.randperm(len(directions), generator=torch.Generator().manual_seed(0))
    found = directions[drawn[:count]].clone()
    weighted = directions * weights[:, None]
    for _ in range(_ROUNDS):
        nearest = (directions @ found.T).argmax(1)
        sums = torch.zeros_like(found).index_add_(0, nearest, weighted)
        lengths = sums.norm(dim=1, keepdim=True)
        found = torch.where(lengths > _TINY, sums / lengths.clamp(min=_TINY), found)
    return found


# ---- coding with one

SIZE_BITS = 4
_LEVELS = 1 << SIZE_BITS
_NOTHING = _LEVELS - 1
_HALF_OCTAVE = 181 / 256  # a bfloat16: times a scale it is exact
_SIZES = torch.tensor(
    [(_HALF_OCTAVE if k % 2 else 1.0) / (1 << k // 2) for k in range(_NOTHING)] + [0.0]
)
"""Levels of a token's gain relative to the frame's largest, half an octave each; the last is zero.
"""
_SCALE = struct.Struct("<H")
_LEAST_SCALE = MIN_SCALE * 2.0 ** (_LEVELS // 2)
_LOW_BITS = 8
"""Lower bits of an entry's number, which have a byte plane of their own; the upper bits share one
with the gain."""


@dataclass(frozen=True, slots=True)
class CodebookCodec(Codec):
    """Codec s e + C(g - s e) of a gradient g, with an entry e and a gain s for each token.

    Layout: name of the basis, or `PLAIN` followed by C's payload of g; the largest gain as
    bfloat16; the packed numbers of entries and gains; C's payload of the residual.

    Attributes:
        inner: Codec C. Its spec is that of this codec without the codebook.
        basis: Basis with the codebook; None if there is none yet.
    """

    inner: Codec
    basis: Basis | None = None

    @property
    def learning(self) -> Learning:
        """Rule by which the codec learns codebooks."""
        return _LEARNING

    def with_side_info(self, info: SideInfo | None) -> CodebookCodec:
        """Return the codec with the codebook of a basis."""
        return replace(self, basis=info if isinstance(info, Basis) else None)

    def learn(self, seen: Sequence[Observation]) -> Basis | None:
        """Return a codebook for gradients like these."""
        return learn_codebook([one.rows.float() for one in seen if one.rows is not None])

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of the payload's size."""
        entries = packed_bytes(tokens, MOST_ENTRY_BITS + SIZE_BITS)
        inner = self.inner.max_payload_bytes(tokens, channels)
        return NAME_BYTES + _SCALE.size + entries + inner

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        basis = self.basis
        if basis is None or basis.codebook is None:
            plain = self.inner.write(x)
            return replace(plain, data=PLAIN + plain.data)
        entries = basis.entries(x.device)
        numbers, sizes = _best_entries(x, entries)
        largest = sizes.max().clamp(_LEAST_SCALE, MAX_SCALE / 2).to(torch.bfloat16).float()
        levels = _levels(sizes, largest)
        peak, top, entry_numbers, gains = to_host(peak_tensor(x), largest, numbers, levels)
        checked_peak(float(peak))
        share = _share(entries, numbers, levels, scale := float(top))
        inner = self._beside(basis.codebook).write(x - share)
        head = basis.name + _SCALE.pack(bfloat16_pattern(scale))
        data = head + _packed(entry_numbers, gains, basis.codebook.bits) + inner.data
        return Payload(data, lambda: share + inner.value())

    def _beside(self, codebook: Codebook) -> Codec:
        """Return C with a rate that includes the bits of entries and gains."""
        if not isinstance(self.inner, WideCodec):
            return self.inner
        return replace(self.inner, token_bits=codebook.bits + SIZE_BITS)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        name, payload = encoded.payload[:NAME_BYTES], encoded.payload[NAME_BYTES:]
        inner = replace(encoded, codec=self.inner.spec, payload=payload)
        if name == PLAIN:
            return self.inner.decode(inner, device=device)
        basis = self.basis
        if basis is None or basis.name != name or basis.channels != encoded.channels:
            raise BadFrame(f"frame: it needs the basis {name.hex()}, which this end does not have")
        share, at = _read_share(payload, encoded.tokens, basis, device)
        left = self.inner.decode(replace(inner, payload=payload[at:]), device=device)
        return check_finite(share + left)

    def next_base(
        self, encoded: EncodedTensor, value: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return the entries' part plus the shrunk residual; see `Codec.kept`."""
        name, payload = encoded.payload[:NAME_BYTES], encoded.payload[NAME_BYTES:]
        if name == PLAIN or self.basis is None:
            return value
        share, at = _read_share(payload, encoded.tokens, self.basis, value.device)
        return shrunk_estimate(self.inner.spec, payload[at:], share, value)


def _best_entries(x: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best entry of each token and its gain: int64 and float32 [tokens]."""
    lengths = entries.norm(dim=1).clamp(min=_TINY)
    best, numbers = (x @ (entries / lengths[:, None]).T).max(1)
    return numbers, best / lengths[numbers]


def _levels(sizes: Tensor, largest: Tensor) -> Tensor:
    """Return the nearest level of each gain, uint8 [tokens]."""
    octaves = torch.log2(largest / sizes.clamp(min=MIN_SCALE))
    return (2 * octaves).round().clamp(0, _NOTHING).to(torch.uint8)


def _share(entries: Tensor, numbers: Tensor, levels: Tensor, scale: float) -> Tensor:
    """Return entries times gains, float32 [tokens, channels]; each product is rounded once."""
    sizes = _SIZES.to(levels.device)[levels.int()] * scale
    return entries[numbers] * sizes[:, None]


def _read_share(
    payload: bytes, tokens: int, basis: Basis, device: torch.device
) -> tuple[Tensor, int]:
    """Decode the entries' part, and return it with the offset of the residual's payload.

    Raises:
        BadFrame: The bytes are invalid.
    """
    codebook = basis.codebook
    if codebook is None:
        raise BadFrame(f"frame: the basis {basis.name.hex()} has no codebook")
    at = _SCALE.size + packed_bytes(tokens, codebook.bits + SIZE_BITS)
    if len(payload) < at:
        raise BadFrame(f"frame: expected {at} bytes or more, got {len(payload)}")
    scale = bfloat16_value(_SCALE.unpack_from(payload)[0])
    if not MIN_SCALE <= scale <= MAX_SCALE:
        raise BadFrame(f"frame: sizes up to {scale:.4g}")
    numbers, levels = _unpacked(payload[_SCALE.size : at], tokens, codebook.bits)
    return _share(basis.entries(device), numbers.to(device), levels.to(device), scale), at


def _widths(bits: int) -> tuple[int, int]:
    return min(bits, _LOW_BITS), max(bits - _LOW_BITS, 0) + SIZE_BITS


def _packed(numbers: NDArray[np.int64], levels: NDArray[np.uint8], bits: int) -> bytes:
    """Pack numbers below 2^bits and levels: lower bits first, then upper bits above the levels."""
    low = (numbers & 255).astype(np.uint8)
    high = ((numbers >> _LOW_BITS) << SIZE_BITS | levels).astype(np.uint8)
    parts = zip((low, high), _widths(bits), strict=True)
    return b"".join(packed_numbers(part, width) for part, width in parts)


def _unpacked(data: bytes, tokens: int, bits: int) -> tuple[Tensor, Tensor]:
    """Unpack the numbers, int64 [tokens], and levels, uint8 [tokens], of `_packed`."""
    widths = _widths(bits)
    split = packed_bytes(tokens, widths[0])
    low, high = (
        torch.from_numpy(unpacked_numbers(part, tokens, width))
        for part, width in zip((data[:split], data[split:]), widths, strict=True)
    )
    return low.long() | (high >> SIZE_BITS).long() << _LOW_BITS, high & _LEVELS - 1
