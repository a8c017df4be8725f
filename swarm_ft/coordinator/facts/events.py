"""Events that reach the coordinator, and effects that it returns. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.ledger import LedgerChange, change_of
from swarm_ft.coordinator.facts.messages import Message
from swarm_ft.coordinator.facts.reasons import Reason, gist_of
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.coordinator.facts.state import Run, SentTraffic, Snapshot, SwarmState
from swarm_ft.errors import SwarmError
from swarm_ft.ids import Attempt, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import (
    Evaluated,
    RunPhase,
    StepCommitted,
)
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import CommitStep, FromPeer, PeerHello
from swarm_ft.protocol.messages.events import Actor, EventKind
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic
from swarm_ft.protocol.spec.best import Judged
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, NO_CLAIM, Claim
from swarm_ft.protocol.spec.run_spec import Codecs, RunSpec


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer's hello, which makes it a member.

    Attributes:
        grant: Permissions of its invitation, from the coordinator's registry.
        site: Name of its machine, see `plan.shared_memory`; empty: unknown.
    """

    hello: PeerHello
    grant: Grant = field(default_factory=Grant)
    site: str = ""


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A member's message; its hello is `PeerJoined`."""

    peer_id: PeerId
    message: FromPeer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The end of a peer's control stream; the peer may come back."""

    peer_id: PeerId


@dataclass(frozen=True, slots=True)
class RunSubmitted:
    """A client's job, which is in the journal."""

    run_id: RunId
    spec: RunSpec
    owner: str = ""
    storage_key: bytes = field(default=b"", repr=False)
    priority: int = DEFAULT_PRIORITY
    claim: Claim = NO_CLAIM


@dataclass(frozen=True, slots=True)
class RunCancelled:
    """A request to cancel a run."""

    run_id: RunId
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class RunPaused:
    """A request to pause a run."""

    run_id: RunId
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A request to resume a paused run."""

    run_id: RunId
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class RateChanged:
    """A request for another peak learning rate from the next step on."""

    run_id: RunId
    learning_rate: float
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class CodecsChanged:
    """A request for other codecs from the next step on."""

    run_id: RunId
    codecs: Codecs
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class ResultCollected:
    """A client's confirmation that it has the result of a run."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A snapshot's manifest is written: the run can go back to the snapshot."""

    run_id: RunId
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotLost:
    """A snapshot's manifest cannot be written.

    Attributes:
        message: Text of the error.
    """

    run_id: RunId
    snapshot: Snapshot
    message: str


@dataclass(frozen=True, slots=True)
class TokensLost:
    """A run's tokens cannot be read.

    Attributes:
        message: Text of the error.
    """

    run_id: RunId
    message: str


@dataclass(frozen=True, slots=True)
class RunAborted:
    """A run that the coordinator cannot process, because of a bug or an unexpected value."""

    run_id: RunId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The passage of time.

    Attributes:
        ways: Present connectivity; None if unchanged.
    """

    ways: Connectivity | None = None


Event = (
    PeerJoined
    | PeerSaid
    | PeerLost
    | RunSubmitted
    | RunCancelled
    | RunPaused
    | RunResumed
    | RateChanged
    | CodecsChanged
    | ResultCollected
    | SnapshotWritten
    | SnapshotLost
    | TokensLost
    | RunAborted
    | Tick
)


# ---- effects: `machine.decide` returns them, and `service` performs them in their order

