"""Attempts: who hosts what, from the first assignment to the one without the peers that left.

An attempt ends with `interrupt`; `advance` starts the next as soon as all it needs is there.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.events import RollbackRecord, Turn
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.plan.holdings import with_ledger
from swarm_ft.coordinator.plan.membership import (
    arrangement,
    layers_refusal,
    patience_s,
    settled,
    takers_of,
    with_newcomers,
    with_taken,
)
from swarm_ft.ids import NO_ATTEMPT, Attempt, PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    Assign,
    ReleaseStage,
    StageAssignment,
    StageOffered,
    StageTaken,
    StepReady,
    TakeStage,
)
from swarm_ft.protocol.messages.reports import ByteCounts


def interrupt(turn: Turn, run: Run) -> None:
    """The present attempt cannot go on; `advance` starts the next when it can."""
    run = with_taken(run)
    nothing: MappingProxyType[PeerId, StepReady] = MappingProxyType({})
    turn.put(replace(run, phase=RunPhase.WAITING, notice="", loaded=frozenset(), ready=nothing))


def advance(turn: Turn) -> None:
    """Bring the active run forward if everything it waits for is there."""
    run = turn.state.active_run
    if run is None or run.phase > RunPhase.WAITING or turn.now_s < run.not_before_s:
        return
    _dismiss_misfits(turn, run)
    if run.stages:
        _resume(turn, run)
    else:
        _place(turn, run)


def release(turn: Turn, run: Run, reason: str) -> None:
    """Let all peers of the run go."""
    for peer in run.peers:
        if peer in turn.state.members:
            turn.say(peer, ReleaseStage(run_id=run.run_id, reason=reason))


def handed_over(turn: Turn, run: Run, peer_id: PeerId, message: StageOffered | StageTaken) -> None:
    """A donor offers its stage's state, or a taker has it."""
    match message:
        case StageOffered():
            _offered(turn, run, peer_id, message)
        case StageTaken():
            _taken(turn, run, peer_id, message)


def _offered(turn: Turn, run: Run, peer_id: PeerId, offer: StageOffered) -> None:
    """Pass the first offer on to the takers it is for; the other donors have the same bytes."""
    takers = [t for t in run.takers if t.step == offer.step and peer_id in t.donors]
    for taker in takers:
        if taker.peer_id in run.told:
            continue
        donors = (peer_id, *(donor for donor in taker.donors if donor != peer_id))
        turn.say(
            taker.peer_id,
            TakeStage(run_id=run.run_id, attempt=run.attempt, digest=offer.digest, donors=donors),
        )
    turn.keep(replace(run, told=run.told | {taker.peer_id for taker in takers}))


def _taken(turn: Turn, run: Run, peer_id: PeerId, message: StageTaken) -> None:
    """A taker has its stage, and from the next plan on computes."""
    if peer_id in run.taken or all(taker.peer_id != peer_id for taker in run.takers):
        return
    taken = run.taken | {peer_id}
    turn.keep(replace(run, taken=taken, state_bytes=run.state_bytes + message.state_bytes))


def _dismiss_misfits(turn: Turn, run: Run) -> None:
    """Send away peers whose layers this run has no use for, rather than let them wait."""
    for peer_id, member in turn.state.members.items():
        refusal = layers_refusal(turn.state, run, member.hello)
        if refusal is not None:
            turn.state = turn.state.without_member(peer_id)
            turn.dismiss(peer_id, refusal)


def _resume(turn: Turn, run: Run) -> None:
    run = with_taken(run)  # somebody may have caught up since the last attempt ended
    kept = settled(turn.state, run, turn.now_s)
    if kept is None:
        _place(turn, go_back(turn, run))
        return
    away = [stage for stage in kept.stages if stage.peer_id not in turn.state.members]
    if away:
        layers = ", ".join(dict.fromkeys(str(stage.layers) for stage in away))
        detail = f"waiting for layers {layers}: their peer may come back"
        if turn.now_s >= kept.gather_until_s:
            detail += f" ({patience_s(turn.state, kept, turn.now_s):.0f} s)"
        _wait(turn, kept, detail)
    else:
        _assign(turn, with_newcomers(turn.state, kept), fresh=not kept.committed_steps)


def go_back(turn: Turn, run: Run) -> Run:
    """Go back to the newest snapshot, or the beginning, with whoever is there."""
    kept = run.snapshot
    step = kept.step if kept else StepNumber(0)
    turn.write(RollbackRecord(run.run_id, step))
    before = run
    run = replace(
        run,
        stages=(),
        holds=MappingProxyType({}),
        takers=(),
        away_since_s=MappingProxyType({}),
        exported=MappingProxyType({}),
        committed_steps=step,
        committers=frozenset(),
        last_commit=kept.last_commit if kept else None,
        sent=kept.sent if kept else ByteCounts(),
        traffic=kept.traffic if kept else (),
        ledger=run.ledger if kept else None,
        saving=None,
        open_step=None,
        unlisted=(),
    )
    turn.put(run)
    if kept is None:
        release(turn, before, "the run goes back to its beginning")
    return run


def _place(turn: Turn, run: Run) -> None:
    state = turn.state
    placement = arrangement(state, run, turn.now_s)
    if placement.stages:
        _assign(turn, replace(run, stages=placement.stages), fresh=True)
    else:
        busy = sum(state.keeps_result(peer) for peer in state.members)
        keep = f"; {busy} peers keep a result until it is collected" if busy else ""
        _wait(turn, run, placement.reason + keep)


def _wait(turn: Turn, run: Run, detail: str) -> None:
    if (run.phase, run.detail) != (RunPhase.WAITING, detail):
        turn.put(replace(run, phase=RunPhase.WAITING, detail=detail))


def _assign(turn: Turn, run: Run, *, fresh: bool) -> None:
    before = run
    run = replace(
        with_ledger(run),
        stages=tuple(_reachable(turn, stage) for stage in run.stages),
        phase=RunPhase.LOADING,
        detail="peers load their stages",
        attempt=Attempt(run.attempt + 1),
        takers=() if fresh else tuple(takers_of(turn.state, run)),
        loaded=frozenset(),
        told=frozenset(),
        ready=MappingProxyType({}),
        done=MappingProxyType({}),
        away_since_s=MappingProxyType({}),
    )
    turn.put(run)
    turn.write_ledger(before, run)
    _dismiss_misfits(turn, run)
    assign = _assignment(turn, run, fresh=fresh)
    for peer in run.peers:
        turn.say(peer, assign)


def _reachable(turn: Turn, stage: StageAssignment) -> StageAssignment:
    member = turn.state.members.get(stage.peer_id)
    return replace(stage, endpoint=member.hello.endpoint if member else "")


def _assignment(turn: Turn, run: Run, *, fresh: bool) -> Assign:
    went_back = fresh and run.committed_steps and run.snapshot
    return Assign(
        run_id=run.run_id,
        spec=run.spec,
        attempt=run.attempt,
        stages=run.stages,
        committed_steps=run.committed_steps,
        fresh=fresh,
        spec_digest=run.spec.digest(),
        takers=run.takers,
        saved=run.snapshot.stages if went_back and run.snapshot else (),
        last_attempt=run.last_commit.attempt if run.last_commit else NO_ATTEMPT,
    )
