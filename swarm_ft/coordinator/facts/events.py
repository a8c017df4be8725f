"""What can happen to the coordinator. Values only; `machine.decide` says what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm_ft.coordinator.facts.ledger import LedgerChange, change_of
from swarm_ft.coordinator.facts.messages import Message
from swarm_ft.coordinator.facts.reasons import Reason, gist_of
from swarm_ft.coordinator.facts.standing import Standing
from swarm_ft.coordinator.facts.state import Run, SentTraffic, Snapshot, SwarmState
from swarm_ft.coordinator.facts.ways import Ways
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
    """A peer said hello, which makes it a member.

    Attributes:
        grant: what its invitation lets it host, as the coordinator's registry has it.
    """

    hello: PeerHello
    grant: Grant = field(default_factory=Grant)


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """A member's message; its hello is `PeerJoined`."""

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
    owner: str = ""
    storage_key: bytes = field(default=b"", repr=False)
    priority: int = DEFAULT_PRIORITY
    claim: Claim = NO_CLAIM


@dataclass(frozen=True, slots=True)
class RunCancelled:
    """Somebody cancels a run."""

    run_id: RunId
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class RunPaused:
    """Somebody wants no more steps of a run for now."""

    run_id: RunId
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class RunResumed:
    """Somebody wants a paused run to go on."""

    run_id: RunId
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class RateChanged:
    """Somebody wants another peak learning rate for a run, from the next step on."""

    run_id: RunId
    learning_rate: float
    actor: Actor = Actor.CLIENT


@dataclass(frozen=True, slots=True)
class CodecsChanged:
    """Somebody wants other codecs for a run, from the next step on."""

    run_id: RunId
    codecs: Codecs
    actor: Actor = Actor.CLIENT


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
class SnapshotLost:
    """The snapshot's manifest cannot be written.

    Attributes:
        message: of the error.
    """

    run_id: RunId
    snapshot: Snapshot
    message: str


@dataclass(frozen=True, slots=True)
class TokensLost:
    """A run's tokens cannot be read.

    Attributes:
        message: of the error.
    """

    run_id: RunId
    message: str


@dataclass(frozen=True, slots=True)
class RunAborted:
    """The coordinator cannot go on with a run, by a bug or a value that it cannot handle."""

    run_id: RunId
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed.

    Attributes:
        ways: who reaches whom by now; None: nobody looked.
    """

    ways: Ways | None = None


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


# ---- what the coordinator can do: records to write down first, then what to say
#
# `machine.decide` returns effects; `service` performs them in their order.

# ---- what to write down, before anything is said


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
class EvaluationRecord:
    """Held-out samples were evaluated, each once.

    Attributes:
        judged: what all evaluations up to and with this one say.
    """

    run_id: RunId
    evaluated: Evaluated
    judged: Judged = field(default_factory=Judged)


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """Others hold buffers of a run."""

    run_id: RunId
    change: LedgerChange


@dataclass(frozen=True, slots=True)
class RollbackRecord:
    """Steps from `first_void_step` on do not count any more, nor evaluations after them.

    Attributes:
        is_evaluated: whether the weights that it goes back to are, and stay so; else they will be.
    """

    run_id: RunId
    first_void_step: StepNumber
    is_evaluated: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot is whole.

    Attributes:
        kept: steps of those that are there from now on, itself among them.
    """

    run_id: RunId
    snapshot: Snapshot
    kept: frozenset[StepNumber]


@dataclass(frozen=True, slots=True)
class StandingRecord:
    """A peer is set aside, for so long from now."""

    peer_id: PeerId
    standing: Standing
    for_s: float


@dataclass(frozen=True, slots=True)
class ForgetRecord:
    """A run that is over is to be remembered no more."""

    run_id: RunId


