"""A permutation of 0..n-1 that is drawn from a salt and stored nowhere. Pure.

It is a Feistel network (Luby and Rackoff 1988) over pairs (l, r) of numbers below `side`, the root
of n or more: a round maps them to (r, l + F(r) mod side), and F is a table of random numbers. What
falls past the last element is permuted again until it does not (Black and Rogaway 2002). So any
element's place is computed alone, both ways, of integers only: the same on every machine.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_Pairs = npt.NDArray[np.uint32]

ROUNDS = 6
MAX_SIZE = 1 << 30
"""A pair's number is a uint32, and so is a sum of two."""
_MIN_SIDE = 16
"""With fewer pairs than 256 some permutations of a few elements come up far too often."""
_PIECE = 1 << 15
"""Elements at a time: their numbers stay in a processor's cache, and memory is bounded."""


class Permutation:
    """A permutation of `size` elements.

    Args:
        size: from 1 to MAX_SIZE.
        salt: what it is drawn from.
    """

    def __init__(self, size: int, salt: bytes) -> None:
        self.size = size
        self._side = max(_MIN_SIDE, math.isqrt(size - 1) + 1)
        drawn = hashlib.shake_128(salt).digest(4 * ROUNDS * self._side)
        # The remainder favours small numbers by less than side / 2^32: one in 100,000.
        numbers = np.frombuffer(drawn, "<u4") % np.uint32(self._side)
        self._tables = numbers.reshape(ROUNDS, self._side)

    def at(self, places: Numbers) -> Numbers:
        """The elements at these places, int64 [n] each; places lie below `size`."""
        return self._mapped(places, is_inverse=False)

    def places_of(self, elements: Numbers) -> Numbers:
        """The places of these elements: the inverse of `at`."""
        return self._mapped(elements, is_inverse=True)

    def _mapped(self, numbers: Numbers, *, is_inverse: bool) -> Numbers:
        network = self._backwards if is_inverse else self._forwards
        mapped = np.empty(len(numbers), np.int64)
        for start in range(0, len(numbers), _PIECE):
            found = network(numbers[start : start + _PIECE].astype(np.uint32))
            outside = np.flatnonzero(found >= self.size)
            while len(outside):
                found[outside] = network(found[outside])
                outside = outside[found[outside] >= self.size]
            mapped[start : start + _PIECE] = found
        return mapped

    def _forwards(self, numbers: _Pairs) -> _Pairs:
        side = np.uint32(self._side)
        left, right = np.divmod(numbers, side)
        for table in self._tables:
            left += table.take(right)
            np.minimum(left, left - side, out=left)  # which wraps where it is below 0
            left, right = right, left
        return left * side + right

    def _backwards(self, numbers: _Pairs) -> _Pairs:
        side = np.uint32(self._side)
        left, right = np.divmod(numbers, side)
        for table in self._tables[::-1]:
            left, right = right, left
            left -= table.take(right)
            np.minimum(left, left + side, out=left)
        return left * side + right
