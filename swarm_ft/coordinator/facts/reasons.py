"""Reasons for decisions, as values: a kind, and typed fields.

Decisions compare reasons by kind and step, never by wording; `coordinator.reason_texts` has texts.
`coordinator.watching` removes the fields that a reader may not see. The journal keeps the fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from swarm_ft.errors import SwarmError
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.events import Actor
from swarm_ft.protocol.spec.layers import LayerRange

MAX_NAMED = 3
"""Most peers or runs that one reason names; a longer list helps no reader."""


class ReasonKind(StrEnum):
    """The kinds of reasons. Journals and recordings hold these names: do not rename one."""

    RECORDED_TEXT = "recorded-text"
    """Text of a journal of version 8, or of a recording of version 1; its kind is unknown."""
    SEVERAL = "several"
    """`parts`: reasons that all hold."""

    COORDINATOR_STARTED = "coordinator-started"
    """`code`: the coordinator's version."""
    DISK_LOW = "disk-low"
    """`amount`: bytes free on the coordinator's disk. `limit`: the coordinator refuses a job that
    would leave fewer.
    """
    DISK_FREE = "disk-free"
    """The disk has room again. `amount`: bytes free."""

    # ---- a peer joins, leaves or fails: `peers` has one; as a part of another reason, none
    PEER_JOINED = "peer-joined"
    """`layers`: the layers that it offers; empty: it takes any."""
    PEER_LEFT = "peer-left"
    PEER_DISCONNECTED = "peer-disconnected"
    PEER_SILENT = "peer-silent"
    """`amount`: seconds without a message."""
    PEER_AWAITED = "peer-awaited"
    """The peer is late, and no other peer has its stage."""
    PEER_LEAVING = "peer-leaving"
    """The peer asked to leave. `text`: the peer's own reason."""
    PEER_PAUSING = "peer-pausing"
    """The peer asked to pause. `text`: the peer's own reason."""
    PEER_RESUMED = "peer-resumed"
    IS_LEAVING = "is-leaving"
    """The state of a peer that asked to leave. `text`: the peer's own reason."""
    IS_PAUSED = "is-paused"
    """The state of a peer that asked to pause. `text`: the peer's own reason."""
    PEER_LEAVES = "peer-leaves"
    """The run continues without the peer now."""
    PEER_PAUSES = "peer-pauses"
    PEER_LOST = "peer-lost"
    """A run lost a peer. `parts`: the cause, and the consequence if one is certain."""
    PEER_ERROR = "peer-error"
    """The peer reported an error. `code`, `text`: the error's."""
    PEER_MISFIT = "peer-misfit"
    """The peer cannot host the run. `text`: the error's."""
    PEER_RELIEVED = "peer-relieved"
    """The peer became slow. `amount`, `limit`: seconds per microbatch, now and at most before."""
    PEER_SUSPENDED = "peer-suspended"
    """`amount`: seconds. `parts`: the cause."""
    SUSPENDED_FROM_RUN = "suspended-from-run"
    """Only `run_id` continues without the peer. `amount`: seconds. `parts`: the cause."""
    FAILED_TOO_OFTEN = "failed-too-often"
    """`amount`: failures. `parts`: the last one."""
    FAILED_FOR_OWNERS = "failed-for-owners"
    """`amount`: owners in whose runs it failed. `parts`: the last failure."""
    LATE_LOADING = "late-loading"
    """`amount`: seconds, in the next three kinds too."""
    LATE_EXPORT = "late-export"
    LATE_STEP = "late-step"
    LATE_STATE = "late-state"
    WRONG_STATE = "wrong-state"
    """The peer loaded a state that differs from its replicas'."""
    WRONG_NORM = "wrong-norm"
    """The peer reported a gradient norm that differs from its replicas'."""
    UNCONFIRMED_ERROR = "unconfirmed-error"
    """A peer on probation reports an error that no other peer reports. `text`: the error's."""
    CONFIRMED_ERROR = "confirmed-error"
    """Two `peers` report the same error at `step`. `code`, `text`: the error's."""
    REPEATED_ERROR = "repeated-error"
    """A peer reports the same error several times. `amount`: times."""
    INVALID_REPORT = "invalid-report"
    """`parts`: the invalid field."""
    INVALID_BOUNDARY = "invalid-boundary"
    """`amount`: the boundary. `layers`: the peer's stage."""
    INVALID_COUNTS = "invalid-counts"
    """`amount`, `limit`: numbers of counts, received and expected."""
    INVALID_SAMPLES = "invalid-samples"
    """`text`: the error in the set of samples."""

    # ---- what follows from the loss of a peer
    WAS_JOINING = "was-joining"
    """The lost peer had no part in the step yet."""
    TAKEN_OVER = "taken-over"
    """`others` compute the lost peer's part."""
    NO_CARRIER = "no-carrier"
    """`others` may not host the stage alone."""

    # ---- why a peer may not host a stage
    GRANT_LAYERS = "grant-layers"
    """`layers`: the layers that its invitation grants; then, if it offers some, its own."""
    NO_TOKENS = "no-tokens"
    NOT_TRUSTED = "not-trusted"
    NOT_ALONE = "not-alone"
    NOT_GRANTED = "not-granted"
    """`parts`: REFUSED_LAYERS of the run, each with the refusal as its part."""
    REFUSED_LAYERS = "refused-layers"
    OUTSIDE_MODEL = "outside-model"
    """`layers`: the offered layers, then the model's."""
    NO_SUCH_STAGE = "no-such-stage"
    """`layers`: the offered layers, then the stages'."""

    # ---- a run waits
    COORDINATOR_RESTARTED = "coordinator-restarted"
    GATHERING = "gathering"
    """Peers joined a moment ago; more may follow."""
    MISSING_LAYERS = "missing-layers"
    """`parts`: peers that may not host them. `num_more`: such peers that are not named."""
    TOO_FEW_PEERS = "too-few-peers"
    """`amount`: connected peers that could share `layers`."""
    NO_MEMORY = "no-memory"
    """No peer has the memory for `layers`."""
    RESULTS_KEPT = "results-kept"
    """`amount`: peers that keep the result of another run."""
    BEHIND = "behind"
    """`runs`: runs with peers. `num_more`: such runs that are not named. `amount`: runs before
    it."""
    PEER_MAY_RETURN = "peer-may-return"
    """The only peer with `layers` is away. `amount`: seconds that the run waits; None: longer."""
    AWAITS_SUSPENDED = "awaits-suspended"
    """`peers`: one peer. `parts`: its suspension."""
    AWAITS_KEEPERS = "awaits-keepers"
    """`peers` keep `layers` of the snapshot of `step`."""

    # ---- a run goes on
    LOADING = "loading"
    LOADING_BEST = "loading-best"
    """`step`: the step of the weights. `text`: the metric's name. `value`: the metric."""
    EXPORTING = "exporting"
    PEERS_JOIN = "peers-join"
    """`peers` join at the next attempt."""
    JOINING_STAGE = "joining-stage"
    """`peers`: one peer, which copies the state of `layers`."""
    CAUGHT_UP = "caught-up"
    """`peers`: one peer, which has the state of `layers` at `step`."""
    PEERS_GIVEN = "peers-given"
    """`peers` go to a run that waits."""
    PEER_MOVES = "peer-moves"
    """`peers`: one peer. `layers`: its old layers, its new ones. `parts`: the cause."""
    PEER_LET_GO = "peer-let-go"
    """`peers`: one peer. `layers`: its layers. `parts`: the cause."""
    LAYERS_DONE = "layers-done"
    """The outputs of a stage are all stored; no sample passes it any more."""
    STAGE_LEFT = "stage-left"
    """The peer of another stage leaves."""
    CUT_ANEW = "cut-anew"
    """The run goes back to `step` on new stages, and frees peers."""
    MAKES_ROOM = "makes-room"
    """Another run waits for peers."""
    MOVE_SAVES_FIRST = "move-saves-first"
    MOVE_IMPOSSIBLE = "move-impossible"
    MOVED = "moved"
    """`parts`: changes. `amount`, `limit`: seconds per step, after and before."""
    LAYERS_MOVED = "layers-moved"
    """`layers` moved from `peers` to `others`."""
    PAUSED = "paused"
    """`step`: number of committed steps."""
    PAUSE_REQUESTED = "paused-by-owner"
    """`actor`. `step`: the step that is finished first, if one is under way."""
    RESUME_REQUESTED = "resumed-by-owner"
    """`actor`."""
    RATE_CHANGED = "rate-changed"
    """`actor`. `step`: the first step. `value`, `value_before`: learning rates."""
    CODECS_CHANGED = "codecs-changed"
    """`step`: the first step. `text`, `text_before`: codecs. `actor`, or in `parts` the measured
    cost.
    """
    COMPRESSION_COST = "compression-cost"
    """`step`: the measured step. `value`: nats. `parts`: the quality."""
    QUALITY = "quality"
    """`value`, `value_before`: costs, found and requested. `amount`: measured steps."""
    EVALUATED = "evaluated"
    """`step`: the step of the weights. `value`: loss."""
    SAVES_BEFORE_LEAVE = "saves-before-leave"
    """A snapshot is written before `peers` leave `layers`, after `step`."""
    SAVES_BEFORE_PAUSE = "saves-before-pause"
    AWAITS_PAUSED = "awaits-paused"
    """`peers` are paused, and no other peer can host `layers`."""

    # ---- snapshots
    SNAPSHOT_COMPLETE = "snapshot-complete"
    SNAPSHOT_FAILED = "snapshot-failed"
    """`step`: the snapshot's. `parts`: the cause."""
    BEST_NOT_SAVED = "best-not-saved"
    """`step`: the step of weights that may be the best. `parts`: the cause."""
    SAVE_FAILED = "save-failed"
    """`peers`: one peer, which cannot save its stage. `text`: the error's."""
    MANIFEST_FAILED = "manifest-failed"
    """`text`: the coordinator's error."""
    NO_KEEPER = "no-keeper"
    """No peer has room for `layers`. `amount`: peers that stay."""
    KEEPERS_GONE = "keepers-gone"
    """No peer has `layers` of the snapshot."""

    # ---- a run goes back
    WENT_BACK = "went-back"
    """`step`: the new one. `amount`: the old one. `parts`: the cause, and the remedy."""
    WEIGHTS_LOST = "weights-lost"
    """`layers`. `parts`: the fate of each peer that had them."""
    STATE_LOST = "state-lost"
    """The peer is connected, without its stage's state."""
    SUSPENDED = "suspended"
    """The peer is suspended."""
    CANNOT_HOST = "cannot-host"
    """The peer cannot host the stage. `text`: the error's."""
    KEEPERS_AWAY = "keepers-away"
    """`peers` that keep `layers` of the snapshot of `step` are away."""
    REMEDY_SAVE_STEPS = "remedy-save-steps"
    """Another peer for `layers`, or snapshots. `amount`: steps between snapshots now."""
    REMEDY_SNAPSHOTS = "remedy-snapshots"
    """The coordinator stores no snapshots."""

    # ---- a result
    RESULT_READY = "result-ready"
    """`layers`: stages whose replicas have different results."""
    RESULT_LOST = "result-lost"
    """`layers` of the result. `runs`: a run that ends first. `step`: the run goes back to it."""

    # ---- a run ends
    QUEUE_EXPIRED = "queue-expired"
    """`amount`: seconds. `parts`: the last reason to wait."""
    NO_PEER_CAN_HOST = "no-peer-can-host"
    """`parts`: the misfit of one peer."""
    RUN_UNREADABLE = "run-unreadable"
    """The journal's record of the run cannot be read. `text`: the error's."""
    DATA_UNREADABLE = "data-unreadable"
    """`text`: the coordinator's error."""
    RUN_ABORTED = "run-aborted"
    """The coordinator failed to decide about the run. `text`: the error's."""
    CANCELLED_BY_CLIENT = "cancelled-by-client"
    """`actor`: the run's owner, or any client."""
    CANCELLED_BY_OPERATOR = "cancelled-by-operator"
    RESULT_COLLECTED = "result-collected"
    RESULT_EXPIRED = "result-expired"
    """`amount`: seconds."""

    # ---- a peer is released from a run
    RELEASED_LEAVER = "released-leaver"
    RELEASED_AT_START = "released-at-start"
    RELEASED_OUTVOTED = "released-outvoted"
    RELEASED_LATE_JOINER = "released-late-joiner"
    RELEASED_MOVED = "released-moved"
    RELEASED_GIVEN = "released-given"
    RELEASED_DONE = "released-done"
    RELEASED_UNUSED = "released-unused"
    RELEASED_OVER = "released-over"

    # ---- a peer that requested to leave waits: `run_id`, `layers`
    STATE_HANDED_OVER = "state-handed-over"
    GOES_AFTER_STEP = "goes-after-step"
    RESULT_IS_WRITTEN = "result-is-written"
    SUCCESSOR_COPIES = "successor-copies"
    """`others`: one peer, which copies the state."""
    SUCCESSOR_CHOSEN = "successor-chosen"
    SNAPSHOT_IS_WRITTEN = "snapshot-is-written"
    SNAPSHOT_IS_DUE = "snapshot-is-due"
    RUN_AWAITS_PEER = "run-awaits-peer"
    STEPS_AT_RISK = "steps-at-risk"
    """`amount`: steps. `limit`: seconds that they took. `parts`: the obstacle to a snapshot."""
    SNAPSHOT_IMPOSSIBLE = "snapshot-impossible"
    """`parts`: the last failure."""
    NO_SNAPSHOTS = "no-snapshots"
    RUN_AWAITS_OTHERS = "run-awaits-others"
    RESULT_NOT_COLLECTED = "result-not-collected"
    """`amount`: steps that would be lost; None: a snapshot is written."""
    KEEPERS_COPY = "keepers-copy"
    """Other peers copy the leaving peer's part of a snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A cause of an event or of a wait. The kind determines which fields have a meaning.

    Attributes:
        kind: Type of the reason, see `ReasonKind`.
        run_id: Run that `text` and `value` belong to; None: the run that has this reason.
        runs: Other runs.
        peers: Peers that the reason is about.
        others: Peers that take their place.
        layers: Ranges of layers.
        step: A step, or a number of committed steps.
        amount: A number that every reader may see; the kind defines its unit.
        limit: A second number of that kind, for comparison.
        num_more: Number of peers or runs that the lists leave out.
        code: Code of a `SwarmError`, or a version.
        text: Text of a peer, a client or an error, at most 1,000 characters. Only readers of the
            run, and the operator, may see it.
        text_before: The earlier text, with the same readers.
        value: A number that training produced, such as a loss, with the same readers as `text`.
        value_before: The earlier value, with the same readers.
        parts: Reasons that this one consists of.
        actor: Person who requested the change.
        given: Contribution of a leaving peer, over all runs.
    """

    kind: ReasonKind
    run_id: RunId | None = None
    runs: tuple[RunId, ...] = ()
    peers: tuple[PeerId, ...] = ()
    others: tuple[PeerId, ...] = ()
    layers: tuple[LayerRange, ...] = ()
    step: int | None = None
    amount: float | None = None
    limit: float | None = None
    num_more: int = 0
    code: str = ""
    text: str = ""
    text_before: str = ""
    value: float | None = None
    value_before: float | None = None
    parts: tuple[Reason, ...] = ()
    actor: Actor | None = None
    given: Contribution | None = None

    @property
    def wait(self) -> tuple[ReasonKind, int | None]:
        """Kind and step. A time limit starts again when these change, and only then."""
        return self.kind, self.step

    @property
    def gist(self) -> Reason:
        """The reason without the numbers and texts that change while the reason stays the same."""
        return Reason(
            kind=self.kind,
            run_id=self.run_id,
            runs=self.runs,
            peers=self.peers,
            others=self.others,
            layers=self.layers,
            step=self.step,
            code=self.code,
            parts=tuple(part.gist for part in self.parts),
            actor=self.actor,
        )

    def of(self, run_id: RunId) -> Reason:
        """Return the reason with its text and values assigned to this run."""
        return replace(self, run_id=run_id)


def error_of(error: SwarmError, kind: ReasonKind) -> Reason:
    """Return a reason with the code and the message of an error."""
    return Reason(kind=kind, code=error.code, text=error.message)


def gist_of(reason: Reason | None) -> Reason | None:
    """Return `Reason.gist`, or None."""
    return None if reason is None else reason.gist


def several(parts: Iterable[Reason | None]) -> Reason | None:
    """Return one reason for all parts that are not None; None if there are none."""
    found = tuple(part for part in parts if part is not None)
    if len(found) <= 1:
        return found[0] if found else None
    return Reason(kind=ReasonKind.SEVERAL, parts=found)
