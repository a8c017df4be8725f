"""What machines and links can do, as their peers measured it: to look at, and for forecasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.ids import PeerId
from swarm_ft.protocol.spec.bounds import Length, Range, Text
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MAX_PLACED = 1024
"""Peers that a plan names."""
SAMPLE_BYTES = 32 << 10
"""Of a message by which a link is measured."""

MAX_BYTES_PER_S, MAX_SECONDS = 1e18, 3600.0
Rate = Annotated[float, Range(0.0, MAX_BYTES_PER_S)]
Seconds = Annotated[float, Range(0.0, MAX_SECONDS)]
Watts = Annotated[float, Range(0.0, 1e6)]
Percent = Annotated[int, Range(0, 100)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a peer measured, or its volunteer said, of the machine that it lends. 0: unknown.

    Nobody decides anything by it but whoever reads a forecast, so it may be taken at its word.

    Attributes:
        flops_per_s: of training a block, see `stage.speed`.
        up_bytes_per_s: to the coordinator.
        down_bytes_per_s: from there.
        round_trip_s: there and back.
        watts: that it takes at work, as its volunteer says.
    """

    flops_per_s: Rate = 0.0
    up_bytes_per_s: Rate = 0.0
    down_bytes_per_s: Rate = 0.0
    round_trip_s: Seconds = 0.0
    watts: Watts = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """What a peer measured of its link to another, see `machines.link_meter`. 0: unknown.

    Attributes:
        bytes_per_s: that the link lets through from here to there while it is full.
        peak_bytes_per_s: the most of late.
        round_trip_s: there and back, with what is in the way.
        least_round_trip_s: the least of late.
    """

    bytes_per_s: Rate = 0.0
    peak_bytes_per_s: Rate = 0.0
    round_trip_s: Seconds = 0.0
    least_round_trip_s: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceRequest:
    """Say who would host what if this job began now."""

    spec: RunSpec
    protocol_version: Annotated[int, Spoken("client", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPeer:
    """A peer, and what it would host.

    Attributes:
        memory_bytes: that it lends.
    """

    peer_id: PeerId
    layers: LayerRange
    memory_bytes: int
    machine: Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Who would host what, first stage to last, replicas beside each other; or why nobody would.

    Attributes:
        relayed_percent: of the bytes between them, as far as is known how they reach each other.
    """

    peers: Annotated[tuple[PlacedPeer, ...], Length(MAX_PLACED)]
    reason: Text
    relayed_percent: Percent = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSample:
    """Bytes that say nothing."""

    data: Annotated[bytes, Length(SAMPLE_BYTES)] = b""
    protocol_version: Annotated[int, Spoken("peer", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEcho:
    """As many bytes back."""

    data: Annotated[bytes, Length(SAMPLE_BYTES)] = b""
