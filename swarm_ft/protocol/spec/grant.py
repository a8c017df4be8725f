"""Grants of an invitation to its bearer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import DEFAULT_WEIGHT, Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Stages that a peer may host, and a client's claim; without limits by default.

    Attributes:
        replica_only: Whether the peer is on probation: it joins others that host its stage, and
            never hosts a stage alone.
        sees_tokens: Whether it may host the first and the last stage, which get text and labels.
        layers: Blocks that it may host; None: any.
        weight: Weight of its jobs' claim to peers among other invitations' jobs. All clients of
            one invitation share it.
    """

    replica_only: bool = False
    sees_tokens: bool = True
    layers: LayerRange | None = None
    weight: Weight = DEFAULT_WEIGHT

    def covers(self, layers: LayerRange) -> bool:
        """Whether it may host all of these blocks."""
        own = self.layers or layers
        return own.start <= layers.start and layers.stop <= own.stop

    def __str__(self) -> str:
        """Return the limits for people; empty without limits."""
        limits = {
            "replica only": self.replica_only,
            "sees no tokens": not self.sees_tokens,
            f"layers {self.layers} only": self.layers is not None,
            f"weight {self.weight}": self.weight != DEFAULT_WEIGHT,
        }
        return ", ".join(text for text, is_so in limits.items() if is_so)


PROBATION = Grant(replica_only=True, sees_tokens=False)
"""Grant of every peer in a swarm that is open to all."""
