"""English sentences for reasons; no other module has any.

Sentences begin with a small letter, since logs and the page put names in front of them. A reason
that `watching` has redacted has a shorter sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import SteeringRequest
from swarm_ft.errors import NonFinite, NonFiniteWeights, OutOfMemory
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import CompressionCost
from swarm_ft.protocol.messages.events import Actor, EventKind, Rollback, Steered
from swarm_ft.protocol.spec.bounds import MAX_TEXT_BYTES, cut_text


def as_text(reason: Reason | None) -> str:
    """Return a reason as text that fits into a message; empty for None."""
    if reason is None:
        return ""
    is_about_reader = reason.kind in _OF_PEER and not reason.peers
    sentence = _sentence(reason)
    return _clipped(f"this peer {sentence}" if is_about_reader else sentence)


def event_in_words(kind: EventKind, reason: Reason | None) -> str:
    """Return the text of an event's reason; without a reason, the text of the event's kind."""
    return as_text(reason) or _EVENTS.get(kind, "")


def steered(request: SteeringRequest) -> Steered | None:
    """Return the message for a steering request; None if the request names no actor."""
    actor = request.reason.actor
    if actor is None:
        return None
    return Steered(
        number=request.number,
        kind=request.kind,
        actor=actor,
        step=StepNumber(request.step),
        words=as_text(request.reason),
    )


def went_back(reason: Reason) -> Rollback:
    """Return the message for a reason of kind WENT_BACK."""
    why, remedy = reason.parts
    return Rollback(
        from_step=StepNumber(int(reason.amount or 0)),
        to_step=StepNumber(reason.step or 0),
        why=as_text(why),
        remedy=as_text(remedy),
    )


_EVENTS = {
    EventKind.RUN_SUBMITTED: "a client submitted the run",
    EventKind.RUN_QUEUED: "the run waits for its turn",
    EventKind.RUN_TRAINING: "all peers are ready, the run trains",
}


def _clipped(text: str) -> str:
    """Cut a text to the length that a message may hold."""
    return cut_text("".join(c if c.isprintable() else " " for c in text), MAX_TEXT_BYTES)


# ---- parts of sentences


def _sentence(reason: Reason) -> str:
    if reason.kind in _OF_PEER:
        gave = f"; it gave {reason.given}" if reason.given is not None else ""
        predicate = _OF_PEER[reason.kind](reason) + gave
        return f"{_subject(reason)} {predicate}" if reason.peers else predicate
    return _OTHERS[reason.kind](reason)


def _subject(reason: Reason) -> str:
    """Return a text such as `peer b (layers 2-4)`."""
    has_stage = reason.layers and reason.kind not in (Kind.PEER_JOINED, Kind.GRANT_LAYERS)
    return f"{_peers(reason)} (layers {_layers(reason)})" if has_stage else _peers(reason)


def _peers(reason: Reason) -> str:
    noun = "peer" if len(reason.peers) == 1 else "peers"
    return f"{noun} {', '.join(reason.peers)}"


def _verb(reason: Reason, verb: str) -> str:
    return f"{verb}s" if len(reason.peers) == 1 else verb


def _layers(reason: Reason) -> str:
    return ", ".join(map(str, reason.layers))


def _both(names: Iterable[str]) -> str:
    return " and ".join(names)


def _parts(reason: Reason, separator: str = "; ") -> str:
    return separator.join(map(_sentence, reason.parts))


def _because(sentence: str, reason: Reason) -> str:
    """Append the parts as the cause, if there are any."""
    return f"{sentence}: {_parts(reason)}" if reason.parts else sentence


def _with_text(sentence: str, reason: Reason) -> str:
    return f"{sentence}: {reason.text}" if reason.text else sentence


def _and_more(listed: str, num_more: int, noun: str) -> str:
    return f"{listed} and {num_more} {noun}" if num_more else listed


def _count(number: float | None, noun: str) -> str:
    whole = int(number or 0)
    return f"1 {noun}" if whole == 1 else f"{whole} {noun}s"


def _seconds(number: float | None) -> str:
    return f"{number or 0:.0f} s"


def _megabytes(num_bytes: float | None) -> str:
    return f"{(num_bytes or 0) / 1e6:,.0f} MB"


def _hours(number: float | None) -> str:
    return f"{(number or 0) / 3600:g} h"


# ---- sentences whose subject is a peer


def _error(reason: Reason) -> str:
    return _with_text(f"reported the error '{reason.code}'" if reason.code else "failed", reason)


def _joined(reason: Reason) -> str:
    offer = f"offers layers {_layers(reason)}" if reason.layers else "takes any layers"
    return f"joined: {offer}"


def _suspended(reason: Reason) -> str:
    return _because(f"is suspended for {_seconds(reason.amount)}", reason)


def _suspended_from_run(reason: Reason) -> str:
    run = "this run" if reason.run_id is None else reason.run_id
    return _because(f"is suspended from {run} alone for {_seconds(reason.amount)}", reason)


def _relieved(reason: Reason) -> str:
    return (
        f"is slow: {reason.amount or 0:.1f} s per microbatch, at most {reason.limit or 0:.1f} s "
        "before; other replicas compute most of its microbatches"
    )


def _grant_layers(reason: Reason) -> str:
    granted, *own = map(str, reason.layers)
    offered = f", and offers layers {own[0]}" if own else ""
    return f"may host layers {granted} only{offered}"


_OF_PEER: Mapping[Kind, Callable[[Reason], str]] = {
    Kind.PEER_JOINED: _joined,
    Kind.PEER_LEFT: lambda _: "left",
    Kind.PEER_DISCONNECTED: lambda _: "lost its connection",
    Kind.PEER_SILENT: lambda r: f"sent no message for {_seconds(r.amount)}",
    Kind.PEER_AWAITED: lambda _: "is late, and no other peer has its stage",
    Kind.PEER_LEAVING: lambda r: _with_text("asked to leave", r),
    Kind.PEER_PAUSING: lambda r: _with_text("asked to pause", r),
    Kind.PEER_RESUMED: lambda _: "works again",
    Kind.IS_LEAVING: lambda r: _with_text("leaves", r),
    Kind.IS_PAUSED: lambda r: _with_text("paused", r),
    Kind.PEER_LEAVES: lambda _: "leaves",
    Kind.PEER_PAUSES: lambda _: "pauses",
    Kind.PEER_LOST: _parts,
    Kind.PEER_ERROR: _error,
    Kind.PEER_RELIEVED: _relieved,
    Kind.PEER_SUSPENDED: _suspended,
    Kind.SUSPENDED_FROM_RUN: _suspended_from_run,
    Kind.FAILED_FOR_OWNERS: lambda r: (
        f"failed in the runs of {_count(r.amount, 'owner')}, last it {_parts(r)}"
    ),
    Kind.FAILED_TOO_OFTEN: lambda r: f"failed {_count(r.amount, 'time')}, last it {_parts(r)}",
    Kind.LATE_LOADING: lambda r: f"was not ready after {_seconds(r.amount)}",
    Kind.LATE_EXPORT: lambda r: f"did not write its result in {_seconds(r.amount)}",
    Kind.LATE_STEP: lambda r: f"delayed step {r.step} by {_seconds(r.amount)}",
    Kind.LATE_STATE: lambda r: f"did not copy its stage's state in {_seconds(r.amount)}",
    Kind.WRONG_STATE: lambda _: "copied a state that differs from its replicas'",
    Kind.WRONG_NORM: lambda _: "reported a gradient norm that differs from its replicas'",
    Kind.UNCONFIRMED_ERROR: lambda r: _with_text("reported an error that no other peer has", r),
    Kind.INVALID_REPORT: lambda r: _because("sent an invalid report", r),
    Kind.CANNOT_HOST: lambda r: _with_text("cannot host its stage", r),
    Kind.STATE_LOST: lambda _: "no longer has the weights",
    Kind.SUSPENDED: lambda _: "is suspended",
    Kind.GRANT_LAYERS: _grant_layers,
    Kind.NO_TOKENS: lambda _: "may not see tokens",
    Kind.NOT_TRUSTED: lambda _: "is not listed in the job's --private-ends",
    Kind.NOT_ALONE: lambda _: "may not host a stage alone",
    Kind.SAVE_FAILED: lambda r: _with_text("cannot save its stage", r),
}


# ---- all other sentences


_RUN_FAILURES = {
    NonFiniteWeights.code: (
        "its model cannot be trained",
        "Submit the job with another checkpoint. ",
    ),
    NonFinite.code: (
        "the run diverged",
        "Lower --lr, raise --warmup-steps or keep --clip-grad-norm, and look for extreme values "
        "in the model and the data. ",
    ),
    OutOfMemory.code: (
        "the run needs more memory than its peers have",
        "Lower --micro-batch-size or --seq-length, or add peers with more memory. ",
    ),
}
"""A description and an advice for each error code."""


def _run_failed(reason: Reason) -> str:
    """Return the sentence of a run that failed through its own fault."""
    what, advice = _RUN_FAILURES.get(reason.code, ("the run fails wherever it is hosted", ""))
    is_placed = "step " in reason.text or reason.code == NonFiniteWeights.code
    where = "" if is_placed else f"step {reason.step}: "
    error = reason.text or f"the error '{reason.code}'"
    times = f", {_count(reason.amount, 'time')}" if reason.amount else ""
    return f"{what}: {where}{error}. {advice}Reported by {_peers(reason)}{times}"


def _missing_layers(reason: Reason) -> str:
    named = _parts(reason, ", ")
    more = f", and {_count(reason.num_more, 'more peer')} may not host them"
    why = f": {named}{more if reason.num_more else ''}" if named else ""
    return f"waiting for layers {_layers(reason)}{why}"


def _behind(reason: Reason) -> str:
    if not reason.runs and not reason.amount:
        return "next in the queue"
    place = f"place {int(reason.amount or 0) + 1}"
    others = "other" if reason.num_more == 1 else "others"
    runs = _and_more(_both(reason.runs), reason.num_more, others)
    return f"{place}, after {runs}" if reason.runs else place


def _may_return(reason: Reason) -> str:
    limit = "" if reason.amount is None else f" ({_seconds(reason.amount)})"
    return f"waiting for layers {_layers(reason)}: their peer may come back{limit}"


def _loading_best(reason: Reason) -> str:
    metric = f"{reason.text} " if reason.text else ""
    found = "" if reason.value is None else f", {metric}{reason.value:.4g}"
    return f"peers load the best weights (step {reason.step}{found})"


def _peer_moves(reason: Reason) -> str:
    old, new = reason.layers
    return _because(f"{_peers(reason)} moves from layers {old} to layers {new}", reason)


def _moved(reason: Reason) -> str:
    changes = _and_more(_parts(reason, ", "), reason.num_more, "more such changes")
    times = f"{reason.amount or 0:.2g} s instead of {reason.limit or 0:.2g} s"
    return f"{changes}: a step is expected to take {times}"


def _layers_moved(reason: Reason) -> str:
    before, after = _both(reason.peers), _both(reason.others)
    if before and after:
        change = f"moved from {before} to {after}"
    else:
        change = f"have {after} as a replica too" if after else f"lose the replica {before}"
    return f"layers {_layers(reason)} {change}"


_ACTORS = {
    Actor.CLIENT: "a client",
    Actor.OWNER: "the run's owner",
    Actor.OPERATOR: "the swarm's operator on the coordinator's page",
}


def _by(reason: Reason, verb: str = "") -> str:
    """Return a text such as `; set by the run's owner`; reasons of older journals name no actor."""
    return f"{verb} by {_ACTORS[reason.actor]}" if reason.actor else ""


def _pause_requested(reason: Reason) -> str:
    when = "" if reason.step is None else f", once step {reason.step} is committed"
    return f"paused{_by(reason)}{when}"


def _rate_changed(reason: Reason) -> str:
    rate = "" if reason.value is None else f" {reason.value:.4g}"
    before = "" if reason.value_before is None else f", {reason.value_before:.4g} before"
    return f"learning rate{rate} from step {reason.step} on{before}{_by(reason, '; set')}"


def _codecs_changed(reason: Reason) -> str:
    codecs = f" {reason.text}" if reason.text else " change"
    before = f", {reason.text_before} before" if reason.text_before else ""
    sentence = f"codecs{codecs} from step {reason.step} on{before}{_by(reason, '; set')}"
    return _because(sentence, reason)


def _compression_cost(reason: Reason) -> str:
    cost = "" if reason.value is None else f" {reason.value:.2g} nats"
    quality = f"; {_parts(reason)}" if reason.parts else ""
    return f"compression added{cost} to the loss of step {reason.step}{quality}"


def _quality(reason: Reason) -> str:
    if reason.value is None or reason.value_before is None:
        return "the codecs follow the quality that the job requests"
    measured = int(reason.amount or 0)
    return str(CompressionCost(asked=reason.value_before, cost=reason.value, num_measured=measured))


def _evaluated(reason: Reason) -> str:
    loss = "" if reason.value is None else f": loss {reason.value:.4g}"
    return f"evaluated after step {reason.step}{loss}"


def _went_back(reason: Reason) -> str:
    return went_back(reason).words


def _weights_lost(reason: Reason) -> str:
    return f"no peer has the weights of layers {_layers(reason)} any more: {_parts(reason, ', ')}"


def _save_steps(reason: Reason) -> str:
    now = f" {reason.amount:.0f} now" if reason.amount else " for the job"
    return (
        f"another peer for layers {_layers(reason)}, or more frequent snapshots (--save-steps{now})"
    )


def _result_ready(reason: Reason) -> str:
    words = "the result can be fetched"
    if not reason.layers:
        return words
    return f"{words}; replicas of layers {_layers(reason)} have different results, the first counts"


def _result_lost(reason: Reason) -> str:
    words = f"the result of layers {_layers(reason)} is lost"
    if reason.runs:
        return f"{words}; the run repeats it after {reason.runs[0]}"
    return words if reason.step is None else f"{words}; the run goes back to step {reason.step}"


def _queue_expired(reason: Reason) -> str:
    return _because(f"no peers could host it for {_hours(reason.amount)}", reason)


def _outside_model(reason: Reason) -> str:
    offered, *model = map(str, reason.layers)
    has = f", which has layers {model[0]}" if model else ""
    return f"layers {offered}: outside the model of {reason.run_id}{has}"


def _no_such_stage(reason: Reason) -> str:
    offered, *stages = map(str, reason.layers)
    return f"layers {offered}: match no stage of {reason.run_id} ({', '.join(stages)})"


def _misfit(reason: Reason) -> str:
    subject = _peers(reason) if reason.peers else "this peer"
    return f"{subject} cannot host {'it' if reason.run_id is None else reason.run_id}"


def _not_granted(reason: Reason) -> str:
    return f"{reason.run_id}: {_parts(reason)}"


def _of_own_run(sentence: str) -> Callable[[Reason], str]:
    """Return a renderer whose sentences begin with the run and the leaving peer's layers."""
    return lambda reason: f"{reason.run_id}, layers {_layers(reason)}: {sentence}"


