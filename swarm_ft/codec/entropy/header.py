"""What an entropy-coded frame says before its codes: the steps of its groups and their contexts.

A group is a token or a channel. It has a level, which halves its step every LEVELS_AN_OCTAVE, and
a class, which says how widely its codes spread, so that rows of few bits share symbol tables.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import as_tensor
from swarm_ft.codec.kernels import ReferenceKernels, Steps, packed_bytes
from swarm_ft.codec.steps import MIN_STEP
from swarm_ft.errors import BadFrame

Numbers = NDArray[np.uint8]

LEVELS_AN_OCTAVE = 2
MAX_LEVEL = 63
CLASSES = 8
MAX_STEP = 2.0**112
"""The largest code times it is finite."""
_HALF_OCTAVE = 181 / 256  # a bfloat16
_MAX_LEVEL_BITS = 6
_MAX_CLASS_BITS = 3
_FACTORS = torch.tensor(
    [(_HALF_OCTAVE if n % 2 else 1.0) / (1 << n // 2) for n in range(MAX_LEVEL + 1)]
)
_FIXED = struct.Struct("<HBBHI")
_PACKING = ReferenceKernels()


def _no_numbers() -> Numbers:
    return np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True)
class WideHeader:
    """The head of a payload.

    Attributes:
        step: of level 0; exactly a bfloat16. 0 if all values are.
        shrink: see `WideGrid`.
        low_bits: lower bits of every code that are sent as they are, 0 to 8.
        escapes: codes that are too large for a symbol.
        row_levels, col_levels: uint8 [tokens], [channels], 0 to 63; empty where all are 0.
        row_classes, col_classes: uint8 [tokens], [channels], 0 to 7; empty where all are 0.
    """

    step: float
    shrink: int
    low_bits: int
    escapes: int
    row_levels: Numbers = field(default_factory=_no_numbers)
    col_levels: Numbers = field(default_factory=_no_numbers)
    row_classes: Numbers = field(default_factory=_no_numbers)
    col_classes: Numbers = field(default_factory=_no_numbers)

    def steps(self) -> Steps:
        """Each group's step; rows and columns without levels have one for all."""
        rows, cols = _factors(self.row_levels), _factors(self.col_levels)
        return Steps(rows, (cols * self.step).to(torch.bfloat16).float())

    def contexts(self, tokens: int, channels: int) -> Tensor:
        """The context of every value, uint8 [tokens * channels]: the sum of its classes."""
        rows, cols = (_or_zeros(n) for n in (self.row_classes, self.col_classes))
        return (rows[:, None] + cols[None, :]).expand(tokens, channels).reshape(-1)

    @property
    def num_contexts(self) -> int:
        """One more than the largest context."""
        return 1 + sum(int(n.max()) for n in (self.row_classes, self.col_classes) if len(n))

    def to_bytes(self) -> bytes:
        """Ten bytes, then the groups' numbers, packed in as many bits as the largest needs."""
        parts, widths = self._parts(), self._widths()
        four = sum(width << 4 * place for place, width in enumerate(widths))
        pattern = int(torch.tensor(self.step).to(torch.bfloat16).view(torch.int16)) & 0xFFFF
        fixed = _FIXED.pack(pattern, self.shrink, self.low_bits, four, self.escapes)
        return fixed + b"".join(_pack(n, width) for n, width in zip(parts, widths, strict=True))

    @staticmethod
    def from_bytes(data: bytes, tokens: int, channels: int) -> tuple[WideHeader, int]:
        """What `to_bytes` wrote at the beginning of `data`, and how many bytes it took.

        Raises:
            BadFrame: it is cut short, or a number is out of its range.
        """
        if len(data) < _FIXED.size:
            raise BadFrame(f"frame: expected {_FIXED.size} bytes of header, got {len(data)}")
        pattern, shrink, low_bits, four, escapes = _FIXED.unpack_from(data)
        step = torch.tensor(pattern, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).item()
        widths = [four >> 4 * place & 15 for place in range(4)]
        if shrink > 15 or low_bits > 8 or escapes > tokens * channels:
            raise BadFrame("frame: a header that no encoder writes")
        if max(widths[:2]) > _MAX_LEVEL_BITS or max(widths[2:]) > _MAX_CLASS_BITS:
            raise BadFrame(f"frame: levels and classes of {widths} bits")
        lengths = [tokens, channels, tokens, channels]
        sizes = [packed_bytes(n, w) for n, w in zip(lengths, widths, strict=True)]
        ends = list(itertools.accumulate(sizes, initial=_FIXED.size))
        if len(data) < ends[-1]:
            raise BadFrame(f"frame: expected {ends[-1]} bytes of levels and classes")
        found = [
            _unpack(data[start : start + size], length, width)
            for start, size, length, width in zip(ends, sizes, lengths, widths, strict=False)
        ]
        header = WideHeader(step, shrink, low_bits, escapes, *found)
        header._check_steps()
        return header, ends[-1]

    @property
    def size_bytes(self) -> int:
        """Of `to_bytes`."""
        parts = zip(self._parts(), self._widths(), strict=True)
        return _FIXED.size + sum(packed_bytes(len(numbers), width) for numbers, width in parts)

    def _parts(self) -> tuple[Numbers, ...]:
        return self.row_levels, self.col_levels, self.row_classes, self.col_classes

    def _widths(self) -> list[int]:
        return [int(numbers.max(initial=0)).bit_length() for numbers in self._parts()]

    def _check_steps(self) -> None:
        deepest = sum(int(n.max()) for n in (self.row_levels, self.col_levels) if len(n))
        if (
            self.step != 0
            and not MIN_STEP * 2.0 ** (deepest / LEVELS_AN_OCTAVE + 1) <= self.step <= MAX_STEP
        ):
            raise BadFrame(f"frame: a step of {self.step:.4g} at level 0 is out of range")


def max_header_bytes(tokens: int, channels: int) -> int:
    """No header for that shape is larger."""
    width = _MAX_LEVEL_BITS + _MAX_CLASS_BITS
    return _FIXED.size + sum(width * packed_bytes(count, 1) for count in (tokens, channels))


def _factors(levels: Numbers) -> Tensor:
    """The step of each level over that of level 0: float32 [groups], or [1]."""
    return _FACTORS[_or_zeros(levels).int()]


def _or_zeros(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers) if len(numbers) else torch.zeros(1, dtype=torch.uint8)


def _pack(numbers: Numbers, bits: int) -> bytes:
    if not bits:
        return b""
    return _PACKING.pack(torch.from_numpy(numbers), bits).numpy().tobytes()


def _unpack(data: bytes, count: int, bits: int) -> Numbers:
    if not bits:
        return _no_numbers()
    return _PACKING.unpack(as_tensor(data), count, bits).numpy()
