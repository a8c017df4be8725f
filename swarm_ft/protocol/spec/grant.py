"""What an invitation grants its bearer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import DEFAULT_WEIGHT, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What a peer may host, and what a client may claim; without limits by default.

    Attributes:
        replica_only: it is on probation. It takes over from others that host its stage, and never
            carries a stage alone.
        sees_tokens: whether it may host the first and the last stage, which get text and labels.
        layers: the only blocks that it may host; None: any.
        weight: of the peers that its jobs get, to that of other invitations' jobs. All clients that
            join with one invitation share it.
    """

    replica_only: bool = False
    sees_tokens: bool = True
    layers: LayerRange | None = None
    weight: Weight = DEFAULT_WEIGHT

    def covers(self, layers: LayerRange) -> bool:
        """Whether these blocks are among those that it may host."""
        own = self.layers or layers
        return own.start <= layers.start and layers.stop <= own.stop

    def __str__(self) -> str:
        """For people; empty if it has no limits."""
        limits = {
            "replica only": self.replica_only,
            "sees no tokens": not self.sees_tokens,
            f"layers {self.layers} only": self.layers is not None,
            f"weight {self.weight}": self.weight != DEFAULT_WEIGHT,
        }
        return ", ".join(words for words, is_so in limits.items() if is_so)


PROBATION = Grant(replica_only=True, sees_tokens=False)
"""What anybody has where a swarm is open to all."""
