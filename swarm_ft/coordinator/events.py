"""What can happen to the coordinator. Values only; `machine.decide` says what follows."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.coordinator.state import Snapshot
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.peer_messages import FromPeer
from swarm_ft.protocol.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A peer's message; PeerHello makes it a member."""

    peer_id: PeerId
    message: FromPeer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer's control stream broke; it may come back."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class RunSubmitted:
    """A client's job is in the journal."""

    run_id: RunId
    spec: RunSpec


@dataclass(frozen=True, slots=True)
class RunCancelled:
    """A client wants no more of a run."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class ResultCollected:
    """A client has the result of a run."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The snapshot's manifest is where the snapshots lie: it can be gone back to."""

    run_id: RunId
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = PeerSaid | PeerLost | RunSubmitted | RunCancelled | ResultCollected | SnapshotWritten | Tick
