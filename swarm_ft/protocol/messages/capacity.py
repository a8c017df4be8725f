"""Measurements of machines and links by their peers, for people and for forecasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.enrolment import NamedMember
from swarm_ft.protocol.spec.bounds import MAX_HOSTED, Length, Range, Text
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

MAX_PLACED = 1024
"""Peers that a plan names."""
SAMPLE_BYTES = 32 << 10
"""Bytes of a message that measures a link."""

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
    """Peer to coordinator: measurements of the machine that it lends. 0: unknown.

    Only forecasts depend on them, so they need no proof.

    Attributes:
        flops_per_s: Operations per second of training a block, see `stage.speed`.
        up_bytes_per_s: Bytes per second to the coordinator.
        down_bytes_per_s: Bytes per second from the coordinator.
        round_trip_s: Seconds of a round trip to the coordinator.
        watts: Power draw under load, as its volunteer configured it.
        cores: Number of peers like this one for which its processors run at full speed.
        host: Digest that identifies the machine until it restarts; empty: unknown.
        demand: Recent demand for processors by all programs, in such peers, with those that wait.
        busy: Recent use of processors by all programs, in such peers.
        uses: Recent use of processors by this peer, in such peers.
        waits: Recent wait of this peer for processors, in such peers.
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
    """Speed of a link, as a peer measured it, see `machines.link_meter`. 0: unknown.

    Attributes:
        bytes_per_s: Bytes per second from the peer to the other one while the link is full.
        peak_bytes_per_s: Highest recent bytes per second.
        round_trip_s: Seconds of a round trip, with the time in queues.
        least_round_trip_s: Shortest recent round trip.
    """

    bytes_per_s: Rate = 0.0
    peak_bytes_per_s: Rate = 0.0
    round_trip_s: Seconds = 0.0
    least_round_trip_s: Seconds = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceRequest:
    """Client to coordinator: a request for the placement of a job that begins now, or of a run.

    Attributes:
        spec: Spec of the job.
        run_id: The caller's run with this spec; None: a job that was not submitted.
    """

    spec: RunSpec
    run_id: RunId | None = None
    protocol_version: Annotated[int, VersionField("client", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPeer:
    """A peer and the stage that it would host.

    Attributes:
        memory_bytes: Memory that it lends.
        num_runs: Other active runs with a stage at it.
        busy: Share of its time that they take.
        host_busy: Cores of its machine that other runs need, at all peers there.
        host_load: Cores of its machine that other programs need.
        shared_up_bytes_per_s, shared_down_bytes_per_s: Bytes per second that its link leaves while
            the other runs go on; 0: those of `machine`.
    """

    peer_id: PeerId
    layers: LayerRange
    memory_bytes: int
    machine: Machine
    num_runs: Annotated[int, Range(0, MAX_HOSTED)] = 0
    busy: Share = 0.0
    host_busy: Cores = 0.0
    host_load: Cores = 0.0
    shared_up_bytes_per_s: Rate = 0.0
    shared_down_bytes_per_s: Rate = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Learned costs of a step beside operations and bytes, see `machines.step_cost`.

    Attributes:
        logs: Natural logarithms of its factors: seconds, and ratios.
        covariance: Covariance of these, row after row.
        num_runs: Number of runs that they were learned from.
        surprise: Sum over these runs of the squared distance between measurement and expectation,
            in standard deviations.
    """

    logs: Annotated[tuple[_Log, ...], Length(NUM_COSTS, NUM_COSTS)]
    covariance: Annotated[tuple[_Covariance, ...], Length(NUM_COSTS**2, NUM_COSTS**2)]
    num_runs: Annotated[int, Range(0, 1 << 31)] = 0
    surprise: Annotated[float, Range(0.0)] = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Coordinator to client: a placement, first stage to last, or the reason for none.

    Replicas of a stage follow each other.

    Attributes:
        relayed_percent: Percent of the bytes between the peers that pass relays, as far as known.
        costs: Costs that the swarm learned from its runs.
        num_waiting: Runs that wait for peers now, and come before this one.
        starts_after_s: Seconds until peers without room for one more stage are free; 0: it begins
            at once.
        beside_s: Seconds, about, until the other runs on these peers end; 0: there are none.
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
    """Peer to coordinator: filler bytes that measure a link."""

    data: Annotated[bytes, Length(SAMPLE_BYTES)] = b""
    protocol_version: Annotated[int, VersionField("peer", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEcho:
    """Coordinator to peer: as many filler bytes."""

    data: Annotated[bytes, Length(SAMPLE_BYTES)] = b""
