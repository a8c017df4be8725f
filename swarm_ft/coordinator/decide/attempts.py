"""Attempts: who hosts what, from the first assignment to the one without the peers that left.

An attempt ends with `interrupt`; `advance` starts the next as soon as all it needs is there.
"""

from __future__ import annotations

from dataclasses import replace

from swarm_ft.coordinator.facts.events import RollbackRecord, Turn
from swarm_ft.coordinator.facts.state import AttemptState, Run, Saving
from swarm_ft.coordinator.plan.membership import (
    arrangement,
    layers_refusal,
    learners_of,
    patience_s,
    settled,
    with_caught_up,
    with_newcomers,
)
from swarm_ft.coordinator.plan.steps import with_ledger
from swarm_ft.ids import NO_ATTEMPT, Attempt, PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    ReleaseStage,
    StageAssignment,
    StageOffered,
)


def interrupt(turn: Turn, run: Run) -> None:
    """The present attempt cannot go on; `advance` starts the next when it can."""
    turn.put(replace(with_caught_up(run), phase=RunPhase.WAITING, notice=""))


def advance(turn: Turn) -> None:
    """Bring the active run forward if everything it waits for is there."""
    run = turn.state.active_run
    if run is None or run.phase > RunPhase.WAITING or turn.now_s < run.not_before_s:
        return
    _dismiss_misfits(turn, run)
    if run.attempt.assignments:
        _resume(turn, run)
    else:
        _place(turn, run)


def release(turn: Turn, run: Run, reason: str) -> None:
    """Let all peers of the run go."""
    for peer in run.peers:
        if peer in turn.state.members:
            turn.say(peer, ReleaseStage(run_id=run.run_id, reason=reason))


def offered(turn: Turn, run: Run, peer_id: PeerId, offer: StageOffered) -> None:
    """Pass a source's first offer on to the learners it is for; the others have the same bytes."""
    attempt = run.attempt
    learners = [t for t in attempt.learners if t.step == offer.step and peer_id in t.sources]
    for learner in learners:
        if learner.peer_id in attempt.notified:
            continue
        sources = (peer_id, *(source for source in learner.sources if source != peer_id))
        take = CatchUp(
            run_id=run.run_id, attempt=attempt.number, digest=offer.digest, sources=sources
        )
        turn.say(learner.peer_id, take)
    notified = attempt.notified | {learner.peer_id for learner in learners}
    turn.keep(replace(run, attempt=replace(attempt, notified=notified)))


def caught_up(turn: Turn, run: Run, peer_id: PeerId, message: CaughtUp) -> None:
    """A learner has its stage, and from the next plan on computes."""
    attempt, measured = run.attempt, run.measured
    if peer_id in attempt.caught_up or all(t.peer_id != peer_id for t in attempt.learners):
        return
    attempt = replace(attempt, caught_up=attempt.caught_up | {peer_id})
    measured = replace(measured, state_bytes=measured.state_bytes + message.state_bytes)
    turn.keep(replace(run, attempt=attempt, measured=measured))


def _dismiss_misfits(turn: Turn, run: Run) -> None:
    """Send away peers whose layers this run has no use for, rather than let them wait."""
    for peer_id, member in turn.state.members.items():
        refusal = layers_refusal(turn.state, run, member.hello)
        if refusal is not None:
            turn.state = turn.state.without_member(peer_id)
            turn.dismiss(peer_id, refusal)


def _resume(turn: Turn, run: Run) -> None:
    run = with_caught_up(run)  # somebody may have caught up since the last attempt ended
    grace_s = patience_s(turn.state, run, turn.now_s)
    kept = settled(turn.state, run, turn.now_s, grace_s)
    if kept is None:
        _place(turn, go_back(turn, run))
        return
    away = [a for a in kept.attempt.assignments if a.peer_id not in turn.state.members]
    if away:
        layers = ", ".join(dict.fromkeys(str(assignment.layers) for assignment in away))
        detail = f"waiting for layers {layers}: their peer may come back"
        if turn.now_s >= kept.gather_until_s:
            detail += f" ({grace_s:.0f} s)"
        _wait(turn, kept, detail)
    else:
        _assign(turn, with_newcomers(turn.state, kept), fresh=not kept.committed_steps)


def go_back(turn: Turn, run: Run) -> Run:
    """Go back to the newest snapshot, or the beginning, with whoever is there."""
    past = run.past.rolled_back
    turn.write(RollbackRecord(run.run_id, StepNumber(past.committed_steps)))
    attempt = AttemptState(number=run.attempt.number)
    back = replace(run, past=past, attempt=attempt, step=None, saving=Saving())
    turn.put(back)
    if past.snapshot is None:
        release(turn, run, "the run goes back to its beginning")
    return back


def _place(turn: Turn, run: Run) -> None:
    state = turn.state
    placement = arrangement(state, run, turn.now_s)
    if placement.assignments:
        _assign(turn, run.with_assignments(placement.assignments), fresh=True)
    else:
        busy = len(state.members.keys() & state.result_keepers)
        keep = f"; {busy} peers keep a result until it is collected" if busy else ""
        _wait(turn, run, placement.reason + keep)


def _wait(turn: Turn, run: Run, detail: str) -> None:
    if (run.phase, run.detail) != (RunPhase.WAITING, detail):
        turn.put(replace(run, phase=RunPhase.WAITING, detail=detail))


def _assign(turn: Turn, run: Run, *, fresh: bool) -> None:
    before = run
    attempt = AttemptState(
        number=Attempt(run.attempt.number + 1),
        assignments=tuple(_reachable(turn, stage) for stage in run.attempt.assignments),
        learners=() if fresh else tuple(learners_of(turn.state, run)),
    )
    detail = "peers load their stages"
    run = replace(with_ledger(run), phase=RunPhase.LOADING, detail=detail, attempt=attempt)
    turn.put(run)
    turn.write_ledger(before, run)
    _dismiss_misfits(turn, run)
    assign = _assignment(run, fresh=fresh)
    for peer in run.peers:
        turn.say(peer, assign)


def _reachable(turn: Turn, stage: StageAssignment) -> StageAssignment:
    member = turn.state.members.get(stage.peer_id)
    return replace(stage, endpoint=member.hello.endpoint if member else "")


def _assignment(run: Run, *, fresh: bool) -> Assign:
    past, attempt = run.past, run.attempt
    went_back = fresh and past.committed_steps and past.snapshot
    return Assign(
        run_id=run.run_id,
        spec=run.spec,
        attempt=attempt.number,
        stages=attempt.assignments,
        committed_steps=past.committed_steps,
        fresh=fresh,
        spec_digest=run.spec.digest(),
        learners=attempt.learners,
        saved=past.snapshot.stages if went_back and past.snapshot else (),
        last_attempt=past.last_commit.attempt if past.last_commit else NO_ATTEMPT,
    )
