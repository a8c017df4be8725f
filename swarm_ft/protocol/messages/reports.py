"""What a peer tells of its buffers: which it has, which it lost, what they take. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Self

from swarm_ft.ids import BlockIndex, SampleId
from swarm_ft.protocol.spec.bounds import Bound
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES

# ---- what peers sent each other, counted: bytes by kind, and what they would be as plain float32

MAX_TRAFFIC_BYTES, MAX_TRAFFIC_FRAMES = 1 << 50, 1 << 26


@dataclass(frozen=True, slots=True)
class OfOneStep(Bound):
    """Counters as a peer may report them of one step at one boundary.

    Sums of them over peers and steps stay in their fields, which have no other bounds.
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
    """Fields that are counts, but for `boundary`; the sum of two of a kind has the sum of each."""

    def counts(self) -> dict[str, int]:
        """Each count by its name."""
        names = (field.name for field in fields(self) if field.name != "boundary")
        return {name: getattr(self, name) for name in names}

    def __add__(self, other: Self) -> Self:
        others = other.counts()
        return replace(
            self, **{name: count + others[name] for name, count in self.counts().items()}
        )

    def at_most(self, high: int) -> Self:
        """The same, with no count above `high`."""
        return replace(self, **{name: min(count, high) for name, count in self.counts().items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic(Counters):
    """What one side sent over one boundary; each side counts what it sends itself.

    Attributes:
        relayed_bytes: of what it sent either way, what went over a relay.
        evaluation_bytes: of held-out samples, which go forward alone and count as nothing else.
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
        """All but what was sent to evaluate."""
        return replace(
            self,
            evaluation_bytes=0,
            evaluation_uncompressed_bytes=0,
            evaluation_relayed_bytes=0,
        )

    @property
    def of_evaluation(self) -> Traffic:
        """What was sent to evaluate, alone."""
        return Traffic(
            boundary=self.boundary,
            evaluation_bytes=self.evaluation_bytes,
            evaluation_uncompressed_bytes=self.evaluation_uncompressed_bytes,
            evaluation_relayed_bytes=self.evaluation_relayed_bytes,
        )


def summed_by_boundary(counts: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """The sum of each boundary's counts, in the order of the boundaries."""
    summed: dict[BlockIndex, Traffic] = {}
    for traffic in counts:
        known = summed.get(traffic.boundary)
        summed[traffic.boundary] = known + traffic if known else traffic
    return tuple(summed[boundary] for boundary in sorted(summed))


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTraffic(Counters):
    """Bytes of gradients that peers sent each other to sum, and what float32 would take.

    Attributes:
        relayed_bytes: of those that were sent, what went over a relay.
    """

    sent_bytes: int = 0
    uncompressed_bytes: int = 0
    relayed_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteCounts(Counters):
    """What peers sent each other, by kind, and what it would be as plain float32.

    Attributes:
        gradient_bytes: of gradients that were summed, by replicas of a stage or by stages.
        state_bytes: of weights and optimizer that newcomers took; never compressed.
        relayed_bytes: of all that was sent but state, what went over a relay.
        evaluation_bytes: of the activations of held-out samples.
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
        """Of all kinds."""
        return (
            self.forward_bytes
            + self.backward_bytes
            + self.gradient_bytes
            + self.state_bytes
            + self.evaluation_bytes
        )

    @property
    def uncompressed_bytes(self) -> int:
        """Of all kinds, had nothing been compressed."""
        return (
            self.forward_uncompressed_bytes
            + self.backward_uncompressed_bytes
            + self.gradient_uncompressed_bytes
            + self.state_bytes
            + self.evaluation_uncompressed_bytes
        )


# ---- a set of samples as a bitmap: an eighth of a byte a sample, however many there are

if TYPE_CHECKING:  # the few who look at samples import it; who asks for a status need not
    import numpy as np
    import numpy.typing as npt

    Samples = npt.NDArray[np.int64]
    """Numbers of samples, rising."""


@dataclass(frozen=True, slots=True)
class Bitmap(Bound):
    """Bytes that are a bitmap of fewer than so many samples, in its shortest form."""

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
    """See the module's docstring; equal sets are equal values.

    Attributes:
        bitmap: bit i % 8 of byte i // 8 is sample i; the last byte is not 0.
    """

    bitmap: Annotated[bytes, Bitmap(MAX_SAMPLES)] = b""

    @classmethod
    def of(cls, samples: Iterable[SampleId] | Samples) -> SampleSet:
        """The set of these samples, in whatever order, twice or not."""
        import numpy as np

        numbers = np.fromiter(samples, np.int64)
        if not len(numbers):
            return cls()
        bits = np.zeros(int(numbers.max()) + 1, np.bool_)
        bits[numbers] = True
        return cls(np.packbits(bits, bitorder="little").tobytes())

    def to_array(self) -> Samples:
        """The samples."""
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
    """Samples of one boundary whose buffers a peer has, or had and lost."""

    boundary: BlockIndex
    samples: SampleSet = field(default_factory=SampleSet)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferCounts(Counters):
    """A peer's buffers at one boundary: the first three as of now, the others since it told last.

    Attributes:
        samples: that have a buffer here.
        memory_bytes: of buffers in memory.
        disk_bytes: of buffers on disk; what is in memory may be there too.
        memory_hits: buffers that were asked for and were in memory, fetched ahead or not.
        disk_hits: that had to be waited for.
        misses: that are not here.
        evictions: of which no place was left.
        repairs: that were found damaged, and given up.
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