@dataclass(frozen=True, slots=True)
class ContributionRecord:
    """Members gave so much by now, and others are not remembered any more."""

    given: Mapping[PeerId, Contribution]
    forgotten: tuple[PeerId, ...] = ()
    sent: Mapping[PeerId, SentTraffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something happened; the shell numbers it.

    Attributes:
        serial: rises by one with each.
        unix_s: when the coordinator decided it, by its wall clock.
    """

    serial: int
    unix_s: float
    happened: Happened


Record = (
    RunRecord
    | PlanRecord
    | CommitRecord
    | EvaluationRecord
    | LedgerRecord
    | RollbackRecord
    | SnapshotRecord
    | StandingRecord
    | ForgetRecord
    | ContributionRecord
    | EventRecord
)

# ---- what to do

Published = Run | StepCommitted | Evaluated | Reason
"""See `Publish`."""


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to a peer; a plan goes with the tokens of these samples."""

    peer_id: PeerId
    message: Message
    tokens_of: tuple[SampleId, ...] = ()


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End a peer's membership with an error.

    Attributes:
        error: its class.
        reason: names the peer.
    """

    peer_id: PeerId
    error: type[SwarmError]
    reason: Reason


@dataclass(frozen=True, slots=True)
class Publish:
    """Send an event to everybody who watches the run.

    Attributes:
        event: the run as it is now; or a step, or an evaluation; or a reason of kind WENT_BACK.
    """

    run_id: RunId
    event: Published


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """All stages are saved: write the snapshot's manifest, then say `SnapshotWritten`."""

    run_id: RunId
    spec: RunSpec
    snapshot: Snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """Something that people want to know of; it gets its number and its time as it is written.

    Attributes: see `SwarmEvent`.
    """

    kind: EventKind
    run_id: RunId | None = None
    peer_id: PeerId | None = None
    from_step: int | None = None
    to_step: int | None = None
    reason: Reason | None = None


Effect = Record | Say | Dismiss | Publish | WriteSnapshot | Happened
"""A record is put into the journal before anything is said."""


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
"""What happened to a run that is in a phase now, or has another reason for it."""


# ---- one call of `machine.decide`: the state as it changes, and the effects so far


class Turn:
    """What one event makes of a state; whoever decides something tells it here.

    Attributes:
        state: what the coordinator knows by now.
        now_s: monotonic seconds, the same for the whole turn.
        effects: what is to be done, in this order.
    """

    def __init__(self, state: SwarmState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def keep(self, run: Run) -> None:
        """Keep the run; nobody needs to know, now or after a restart."""
        self.state = self.state.with_run(run)

    def put(self, run: Run) -> None:
        """Keep the run, write it down and tell its watchers."""
        known = self.state.runs.get(run.run_id)
        self.keep(run)
        self.write(RunRecord(run))
        self.publish(run.run_id, run)
        self._tell_change(known, run)

    def _tell_change(self, known: Run | None, run: Run) -> None:
        kind = PHASE_KINDS[run.phase] if known is not None else EventKind.RUN_SUBMITTED
        is_new = known is None or known.phase is not run.phase
        if is_new or (run.detail and known and run.detail.gist != gist_of(known.detail)):
            self.happened(kind, run, reason=run.detail, to_step=run.past.all_steps)

    def happened(
        self,
        kind: EventKind,
        run: Run | None = None,
        peer_id: PeerId | None = None,
        *,
        reason: Reason | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> None:
        """Tell people; only those who may read the run get the reason."""
        self.effects.append(
            Happened(
                kind=kind,
                run_id=run.run_id if run is not None else None,
                peer_id=peer_id,
                from_step=from_step,
                to_step=to_step,
                reason=reason,
            )
        )

    def forget(self, run_id: RunId) -> None:
        """Know nothing of a run any more, nor after a restart."""
        self.state = self.state.without_run(run_id)
        self.write(ForgetRecord(run_id))

    def write_ledger(self, before: Run, after: Run) -> None:
        """Write down what became of a run's ledger."""
        known, ledger = before.past.ledger, after.past.ledger
        if ledger is not None and ledger is not known:
            self.write(LedgerRecord(after.run_id, change_of(known, ledger)))

    def write(self, record: Record) -> None:
        """Put a record into the journal; comes before whatever is said about it."""
        self.effects.append(record)

    def say(self, peer_id: PeerId, message: Message, tokens_of: tuple[SampleId, ...] = ()) -> None:
        """Send a message to a peer; a plan goes with the tokens of these samples."""
        self.effects.append(Say(peer_id, message, tokens_of))

    def publish(self, run_id: RunId, event: Published) -> None:
        """Send an event to everybody who watches the run, see `Publish`."""
        self.effects.append(Publish(run_id, event))

    def dismiss(self, peer_id: PeerId, error: type[SwarmError], reason: Reason) -> None:
        """End a peer's membership with an error."""
        self.effects.append(Dismiss(peer_id, error, reason))
