"""Reasons for decisions, as values: a kind, and typed fields. `coordinator.words` says them.

Decisions compare reasons by kind and step, never by wording. `coordinator.watching` removes the
fields that a reader may not see. The journal keeps the fields.
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
"""Peers or runs that one reason names; a longer list helps no reader."""


class ReasonKind(StrEnum):
    """The kinds of reasons. Journals and recordings hold these names: do not rename one."""

    RECORDED_TEXT = "recorded-text"
    """Text of a journal of version 8, or of a recording of version 1; its kind is unknown."""
    SEVERAL = "several"
    """All of `parts`."""

    COORDINATOR_STARTED = "coordinator-started"
    """`code`: its version."""
    DISK_LOW = "disk-low"
    """`amount`: bytes that are free on the coordinator's disk. `limit`: it refuses a job that would
    leave fewer."""
    DISK_FREE = "disk-free"
    """The disk has room again. `amount`: bytes that are free."""

    # ---- a peer joins, leaves or fails: `peers` has one; as a part of another reason, none
    PEER_JOINED = "peer-joined"
    """`layers`: the ones that it offers; none: it takes any."""
    PEER_LEFT = "peer-left"
    PEER_DISCONNECTED = "peer-disconnected"
    PEER_SILENT = "peer-silent"
    """`amount`: seconds without a message."""
    PEER_AWAITED = "peer-awaited"
    """No other peer has its stage."""
    PEER_LEAVING = "peer-leaving"
    """It asked to leave. `text`: its own reason."""
    PEER_PAUSING = "peer-pausing"
    """It asked to pause. `text`: its own reason."""
    PEER_RESUMED = "peer-resumed"
    IS_LEAVING = "is-leaving"
    """The state of a peer that asked to leave. `text`: its own reason."""
    IS_PAUSED = "is-paused"
    """The state of a peer that asked to pause. `text`: its own reason."""
    PEER_LEAVES = "peer-leaves"
    """The run goes on without it now."""
    PEER_PAUSES = "peer-pauses"
    PEER_LOST = "peer-lost"
    """A run lost a peer. `parts`: the cause, and the consequence if one is certain."""
    PEER_ERROR = "peer-error"
    """It reported an error. `code`, `text`: of the error."""
    PEER_MISFIT = "peer-misfit"
    """It cannot host the run. `text`: of its error."""
    PEER_RELIEVED = "peer-relieved"
    """It became slow. `amount`, `limit`: seconds a microbatch takes, and took at most before."""
    PEER_SUSPENDED = "peer-suspended"
    """`amount`: seconds. `parts`: the cause."""
    SUSPENDED_FROM_RUN = "suspended-from-run"
    """Only `run_id` goes on without it. `amount`: seconds. `parts`: the cause."""
    FAILED_TOO_OFTEN = "failed-too-often"
    """`amount`: failures. `parts`: the last one."""
    FAILED_FOR_OWNERS = "failed-for-owners"
    """`amount`: owners in whose runs it failed. `parts`: the last failure."""
    LATE_LOADING = "late-loading"
    """`amount`: seconds, as for the next three."""
    LATE_EXPORT = "late-export"
    LATE_STEP = "late-step"
    LATE_STATE = "late-state"
    WRONG_STATE = "wrong-state"
    """It loaded another state than the other replicas have."""
    WRONG_NORM = "wrong-norm"
    """It reported another gradient norm than the other replicas."""
    UNCONFIRMED_ERROR = "unconfirmed-error"
    """A peer on probation reports an error that no other peer reports. `text`: of the error."""
    CONFIRMED_ERROR = "confirmed-error"
    """Two `peers` report the same error at `step`. `code`, `text`: of the error."""
    REPEATED_ERROR = "repeated-error"
    """So does one of them. `amount`: times."""
    INVALID_REPORT = "invalid-report"
    """`parts`: what is invalid."""
    INVALID_BOUNDARY = "invalid-boundary"
    """`amount`: the boundary. `layers`: of its stage."""
    INVALID_COUNTS = "invalid-counts"
    """`amount`, `limit`: how many counts came, and how many were expected."""
    INVALID_SAMPLES = "invalid-samples"
    """`text`: why the set of samples is invalid."""

    # ---- what follows from the loss of a peer
    WAS_JOINING = "was-joining"
    """It had no part in the step yet."""
    TAKEN_OVER = "taken-over"
    """`others` take its part over."""
    NO_CARRIER = "no-carrier"
    """`others` may not host the stage alone."""

    # ---- why a peer may not host a stage
    GRANT_LAYERS = "grant-layers"
    """`layers`: the only ones that its invitation grants; the second, if there is one: its own."""
    NO_TOKENS = "no-tokens"
    NOT_TRUSTED = "not-trusted"
    NOT_ALONE = "not-alone"
    NOT_GRANTED = "not-granted"
    """`parts`: `layers` of the run, each with the refusal as its part."""
    REFUSED_LAYERS = "refused-layers"
    OUTSIDE_MODEL = "outside-model"
    """`layers`: the offered ones, then the model's."""
    NO_SUCH_STAGE = "no-such-stage"
    """`layers`: the offered ones, then the stages'."""

    # ---- a run waits
    COORDINATOR_RESTARTED = "coordinator-restarted"
    GATHERING = "gathering"
    """Peers joined a moment ago; more may follow."""
    MISSING_LAYERS = "missing-layers"
    """`parts`: peers that may not host them. `num_more`: such peers that are not named."""
    TOO_FEW_PEERS = "too-few-peers"
    """`amount`: peers that are there to share `layers`."""
    NO_MEMORY = "no-memory"
    """`layers` fit into the memory of no peer."""
    RESULTS_KEPT = "results-kept"
    """`amount`: peers that keep the result of another run."""
    BEHIND = "behind"
    """`runs`: at work. `num_more`: such runs that are not named. `amount`: runs before it."""
    PEER_MAY_RETURN = "peer-may-return"
    """The only peer with `layers` is away. `amount`: seconds that the run waits; None: longer."""
    AWAITS_SUSPENDED = "awaits-suspended"
    """`peers`: one. `parts`: its suspension."""
    AWAITS_KEEPERS = "awaits-keepers"
    """`peers` keep `layers` of the snapshot of `step`."""

    # ---- a run goes on
    LOADING = "loading"
    LOADING_BEST = "loading-best"
    """`step`: of the weights. `text`: name of the metric. `value`: of the metric."""
    EXPORTING = "exporting"
    PEERS_JOIN = "peers-join"
    """`peers` join at the next attempt."""
    JOINING_STAGE = "joining-stage"
    """`peers`: one, which copies the state of `layers`."""
    CAUGHT_UP = "caught-up"
    """`peers`: one, which has the state of `layers` at `step`."""
    PEERS_GIVEN = "peers-given"
    """`peers` go to a run that waits."""
    PEER_MOVES = "peer-moves"
    """`peers`: one. `layers`: old ones, new ones. `parts`: why."""
    PEER_LET_GO = "peer-let-go"
    """`peers`: one. `layers`: its own. `parts`: why."""
    LAYERS_DONE = "layers-done"
    """All outputs of a stage are stored; samples pass it no more."""
    STAGE_LEFT = "stage-left"
    """The peer of another stage leaves."""
    CUT_ANEW = "cut-anew"
    """The run goes back to `step`, and frees peers."""
    MAKES_ROOM = "makes-room"
    """Another run waits for peers."""
    MOVE_SAVES_FIRST = "move-saves-first"
    MOVE_IMPOSSIBLE = "move-impossible"
    MOVED = "moved"
    """`parts`: changes. `amount`, `limit`: seconds a step takes after and before."""
    LAYERS_MOVED = "layers-moved"
    """`layers` moved from `peers` to `others`."""
    PAUSED = "paused"
    """`step`: how many are committed."""
    PAUSE_REQUESTED = "paused-by-owner"
    """`actor`. `step`: the step that is finished first, if one is under way."""
    RESUME_REQUESTED = "resumed-by-owner"
    """`actor`."""
    RATE_CHANGED = "rate-changed"
    """`actor`. `step`: the first. `value`, `value_before`: learning rates."""
    CODECS_CHANGED = "codecs-changed"
    """`step`: the first. `text`, `text_before`: codecs. `actor`; or `parts`: the measured cost."""
    COMPRESSION_COST = "compression-cost"
    """`step`: measured. `value`: nats. `parts`: the quality."""
    QUALITY = "quality"
    """`value`, `value_before`: cost found and asked. `amount`: measured steps."""
    EVALUATED = "evaluated"
    """`step`: of the weights. `value`: loss."""
    SAVES_BEFORE_LEAVE = "saves-before-leave"
    """A snapshot is written before `peers` leave `layers`, after `step`."""
    SAVES_BEFORE_PAUSE = "saves-before-pause"
    AWAITS_PAUSED = "awaits-paused"
    """`peers` are paused, and no other peer can host `layers`."""

    # ---- snapshots
    SNAPSHOT_COMPLETE = "snapshot-complete"
    SNAPSHOT_FAILED = "snapshot-failed"
    """`step`: of the snapshot. `parts`: why."""
    BEST_NOT_SAVED = "best-not-saved"
    """`step`: of weights that may be the best. `parts`: why."""
    SAVE_FAILED = "save-failed"
    """`peers`: one, which cannot save its stage. `text`: of its error."""
    MANIFEST_FAILED = "manifest-failed"
    """`text`: of the coordinator's error."""
    NO_KEEPER = "no-keeper"
    """No peer has room for `layers`."""
    KEEPERS_GONE = "keepers-gone"
    """No peer has `layers` of the snapshot."""

    # ---- a run goes back
    WENT_BACK = "went-back"
    """`step`: to which. `amount`: from which. `parts`: why, and the remedy."""
    WEIGHTS_LOST = "weights-lost"
    """`layers`. `parts`: what became of each peer that had them."""
    STATE_LOST = "state-lost"
    """The peer is there without its stage's state."""
    SUSPENDED = "suspended"
    """The peer is suspended."""
    CANNOT_HOST = "cannot-host"
    """The peer cannot host the stage. `text`: of its error."""
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
    """`layers` of the result. `runs`: one that ends first. `step`: the run goes back to it."""

    # ---- a run ends
    QUEUE_EXPIRED = "queue-expired"
    """`amount`: seconds. `parts`: the last reason to wait."""
    NO_PEER_CAN_HOST = "no-peer-can-host"
    """`parts`: the misfit of one peer."""
    RUN_UNREADABLE = "run-unreadable"
    """The journal's record of it cannot be read. `text`: why."""
    DATA_UNREADABLE = "data-unreadable"
    """`text`: of the coordinator's error."""
    RUN_ABORTED = "run-aborted"
    """The coordinator failed to decide about it. `text`: of the error."""
    CANCELLED_BY_CLIENT = "cancelled-by-client"
    """`actor`: its owner, or any client."""
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

    # ---- a peer that asked to leave waits: `run_id`, `layers`
    STATE_HANDED_OVER = "state-handed-over"
    GOES_AFTER_STEP = "goes-after-step"
    RESULT_IS_WRITTEN = "result-is-written"
    SUCCESSOR_COPIES = "successor-copies"
    """`others`: one, which copies the state."""
    SUCCESSOR_CHOSEN = "successor-chosen"
    SNAPSHOT_IS_WRITTEN = "snapshot-is-written"
    SNAPSHOT_IS_DUE = "snapshot-is-due"
    RUN_AWAITS_PEER = "run-awaits-peer"
    STEPS_AT_RISK = "steps-at-risk"
    """`amount`: steps. `limit`: seconds that they took. `parts`: why no snapshot saves them."""
    SNAPSHOT_IMPOSSIBLE = "snapshot-impossible"
    """`parts`: the last failure."""
    NO_SNAPSHOTS = "no-snapshots"
    RUN_AWAITS_OTHERS = "run-awaits-others"
    RESULT_NOT_COLLECTED = "result-not-collected"
    """`amount`: steps that would be lost; None: a snapshot is written."""
    KEEPERS_COPY = "keepers-copy"
    """Others copy the peer's part of a snapshot."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why something happened or waits. The kind says which fields mean something.

    Attributes:
        kind: see `ReasonKind`.
        run_id: the run that `text` and `value` belong to; None: the run that has this reason.
        runs: other runs.
        peers: the peers in question.
        others: peers that take their place.
        layers: ranges of layers.
        step: a step, or how many are committed.
        amount: a number that every reader may see; the kind says of what.
        limit: so too, to compare it with.
        num_more: how many peers or runs the lists leave out.
        code: of a `SwarmError`, or a version.
        text: text of a peer, a client or an error, at most 1,000 characters. Only the run's own
            readers may see this, and the operator.
        text_before: so too, to compare it with.
        value: a number that training produced, such as a loss; for the same readers as `text`.
        value_before: so too, to compare it with.
        parts: reasons that this one consists of.
        actor: the person who requested it.
        given: the contribution of a peer that goes, of all runs.
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
        """Kind and step: a time limit starts again when these change, and only then."""
        return self.kind, self.step

    @property
    def gist(self) -> Reason:
        """The reason without its numbers and texts, which may change while it stays the same."""
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
        """The reason, whose text and values belong to this run."""
        return replace(self, run_id=run_id)


def error_of(error: SwarmError, kind: ReasonKind) -> Reason:
    """A reason with the code and the message of an error."""
    return Reason(kind=kind, code=error.code, text=error.message)


def gist_of(reason: Reason | None) -> Reason | None:
    """See `Reason.gist`."""
    return None if reason is None else reason.gist


def several(parts: Iterable[Reason | None]) -> Reason | None:
    """Join reasons into one; return None if there are none."""
    found = tuple(part for part in parts if part is not None)
    if len(found) <= 1:
        return found[0] if found else None
    return Reason(kind=ReasonKind.SEVERAL, parts=found)
