"""A set of samples as a bitmap: an eighth of a byte a sample, however many there are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import SampleId

Samples = npt.NDArray[np.int64]
"""Numbers of samples, rising."""


@dataclass(frozen=True, slots=True)
class SampleSet:
    """See the module's docstring; equal sets are equal values.

    Attributes:
        bitmap: bit i % 8 of byte i // 8 is sample i; the last byte is not 0.
    """

    bitmap: bytes = b""

    @classmethod
    def of(cls, samples: Iterable[SampleId] | Samples) -> SampleSet:
        """The set of these samples, in whatever order, twice or not."""
        numbers = np.fromiter(samples, np.int64)
        if not len(numbers):
            return cls()
        bits = np.zeros(int(numbers.max()) + 1, np.bool_)
        bits[numbers] = True
        return cls(np.packbits(bits, bitorder="little").tobytes())

    @classmethod
    def checked(cls, bitmap: bytes, num_samples: int) -> SampleSet:
        """A set that somebody else sent.

        Args:
            bitmap: as it came.
            num_samples: that there are at most.

        Raises:
            MalformedMessage: it has others, or is not in its shortest form.
        """
        found = cls(bitmap)
        last = len(bitmap) * 8 - 9 + bitmap[-1].bit_length() if bitmap else -1
        if (bitmap and not bitmap[-1]) or last >= num_samples:
            raise MalformedMessage(
                f"set of samples: expected a bitmap of samples below {num_samples}, without zeros "
                f"at its end, got {len(bitmap)} bytes with a last sample of {last}"
            )
        return found

    def to_array(self) -> Samples:
        """The samples."""
        bits = np.unpackbits(np.frombuffer(self.bitmap, np.uint8), bitorder="little")
        return np.flatnonzero(bits)

    def __iter__(self) -> Iterator[SampleId]:
        return (SampleId(int(sample)) for sample in self.to_array())

    def __contains__(self, sample: object) -> bool:
        if not isinstance(sample, int) or not 0 <= sample < len(self.bitmap) * 8:
            return False
        return bool(self.bitmap[sample // 8] >> sample % 8 & 1)

    def __len__(self) -> int:
        return int.from_bytes(self.bitmap, "little").bit_count()
