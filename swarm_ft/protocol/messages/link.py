"""Messages between two peers of a run over their one stream, as frozen values.

A stream begins with a `LinkHello` of each side. Channels follow, one of each kind. A message's type
and, for sums, its scope determine its channel. Marks belong to no channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.boundary import BoundaryHello, BoundaryMessage
from swarm_ft.protocol.messages.reduction import ReduceHello, ReduceMessage, Scope, scope_of
from swarm_ft.protocol.messages.timeline import ClockTime
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

Serial = Annotated[int, Range(0, (1 << 32) - 1)]


class ChannelKind(Enum):
    """Kind of a channel; in one attempt two peers have at most one of each kind."""

    BOUNDARY = "boundary"
    """Channel of frames between neighbours."""
    REPLICAS = "replicas"
    """Channel of gradients of a stage's replicas."""
    STAGES = "stages"
    """Channel of gradients of weights that several stages share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkHello:
    """Peer to peer: first message of each side.

    Attributes:
        peer_id: The sender.
        to: The expected receiver; another peer may answer, since ports are used again.
        run_id: Run of the link.
    """

    peer_id: PeerId
    to: PeerId
    run_id: RunId
    protocol_version: Annotated[int, VersionField("peer", "peer")] = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class LinkPing:
    """Peer to peer: a mark in the link's traffic, see `machines.link_meter`; one at a time."""

    serial: Serial


@dataclass(frozen=True, slots=True)
class LinkPong:
    """Peer to peer: the ping of this number was read, so many microseconds after the begin."""

    serial: Serial
    came_us: ClockTime


ChannelHello = BoundaryHello | ReduceHello
"""First message of each side over a channel, once an attempt and stream."""
ChannelMessage = BoundaryMessage | ReduceMessage
LinkMark = LinkPing | LinkPong
LinkMessage = LinkHello | LinkMark | ChannelMessage


def kind_of(message: ChannelMessage) -> ChannelKind:
    """Return the kind of the channel that carries a message."""
    if isinstance(message, BoundaryMessage):
        return ChannelKind.BOUNDARY
    return ChannelKind.REPLICAS if scope_of(message) is Scope.REPLICAS else ChannelKind.STAGES
