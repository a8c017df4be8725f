"""What machines and links can do, as their peers measured it: to look at, and for forecasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.enrolment import NamedMember
from swarm_ft.protocol.spec.bounds import MAX_HOSTED, Length, Range, Text
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MAX_PLACED = 1024
"""Peers that a plan names."""
SAMPLE_BYTES = 32 << 10
"""Of a message by which a link is measured."""

NUM_COSTS = 7
"""Factors of `machines.step_cost`."""
MAX_LOG, MAX_VARIANCE = 60.0, 1e3

MAX_BYTES_PER_S, MAX_SECONDS = 1e18, 3600.0
MAX_LEFT_S = 1e9
Rate = Annotated[float, Range(0.0, MAX_BYTES_PER_S)]
Seconds = Annotated[float, Range(0.0, MAX_SECONDS)]
Watts = Annotated[float, Range(0.0, 1e6)]
Percent = Annotated[int, Range(0, 100)]
Share = Annotated[float, Range(0.0, 1e3)]
Cores = Annotated[float, Range(0.0, 1e5)]
Left = Annotated[float, Range(0.0, MAX_LEFT_S)]
_Log = Annotated[float, Range(-MAX_LOG, MAX_LOG)]
_Covariance = Annotated[float, Range(-MAX_VARIANCE, MAX_VARIANCE)]


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
        cores: for how many peers like this one its processors compute at full speed.
        host: a digest of what names the machine until it is started again; empty: unknown.
        demand: of late, in units of such peers: all that runs there or waits for a processor.
        busy: so too what all had of them.
        uses: so too what this peer had of them.
        waits: so too what it waited for.
    """

    flops_per_s: Rate = 0.0
    up_bytes_per_s: Rate = 0.0
    down_bytes_per_s: Rate = 0.0
    round_trip_s: Seconds = 0.0
    watts: Watts = 0.0
    cores: Cores = 0.0
    host: Text = ""
    demand: Cores = 0.0
    busy: Cores = 0.0
    uses: Cores = 0.0
    waits: Cores = 0.0


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
    """Say who would host what if this job began now, or who hosts it.

    Attributes:
        run_id: the caller's run that has this spec; None: of a job that was not submitted yet.
    """

    spec: RunSpec
    run_id: RunId | None = None
    protocol_version: Annotated[int, Spoken("client", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPeer:
    """A peer, and what it would host.

    Attributes:
        memory_bytes: that it lends.
        num_runs: other runs that it has a stage of, under way.
        busy: share of its time that they take.
        host_busy: of its machine's cores, what other runs ask for, at all peers there.
        host_load: so too what other programs ask for.
    """

    peer_id: PeerId
    layers: LayerRange
    memory_bytes: int
    machine: Machine
    num_runs: Annotated[int, Range(0, MAX_HOSTED)] = 0
    busy: Share = 0.0
    host_busy: Cores = 0.0
    host_load: Cores = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What is known of a step's costs beside operations and bytes, see `machines.step_cost`.

    Attributes:
        logs: natural logarithms of its factors: seconds, and ratios.
        covariance: of these, row after row.
        num_runs: from which they were learned.
        surprise: sum over these of the squared distance, in standard deviations, of what was
            measured from what was expected.
    """

    logs: Annotated[tuple[_Log, ...], Length(NUM_COSTS, NUM_COSTS)]
    covariance: Annotated[tuple[_Covariance, ...], Length(NUM_COSTS**2, NUM_COSTS**2)]
    num_runs: Annotated[int, Range(0, 1 << 31)] = 0
    surprise: Annotated[float, Range(0.0)] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Who would host what, first stage to last, replicas beside each other; or why nobody would.

    Attributes:
        relayed_percent: of the bytes between them, as far as is known how they reach each other.
        costs: that the swarm learned from its runs.
        num_waiting: runs that wait for peers now, and come before this one.
        starts_after_s: until peers are free that have no room for one more stage; 0: it begins at
            once.
        beside_s: how long the other runs on these peers go on, about; 0: there are none.
        names: Names of these peers.
    """

    peers: Annotated[tuple[PlacedPeer, ...], Length(MAX_PLACED)]
    reason: Text
    relayed_percent: Percent = 0
    costs: Costs | None = None
    num_waiting: Annotated[int, Range(0, 1 << 31)] = 0
    starts_after_s: Left = 0.0
    beside_s: Left = 0.0
    names: Annotated[tuple[NamedMember, ...], Length(MAX_PLACED)] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSample:
    """Bytes that say nothing."""

    data: Annotated[bytes, Length(SAMPLE_BYTES)] = b""
    protocol_version: Annotated[int, Spoken("peer", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEcho:
    """As many bytes back."""

    data: Annotated[bytes, Length(SAMPLE_BYTES)] = b""
