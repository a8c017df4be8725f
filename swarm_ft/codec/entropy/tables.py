"""Symbols' frequencies: from counts to a few bytes, and from these to the coder's integers.

A table has 6 bits a symbol: 0 for a symbol that does not occur, else a weight of four steps an
octave, (4 + v % 4) << v / 4. An eighth of an octave off costs under 0.01 bits a symbol.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swarm_ft.codec.base import as_tensor
from swarm_ft.codec.kernels import ReferenceKernels, packed_bytes
from swarm_ft.codec.kernels.base import PROBABILITY_BITS
from swarm_ft.errors import BadFrame

SYMBOLS = 256
_TOTAL = 1 << PROBABILITY_BITS
WEIGHT_BITS = 6
_STEPS = 4
_TOP = 13 * _STEPS
"""The weight number of the most frequent symbol; 13 octaves below it is less than 1 in 4096."""
_PACKING = ReferenceKernels()  # tables are tiny, and always on the CPU


@dataclass(frozen=True, slots=True)
class Tables:
    """Weights of the symbols of some contexts.

    Attributes:
        weights: uint8 [contexts, 256], each below 64; a row of zeros for an unused context.
    """

    weights: NDArray[np.uint8]

    @staticmethod
    def of_counts(counts: NDArray[np.int64]) -> Tables:
        """The nearest weights for counts of shape [contexts, 256]."""
        largest = counts.max(1, keepdims=True).clip(min=1)
        octaves = np.log2(np.maximum(counts, 1) / largest) * _STEPS + _TOP
        weights = np.rint(octaves).clip(1, _TOP)
        return Tables(np.where(counts > 0, weights, 0).astype(np.uint8))

    def frequencies(self) -> NDArray[np.int32]:
        """Integers that add up to 4096 in each used context, at least 1 for each symbol there.

        Whole-number arithmetic throughout: the same on every machine.
        """
        number = self.weights.astype(np.int64)
        weights = np.where(number > 0, (_STEPS + number % _STEPS) << number // _STEPS, 0)
        present = (number > 0).astype(np.int64)
        spare = _TOTAL - present.sum(1, keepdims=True)
        shares = present + weights * spare // weights.sum(1, keepdims=True).clip(min=1)
        rows = np.arange(len(shares))
        shares[rows, shares.argmax(1)] += _TOTAL - shares.sum(1)
        return np.where(present.any(1, keepdims=True), shares, 0).astype(np.int32)

    def to_bytes(self) -> bytes:
        """Each context's first and last symbol, then the weights between them, packed."""
        ends, inside = self._ranges(), []
        for weights, (first, last) in zip(self.weights, ends, strict=True):
            inside.append(weights[first : last + 1])
        packed = _PACKING.pack(torch.from_numpy(np.concatenate(inside)), WEIGHT_BITS)
        return bytes(x for pair in ends for x in pair) + packed.numpy().tobytes()

    @staticmethod
    def from_bytes(data: bytes, contexts: int) -> tuple[Tables, int]:
        """What `to_bytes` wrote at the beginning of `data`, and how many bytes it took.

        Raises:
            BadFrame: it is cut short, or a used context has no symbol.
        """
        ends = np.frombuffer(data[: 2 * contexts].ljust(2 * contexts, b"\0"), np.uint8)
        firsts, lasts = ends.reshape(-1, 2).T.astype(int)
        lengths = np.maximum(lasts - firsts + 1, 0)
        size = 2 * contexts + packed_bytes(int(lengths.sum()), WEIGHT_BITS)
        if len(data) < size:
            raise BadFrame(f"frame: expected {size} bytes of symbol tables, got {len(data)}")
        packed = as_tensor(data[2 * contexts : size])
        inside = _PACKING.unpack(packed, int(lengths.sum()), WEIGHT_BITS).numpy()
        weights = np.zeros((contexts, SYMBOLS), np.uint8)
        for row, first, part in zip(
            weights, firsts, np.split(inside, lengths.cumsum()[:-1]), strict=True
        ):
            row[first : first + len(part)] = part
        if (weights > _TOP).any() or (~weights.any(1) & (lengths > 0)).any():
            raise BadFrame("frame: a table of symbols that no encoder writes")
        return Tables(weights), size

    def _ranges(self) -> list[tuple[int, int]]:
        firsts, lasts = first_and_last(self.weights > 0)
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def first_and_last(is_used: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each row of [contexts, 256], the first and the last symbol; 1 and 0 if there is none."""
    some = is_used.any(1)
    last = SYMBOLS - 1 - is_used[:, ::-1].argmax(1)
    return np.where(some, is_used.argmax(1), 1), np.where(some, last, 0)
