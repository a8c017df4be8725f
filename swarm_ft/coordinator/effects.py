"""What the coordinator can do: records to write down first, then what to say. Values only.

`machine.decide` returns effects; `service` performs them in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm_ft.coordinator.ledger import LedgerChange
from swarm_ft.coordinator.state import Run, Snapshot
from swarm_ft.ids import Attempt, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.coordinator_messages import CommitStep, ToPeer
from swarm_ft.protocol.peer_messages import PeerHello
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.status import RunEvent, StepCommitted
from swarm_ft.protocol.traffic import ByteCounts, Traffic
from swarm_ft.protocol.training_plan import Microbatch

if TYPE_CHECKING:
    from swarm_ft.errors import SwarmError

# ---- what to write down, before anything is said


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A peer came, or went."""

    hello: PeerHello
    joined: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's phase, attempt, stages or committed steps changed."""

    run: Run


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A step was planned, perhaps again: then with the same microbatches."""

    run_id: RunId
    step: StepNumber
    attempt: Attempt
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """A step was committed.

    Attributes:
        sent: what peers sent each other in all steps up to and with this one.
        traffic: of that, what went over each boundary.
    """

    run_id: RunId
    step: StepCommitted
    commit: CommitStep
    sent: ByteCounts
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """Others hold buffers of a run."""

    run_id: RunId
    change: LedgerChange


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """Steps from `first_void_step` on do not count any more."""

    run_id: RunId
    first_void_step: StepNumber


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot is whole."""

    run_id: RunId
    snapshot: Snapshot


Record = (
    MemberRecord
    | RunRecord
    | PlanRecord
    | CommitRecord
    | LedgerRecord
    | RollbackRecord
    | SnapshotRecord
)

# ---- what to do


@dataclass(frozen=True, slots=True)
class Write:
    """Put a record into the journal; comes before whatever is said about it."""

    record: Record


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to a peer; a plan goes with the tokens of these samples."""

    peer_id: PeerId
    message: ToPeer
    tokens_of: tuple[SampleId, ...] = ()


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End a peer's membership with an error."""

    peer_id: PeerId
    error: SwarmError


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell everybody who watches the run."""

    run_id: RunId
    event: RunEvent


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """All stages are saved: write the snapshot's manifest, then say `SnapshotWritten`."""

    run_id: RunId
    spec: RunSpec
    snapshot: Snapshot


Effect = Write | Say | Dismiss | Publish | WriteSnapshot
