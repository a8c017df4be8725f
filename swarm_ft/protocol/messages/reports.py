"""Reports of a peer: its traffic, the buffers that it has or lost, and their size. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Self

from swarm_ft.ids import BlockIndex, SampleId
from swarm_ft.protocol.spec.bounds import Bound
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES

# ---- traffic between peers: bytes by kind, and their size as plain float32

MAX_TRAFFIC_BYTES, MAX_TRAFFIC_FRAMES = 1 << 50, 1 << 26


@dataclass(frozen=True, slots=True)
class OfOneStep(Bound):
    """Bound on the counters that a peer reports of one step at one boundary.

    Sums over peers and steps use the same fields, without further bounds.
    """

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        for name in getattr(value, "__dataclass_fields__", ()):
            count = getattr(value, name)
            high = MAX_TRAFFIC_BYTES if name.endswith("_bytes") else MAX_TRAFFIC_FRAMES
            if not 0 <= count <= high:
                return f"expected {name} of 0 to {high}, got {count}"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Base of classes whose fields are counts, but for `boundary`; sums add each field."""

    def counts(self) -> dict[str, int]:
        """Return each count by its name."""
        names = (field.name for field in fields(self) if field.name != "boundary")
        return {name: getattr(self, name) for name in names}

    def __add__(self, other: Self) -> Self:
        others = other.counts()
        return replace(
            self, **{name: count + others[name] for name, count in self.counts().items()}
        )

    def at_most(self, high: int) -> Self:
        """Return the same counts, each at most `high`."""
        return replace(self, **{name: min(count, high) for name, count in self.counts().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic(Counters):
    """Traffic that one side sent over one boundary; each side counts its own.

    Attributes:
        boundary: The boundary.
        relayed_bytes: Bytes either way that went over a relay.
        evaluation_bytes: Bytes of held-out samples, which go forward alone, in no other count.
    """

    boundary: BlockIndex
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_uncompressed_bytes: int = 0
    backward_uncompressed_bytes: int = 0
    key_frames: int = 0
    delta_frames: int = 0
    relayed_bytes: int = 0
    evaluation_bytes: int = 0
    evaluation_uncompressed_bytes: int = 0
    evaluation_relayed_bytes: int = 0

    @property
    def of_training(self) -> Self:
        """The same traffic without evaluations."""
        return replace(
            self,
            evaluation_bytes=0,
            evaluation_uncompressed_bytes=0,
            evaluation_relayed_bytes=0,
        )

    @property
    def of_evaluation(self) -> Traffic:
        """The traffic of evaluations alone."""
        return Traffic(
            boundary=self.boundary,
            evaluation_bytes=self.evaluation_bytes,
            evaluation_uncompressed_bytes=self.evaluation_uncompressed_bytes,
            evaluation_relayed_bytes=self.evaluation_relayed_bytes,
        )


def summed_by_boundary(counts: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return the sum of each boundary's counts, in the order of the boundaries."""
    summed: dict[BlockIndex, Traffic] = {}
    for traffic in counts:
        known = summed.get(traffic.boundary)
        summed[traffic.boundary] = known + traffic if known else traffic
    return tuple(summed[boundary] for boundary in sorted(summed))


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTraffic(Counters):
    """Bytes of gradients between peers, and their size as float32.

    Attributes:
        sent_bytes: Bytes sent.
        uncompressed_bytes: Bytes of the same gradients as float32.
        relayed_bytes: Sent bytes that went over a relay.
    """

    sent_bytes: int = 0
    uncompressed_bytes: int = 0
    relayed_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteCounts(Counters):
    """Bytes between peers by kind, and their size as plain float32.

    Attributes:
        gradient_bytes: Bytes of gradients that replicas or stages summed.
        state_bytes: Bytes of weights and optimizers for learners; never compressed.
        relayed_bytes: Bytes of all kinds but state that went over a relay.
        evaluation_bytes: Bytes of the activations of held-out samples.
    """

    forward_bytes: int = 0
    forward_uncompressed_bytes: int = 0
    backward_bytes: int = 0
    backward_uncompressed_bytes: int = 0
    gradient_bytes: int = 0
    gradient_uncompressed_bytes: int = 0
    state_bytes: int = 0
    relayed_bytes: int = 0
    evaluation_bytes: int = 0
    evaluation_uncompressed_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of all kinds."""
        return (
            self.forward_bytes
            + self.backward_bytes
            + self.gradient_bytes
            + self.state_bytes
            + self.evaluation_bytes
        )

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of all kinds without compression."""
        return (
            self.forward_uncompressed_bytes
            + self.backward_uncompressed_bytes
            + self.gradient_uncompressed_bytes
            + self.state_bytes
            + self.evaluation_uncompressed_bytes
        )


# ---- a set of samples as a bitmap: an eighth of a byte per sample

if TYPE_CHECKING:  # numpy is slow to import, and a request for a status does not need it
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.int64]
    """Numbers of samples, rising."""


@dataclass(frozen=True, slots=True)
class Bitmap(Bound):
    """Bound on a bitmap of at most `num_samples` samples, in its shortest form."""

    num_samples: int

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        bitmap = value if isinstance(value, bytes) else b""
        last = len(bitmap) * 8 - 9 + bitmap[-1].bit_length() if bitmap else -1
        if not (bitmap and not bitmap[-1]) and last < self.num_samples:
            return None
        return (
            f"expected a bitmap of samples below {self.num_samples}, without zeros at its end, "
            f"got {len(bitmap)} bytes with a last sample of {last}"
        )


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Set of samples as a bitmap; equal sets are equal values.

    Attributes:
        bitmap: Bits of the samples: bit i % 8 of byte i // 8 is sample i; the last byte is not 0.
    """

    bitmap: Annotated[bytes, Bitmap(MAX_SAMPLES)] = b""

    @classmethod
    def of(cls, samples: Iterable[SampleId] | Samples) -> SampleSet:
        """Return the set of these samples, in any order, with or without repetition."""
        import numpy as np

        numbers = np.fromiter(samples, np.int64)
        if not len(numbers):
            return cls()
        bits = np.zeros(int(numbers.max()) + 1, np.bool_)
        bits[numbers] = True
        return cls(np.packbits(bits, bitorder="little").tobytes())

    def to_array(self) -> Samples:
        """Return the samples."""
        import numpy as np

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBuffers:
    """Samples of one boundary whose buffers a peer has, or has lost."""

    boundary: BlockIndex
    samples: SampleSet = field(default_factory=SampleSet)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCounts(Counters):
    """Counts of a peer's buffers at one boundary: three present ones, and others since its report.

    Attributes:
        boundary: The boundary.
        samples: Samples with a buffer now.
        memory_bytes: Bytes of buffers in memory now.
        disk_bytes: Bytes of buffers on disk now; some may be in memory too.
        memory_hits: Requested buffers that were in memory, prefetched or not.
        disk_hits: Requested buffers that had to be read from disk.
        misses: Requested buffers that do not exist.
        evictions: Buffers that had no room.
        repairs: Buffers that were found damaged, and deleted.
    """

    boundary: BlockIndex
    samples: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    evictions: int = 0
    repairs: int = 0
