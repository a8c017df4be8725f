"""What two peers of a run say to each other over the one stream between them, as frozen values.

A stream begins with a `LinkHello` of either side. After it come channels, of each kind one: whose
channel a message is follows from its type and, of sums, their scope. Marks belong to none.
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
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

Serial = Annotated[int, Range(0, (1 << 32) - 1)]


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
        run_id: for which run it is.
    """

    peer_id: PeerId
    to: PeerId
    run_id: RunId
    protocol_version: Annotated[int, Spoken("peer", "peer")] = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class LinkPing:
    """A mark in what goes over the link, see `machines.link_meter`. The next follows its answer."""

    serial: Serial


@dataclass(frozen=True, slots=True)
class LinkPong:
    """The ping of this number was read, so many microseconds after the stream began."""

    serial: Serial
    came_us: ClockTime


ChannelHello = BoundaryHello | ReduceHello
"""First message of either side over a channel, once an attempt and stream."""
ChannelMessage = BoundaryMessage | ReduceMessage
LinkMark = LinkPing | LinkPong
LinkMessage = LinkHello | LinkMark | ChannelMessage


def kind_of(message: ChannelMessage) -> ChannelKind:
    """Which channel a message goes over."""
    if isinstance(message, BoundaryMessage):
        return ChannelKind.BOUNDARY
    return ChannelKind.REPLICAS if scope_of(message) is Scope.REPLICAS else ChannelKind.STAGES