def _successor(verb: str) -> Callable[[Reason], str]:
    return lambda r: _of_own_run(f"peer {_both(r.others)} {verb}")(r)


def _steps_at_risk(reason: Reason) -> str:
    lost = f"{_count(reason.amount, 'step')} ({_seconds(reason.limit)}) would be lost"
    return _of_own_run(f"no peer can take over, and {_parts(reason)}: {lost}")(reason)


def _snapshot_impossible(reason: Reason) -> str:
    why = f" ({_parts(reason)})" if reason.parts else ""
    return f"no snapshot can be written{why}"


def _no_keeper(reason: Reason) -> str:
    """Return the sentence; reasons of older journals have no number of peers that stay."""
    layers = _layers(reason)
    if reason.amount == 0:
        return f"no peer stays that could keep layers {layers}"
    return f"no peer that stays has room for layers {layers} (--keep-disk)"


def _not_collected(reason: Reason) -> str:
    words = f"{reason.run_id}: its client has not fetched the result of layers {_layers(reason)}"
    if reason.amount is None:
        return f"{words}; a snapshot is being written, from which peers can repeat it"
    return f"{words}, and no other peer has it: {_count(reason.amount, 'step')} would be lost"


def _fixed(sentence: str) -> Callable[[Reason], str]:
    return lambda _: sentence