# ---- records, which the journal holds before any message is sent


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A change of a run's phase, attempt, stages or committed steps."""

    run: Run


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A new plan of a step; the microbatches of a repeated plan are the same."""

    run_id: RunId
    step: StepNumber
    attempt: Attempt
    microbatches: tuple[Microbatch, ...]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The commit of a step.

    Attributes:
        sent: Bytes that peers sent each other up to and including this step.
        traffic: Bytes over each boundary, a part of `sent`.
    """

    run_id: RunId
    step: StepCommitted
    commit: CommitStep
    sent: ByteCounts
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation of all held-out samples.

    Attributes:
        judged: Results of all evaluations up to and including this one.
    """

    run_id: RunId
    evaluated: Evaluated
    judged: Judged = field(default_factory=Judged)


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """A change of the holders of a run's buffers."""

    run_id: RunId
    change: LedgerChange


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """A rollback that voids steps from `first_void_step` on, and evaluations after them.

    Attributes:
        is_evaluated: Whether the weights of the rollback have an evaluation, which stays valid.
    """

    run_id: RunId
    first_void_step: StepNumber
    is_evaluated: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A complete snapshot, a change of its keepers, or its loss.

    Attributes:
        kept: Steps of all snapshots that are kept from now on; a lost snapshot's is not among them.
    """

    run_id: RunId
    snapshot: Snapshot
    kept: frozenset[StepNumber]


@dataclass(frozen=True, slots=True)
class ReputationRecord:
    """A suspension of a peer for `for_s` seconds from now."""

    peer_id: PeerId
    standing: Reputation
    for_s: float


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """The removal of a run that is over."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class ContributionRecord:
    """New sums of contributions, and members that are no longer counted."""

    given: Mapping[PeerId, Contribution]
    forgotten: tuple[PeerId, ...] = ()
    sent: Mapping[PeerId, SentTraffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event for people, with the number and time that the service assigned.

    Attributes:
        serial: Number, one more than that of the event before.
        unix_s: Seconds of the coordinator's wall clock.
    """

    serial: int
    unix_s: float
    event: EmitEvent


Record = (
    RunRecord
    | PlanRecord
    | CommitRecord
    | EvaluationRecord
    | LedgerRecord
    | RollbackRecord
    | SnapshotRecord
    | ReputationRecord
    | ForgetRecord
    | ContributionRecord
    | EventRecord
)

# ---- other effects

Published = Run | StepCommitted | Evaluated | Reason
"""Types of what watchers of a run receive."""


@dataclass(frozen=True, slots=True)
class SendMessage:
    """An order to send a message to a peer; a plan includes the tokens of these samples."""

    peer_id: PeerId
    message: Message
    tokens_of: tuple[SampleId, ...] = ()


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The end of a peer's membership with an error.

    Attributes:
        error: Class of the error.
        reason: Reason that names the peer.
    """

    peer_id: PeerId
    error: type[SwarmError]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Publish:
    """An order to send an update to all watchers of a run.

    Attributes:
        event: The run's present state; or a step, an evaluation, or a reason of kind WENT_BACK.
    """

    run_id: RunId
    event: Published


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """An order to write a snapshot's manifest; `SnapshotWritten` or `SnapshotLost` follows."""

    run_id: RunId
    spec: RunSpec
    snapshot: Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class EmitEvent:
    """An event for people; the service assigns its number and time when it writes it.

    Attributes: see `SwarmEvent`.
    """

    kind: EventKind
    run_id: RunId | None = None
    peer_id: PeerId | None = None
    from_step: int | None = None
    to_step: int | None = None
    reason: Reason | None = None


Effect = Record | SendMessage | Dismiss | Publish | WriteSnapshot | EmitEvent
"""An order to the service. Records are in the journal before any message is sent."""


PHASE_KINDS = {
    RunPhase.QUEUED: EventKind.RUN_QUEUED,
    RunPhase.WAITING: EventKind.RUN_WAITING,
    RunPhase.LOADING: EventKind.RUN_LOADING,
    RunPhase.TRAINING: EventKind.RUN_TRAINING,
    RunPhase.EXPORTING: EventKind.RUN_EXPORTING,
    RunPhase.FINISHED: EventKind.RUN_FINISHED,
    RunPhase.COLLECTED: EventKind.RUN_COLLECTED,
    RunPhase.CANCELLED: EventKind.RUN_CANCELLED,
    RunPhase.FAILED: EventKind.RUN_FAILED,
}
"""The event that a run's new phase, or a new reason in that phase, emits."""


# ---- one call of `machine.decide`: the state as it changes, and the effects so far


class Transition:
    """A call of `machine.decide`: the state as it changes, and the effects so far.

    Attributes:
        state: Present state.
        now_s: Monotonic seconds, the same for the whole call.
        effects: Effects, in the order of their execution.
    """

    def __init__(self, state: SwarmState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def set_run(self, run: Run) -> None:
        """Set the run's state without a record or a message."""
        self.state = self.state.with_run(run)

    def save_run(self, run: Run) -> None:
        """Set the run's state, write it to the journal and publish it."""
        known = self.state.runs.get(run.run_id)
        self.set_run(run)
        self.write(RunRecord(run))
        self.publish(run.run_id, run)
        self._emit_change(known, run)

    def _emit_change(self, known: Run | None, run: Run) -> None:
        kind = PHASE_KINDS[run.phase] if known is not None else EventKind.RUN_SUBMITTED
        is_new = known is None or known.phase is not run.phase
        if is_new or (run.detail and known and run.detail.gist != gist_of(known.detail)):
            self.emit(kind, run, reason=run.detail, to_step=run.past.all_steps)

    def emit(
        self,
        kind: EventKind,
        run: Run | None = None,
        peer_id: PeerId | None = None,
        *,
        reason: Reason | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> None:
        """Emit an event for people; only readers of the run get the reason."""
        self.effects.append(
            EmitEvent(
                kind=kind,
                run_id=run.run_id if run is not None else None,
                peer_id=peer_id,
                from_step=from_step,
                to_step=to_step,
                reason=reason,
            )
        )

    def forget(self, run_id: RunId) -> None:
        """Remove a run from the state and the journal."""
        self.state = self.state.without_run(run_id)
        self.write(ForgetRecord(run_id))

    def write_ledger(self, before: Run, after: Run) -> None:
        """Write the change of a run's ledger, if there is one."""
        known, ledger = before.past.ledger, after.past.ledger
        if ledger is not None and ledger is not known:
            self.write(LedgerRecord(after.run_id, change_of(known, ledger)))

    def write(self, record: Record) -> None:
        """Write a record to the journal, before messages that depend on it."""
        self.effects.append(record)

    def send(self, peer_id: PeerId, message: Message, tokens_of: tuple[SampleId, ...] = ()) -> None:
        """Send a message to a peer; a plan includes the tokens of these samples."""
        self.effects.append(SendMessage(peer_id, message, tokens_of))

    def publish(self, run_id: RunId, event: Published) -> None:
        """Send an update to all watchers of a run."""
        self.effects.append(Publish(run_id, event))

    def dismiss(self, peer_id: PeerId, error: type[SwarmError], reason: Reason) -> None:
        """End a peer's membership with an error."""
        self.effects.append(Dismiss(peer_id, error, reason))
