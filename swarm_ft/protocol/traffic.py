"""What peers sent each other, counted: bytes by kind, and what they would be as plain float32."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.ids import BlockIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one side sent over one boundary; each side counts what it sends itself."""

    boundary: BlockIndex
    forward_bytes: int = 0
    backward_bytes: int = 0
    forward_uncompressed_bytes: int = 0
    backward_uncompressed_bytes: int = 0
    key_frames: int = 0
    delta_frames: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            boundary=self.boundary,
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
            forward_uncompressed_bytes=(
                self.forward_uncompressed_bytes + other.forward_uncompressed_bytes
            ),
            backward_uncompressed_bytes=(
                self.backward_uncompressed_bytes + other.backward_uncompressed_bytes
            ),
            key_frames=self.key_frames + other.key_frames,
            delta_frames=self.delta_frames + other.delta_frames,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTraffic:
    """Bytes of gradients that replicas of a stage sent each other, and what float32 would take."""

    sent_bytes: int = 0
    uncompressed_bytes: int = 0

    def __add__(self, other: GradientTraffic) -> GradientTraffic:
        return GradientTraffic(
            sent_bytes=self.sent_bytes + other.sent_bytes,
            uncompressed_bytes=self.uncompressed_bytes + other.uncompressed_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteCounts:
    """What peers sent each other, by kind, and what it would be as plain float32.

    Attributes:
        gradient_bytes: of gradients that replicas of a stage summed.
        state_bytes: of weights and optimizer that newcomers took; never compressed.
    """

    forward_bytes: int = 0
    forward_uncompressed_bytes: int = 0
    backward_bytes: int = 0
    backward_uncompressed_bytes: int = 0
    gradient_bytes: int = 0
    gradient_uncompressed_bytes: int = 0
    state_bytes: int = 0

    def __add__(self, other: ByteCounts) -> ByteCounts:
        names = ByteCounts.__dataclass_fields__
        return ByteCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def sent_bytes(self) -> int:
        """Of all kinds."""
        return self.forward_bytes + self.backward_bytes + self.gradient_bytes + self.state_bytes

    @property
    def uncompressed_bytes(self) -> int:
        """Of all kinds, had nothing been compressed."""
        return (
            self.forward_uncompressed_bytes
            + self.backward_uncompressed_bytes
            + self.gradient_uncompressed_bytes
            + self.state_bytes
        )