def _of_layers(before: str, after: str = "") -> Callable[[Reason], str]:
    return lambda r: f"{before} layers {_layers(r)}{after}"


_OTHERS: Mapping[Kind, Callable[[Reason], str]] = {
    Kind.RECORDED_TEXT: lambda r: r.text,
    Kind.SEVERAL: _parts,
    Kind.COORDINATOR_STARTED: lambda r: f"the coordinator started, swarm-ft {r.code}",
    Kind.DISK_LOW: lambda r: (
        f"the coordinator's disk is nearly full: {_megabytes(r.amount)} free; it refuses jobs that "
        f"would leave less than {_megabytes(r.limit)}, which current runs need; free some space"
    ),
    Kind.DISK_FREE: lambda r: f"the coordinator's disk has room again: {_megabytes(r.amount)} free",
    Kind.CONFIRMED_ERROR: _run_failed,
    Kind.REPEATED_ERROR: _run_failed,
    # ---- what follows from the loss of a peer
    Kind.WAS_JOINING: _fixed("it was joining and had no part in the step"),
    Kind.TAKEN_OVER: lambda r: f"its part goes to {_both(r.others)}",
    Kind.NO_CARRIER: lambda r: f"{_both(r.others)} may not host a stage alone",
    Kind.INVALID_BOUNDARY: lambda r: (
        f"buffers of boundary {int(r.amount or 0)}, which its stage ({_layers(r)}) does not have"
    ),
    Kind.INVALID_COUNTS: lambda r: (
        f"expected {int(r.limit or 0)} counts of an evaluation, got {int(r.amount or 0)}"
    ),
    Kind.INVALID_SAMPLES: lambda r: _with_text("set of samples", r),
    # ---- why a peer may not host a stage
    Kind.PEER_MISFIT: lambda r: _with_text(_misfit(r), r),
    Kind.NOT_GRANTED: _not_granted,
    Kind.REFUSED_LAYERS: lambda r: f"layers {_layers(r)}: this peer {_parts(r)}",
    Kind.OUTSIDE_MODEL: _outside_model,
    Kind.NO_SUCH_STAGE: _no_such_stage,
    # ---- a run waits
    Kind.COORDINATOR_RESTARTED: _fixed("the coordinator restarted"),
    Kind.GATHERING: _fixed("gathering peers"),
    Kind.MISSING_LAYERS: _missing_layers,
    Kind.TOO_FEW_PEERS: lambda r: (
        f"waiting for peers: {int(r.amount or 0)} to share layers {_layers(r)}"
    ),
    Kind.NO_MEMORY: _of_layers("waiting for more peers:", " fit into no peer's memory"),
    Kind.RESULTS_KEPT: lambda r: (
        f"{_count(r.amount, 'peer')} {'keeps' if r.amount == 1 else 'keep'} a result until a "
        "client fetches it"
    ),
    Kind.BEHIND: _behind,
    Kind.PEER_MAY_RETURN: _may_return,
    Kind.AWAITS_SUSPENDED: lambda r: f"waiting for {_peers(r)}, which {_parts(r)}",
    Kind.AWAITS_KEEPERS: lambda r: (
        f"waiting for {_peers(r)} with layers {_layers(r)} of the snapshot of step {r.step}"
    ),
    # ---- a run goes on
    Kind.LOADING: _fixed("peers load their stages"),
    Kind.LOADING_BEST: _loading_best,
    Kind.EXPORTING: _fixed("peers write their stages"),
    Kind.PEERS_JOIN: lambda r: f"{_peers(r)} {'joins' if len(r.peers) == 1 else 'join'}",
    Kind.JOINING_STAGE: lambda r: (
        f"{_peers(r)} joins layers {_layers(r)}: it copies the state while the others train"
    ),
    Kind.CAUGHT_UP: lambda r: (
        f"{_subject(r)} has caught up at step {r.step} and computes from now on"
    ),
    Kind.PEERS_GIVEN: lambda r: (
        f"{_peers(r)} {'goes' if len(r.peers) == 1 else 'go'} to a waiting run, whose owner has "
        "fewer peers"
    ),
    Kind.PEER_MOVES: _peer_moves,
    Kind.PEER_LET_GO: lambda r: _because(f"the run releases {_subject(r)}", r),
    Kind.LAYERS_DONE: _fixed("all outputs of these layers are stored"),
    Kind.STAGE_LEFT: _fixed("the peer of another stage leaves"),
    Kind.CUT_ANEW: lambda r: f"repartitioned at step {r.step}: another run waits for peers",
    Kind.MAKES_ROOM: _fixed("another run waits for peers"),
    Kind.MOVE_SAVES_FIRST: _fixed("waiting for a snapshot before layers move to other stages"),
    Kind.MOVE_IMPOSSIBLE: _fixed(
        "layers do not move: their new host left, or no snapshot can be written"
    ),
    Kind.MOVED: _moved,
    Kind.LAYERS_MOVED: _layers_moved,
    Kind.PAUSED: lambda r: f"paused after step {r.step}; nothing is lost",
    Kind.PAUSE_REQUESTED: _pause_requested,
    Kind.RESUME_REQUESTED: lambda r: f"resumed{_by(r)}",
    Kind.RATE_CHANGED: _rate_changed,
    Kind.CODECS_CHANGED: _codecs_changed,
    Kind.COMPRESSION_COST: _compression_cost,
    Kind.QUALITY: _quality,
    Kind.EVALUATED: _evaluated,
    Kind.SAVES_BEFORE_LEAVE: lambda r: (
        f"waiting for a snapshot before {_subject(r)} {_verb(r, 'leave')}"
    ),
    Kind.SAVES_BEFORE_PAUSE: lambda r: (
        f"waiting for a snapshot before {_subject(r)} {_verb(r, 'pause')}"
    ),
    Kind.AWAITS_PAUSED: lambda r: f"waiting for {_subject(r)}, paused; no other peer can take over",
    # ---- snapshots
    Kind.SNAPSHOT_COMPLETE: lambda r: f"the snapshot of step {r.step} is complete",
    Kind.SNAPSHOT_FAILED: lambda r: _because(f"the snapshot of step {r.step} failed", r),
    Kind.BEST_NOT_SAVED: lambda r: _because(
        f"no snapshot has the weights of step {r.step}, so they cannot be the best", r
    ),
    Kind.MANIFEST_FAILED: lambda r: _with_text("the coordinator cannot write its manifest", r),
    Kind.NO_KEEPER: _no_keeper,
    Kind.KEEPERS_GONE: _of_layers("no peer has", " of the snapshot any more"),
    # ---- a run goes back
    Kind.WENT_BACK: _went_back,
    Kind.WEIGHTS_LOST: _weights_lost,
    Kind.KEEPERS_AWAY: lambda r: (
        f"{_peers(r)} with layers {_layers(r)} of the snapshot of step {r.step} "
        f"{'is' if len(r.peers) == 1 else 'are'} away"
    ),
    Kind.REMEDY_SAVE_STEPS: _save_steps,
    Kind.REMEDY_SNAPSHOTS: lambda r: (
        f"another peer for layers {_layers(r)}, or snapshots (--save-steps for the job, "
        "--snapshots for the coordinator and all peers)"
    ),
    # ---- a result
    Kind.RESULT_READY: _result_ready,
    Kind.RESULT_LOST: _result_lost,
    # ---- a run ends
    Kind.QUEUE_EXPIRED: _queue_expired,
    Kind.NO_PEER_CAN_HOST: lambda r: _because("no peer can host it", r),
    Kind.RUN_UNREADABLE: lambda r: _with_text("its record in the journal cannot be read", r),
    Kind.DATA_UNREADABLE: lambda r: _with_text("its data cannot be read", r),
    Kind.RUN_ABORTED: lambda r: r.text or "the coordinator ended the run after an internal error",
    Kind.CANCELLED_BY_CLIENT: lambda r: f"cancelled{_by(r) or ' by a client'}",
    Kind.CANCELLED_BY_OPERATOR: lambda r: f"cancelled{_by(r) or ' by the operator'}",
    Kind.RESULT_COLLECTED: _fixed("a client fetched the result, and its peers deleted it"),
    Kind.RESULT_EXPIRED: lambda r: f"no client fetched its result in {_hours(r.amount)}",
    # ---- a peer is released from a run
    Kind.RELEASED_LEAVER: _fixed("this peer asked to leave"),
    Kind.RELEASED_AT_START: _fixed("the run goes back to its beginning"),
    Kind.RELEASED_OUTVOTED: _fixed("most replicas of this peer's stage wrote another result"),
    Kind.RELEASED_LATE_JOINER: _fixed("the run was trained before this peer had its state"),
    Kind.RELEASED_MOVED: _fixed("other peers host its layers now"),
    Kind.RELEASED_GIVEN: _fixed("another run waits for this peer"),
    Kind.RELEASED_DONE: _fixed("all outputs of its layers are stored"),
    Kind.RELEASED_UNUSED: _fixed("the run no longer needs this peer"),
    Kind.RELEASED_OVER: _fixed("the run is over"),
    # ---- a peer that requested to leave waits
    Kind.STATE_HANDED_OVER: _of_own_run("other peers have the state"),
    Kind.GOES_AFTER_STEP: _of_own_run("nothing is lost; other peers continue after this step"),
    Kind.RESULT_IS_WRITTEN: _of_own_run("training is over, and peers write the result"),
    Kind.SUCCESSOR_COPIES: _successor("copies the state"),
    Kind.SUCCESSOR_CHOSEN: _successor("copies the state after this step"),
    Kind.SNAPSHOT_IS_WRITTEN: _of_own_run("no peer can take over; a snapshot is being written"),
    Kind.SNAPSHOT_IS_DUE: _of_own_run("no peer can take over; a snapshot follows this step"),
    Kind.RUN_AWAITS_PEER: _of_own_run(
        "no peer can take over; after this step the run waits for this peer"
    ),
    Kind.STEPS_AT_RISK: _steps_at_risk,
    Kind.SNAPSHOT_IMPOSSIBLE: _snapshot_impossible,
    Kind.NO_SNAPSHOTS: _fixed("no snapshots are kept"),
    Kind.RUN_AWAITS_OTHERS: _fixed("the run waits for other peers"),
    Kind.RESULT_NOT_COLLECTED: _not_collected,
    Kind.KEEPERS_COPY: lambda r: (
        f"{r.run_id}: other peers copy its snapshot of layers {_layers(r)}"
    ),
}
