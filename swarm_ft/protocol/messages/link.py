"""What two peers say to each other over the one stream between them, as frozen values.

A stream begins with a `LinkHello` of either side. After it come channels, of each kind one: whose
channel a message is follows from its type and, of sums, their scope.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.boundary import BoundaryHello, BoundaryMessage
from swarm_ft.protocol.messages.reduction import ReduceHello, ReduceMessage, Scope, scope_of
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken


class ChannelKind(Enum):
    """What a channel is for. In one attempt two peers have at most one of each kind."""

    BOUNDARY = "boundary"
    """Frames between neighbours."""
    REPLICAS = "replicas"
    """Gradients of replicas of a stage."""
    STAGES = "stages"
    """Gradients of weights that several stages hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkHello:
    """First message of either side.

    Attributes:
        peer_id: who speaks.
        to: who is meant; the one that answers may be another, since ports are used again.
    """

    peer_id: PeerId
    to: PeerId
    protocol_version: Annotated[int, Spoken("peer", "peer")] = PROTOCOL_VERSION


ChannelHello = BoundaryHello | ReduceHello
"""First message of either side over a channel, once an attempt and stream."""
ChannelMessage = BoundaryMessage | ReduceMessage
LinkMessage = LinkHello | ChannelMessage


def kind_of(message: ChannelMessage) -> ChannelKind:
    """Which channel a message goes over."""
    if isinstance(message, BoundaryMessage):
        return ChannelKind.BOUNDARY
    return ChannelKind.REPLICAS if scope_of(message) is Scope.REPLICAS else ChannelKind.STAGES
