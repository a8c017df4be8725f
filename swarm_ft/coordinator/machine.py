"""The coordinator's decisions: `decide(state, event, now) -> (state, effects)`. No I/O, no clock.

A run goes QUEUED -> WAITING -> LOADING -> TRAINING -> EXPORTING -> FINISHED -> COLLECTED, and may
end as CANCELLED or FAILED. Inside TRAINING every step is plan -> run -> ready -> commit:

    event                      does
    -------------------------  ----------------------------------------------------------------
    all stages placed          attempt + 1; Assign to all                            -> LOADING
    StageReady from all        PlanStep of the first uncommitted step                -> TRAINING
    StepReady from all         commit: global clip factor, learning rate; plan the next
    last step committed        ExportStage to all                                    -> EXPORTING
    StageExported from all     the result can be fetched                             -> FINISHED
    a replica is lost          attempt + 1 without it; the step that did not commit runs again
    a stage's last one is lost wait for it; then go back to the weights the run began with
    a peer comes (back)        while others load, or when the next step begins: attempt + 1 with it

Whatever an event makes true is written (Write) before it is said (Say, Publish).
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.membership import (
    SILENT_S,
    holds_last_commit,
    is_wanted,
    layers_refusal,
    loss_in_words,
    missed_last_commit,
    refusal_of,
    settled,
    takers_of,
    with_exports_of,
    with_newcomers,
)
from swarm_ft.coordinator.placement import place, place_on
from swarm_ft.coordinator.state import (
    CommitRecord,
    Dismiss,
    Effect,
    Event,
    Member,
    MemberRecord,
    PeerLost,
    PeerSaid,
    PlanRecord,
    Publish,
    ResultCollected,
    RollbackRecord,
    Run,
    RunCancelled,
    RunRecord,
    RunSubmitted,
    Say,
    Snapshot,
    SnapshotRecord,
    SnapshotWritten,
    SwarmState,
    Tick,
    Write,
    WriteSnapshot,
)
from swarm_ft.coordinator.steps import commit_step, plan_step, tokens_for
from swarm_ft.errors import (
    BadInput,
    NonFinite,
    OutOfTurn,
    SwarmError,
    Unavailable,
    from_code,
)
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages import (
    NO_ATTEMPT,
    Assign,
    ExportStage,
    FromPeer,
    PeerGoodbye,
    PeerHello,
    ReleaseStage,
    RunPhase,
    SavedStage,
    SaveStage,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StageSaved,
    StepReady,
    TakeStage,
    ToPeer,
)

RETRY_S = 2.0
"""Rest after an attempt that a peer could not go on with, before the next one."""


def decide(state: SwarmState, event: Event, now_s: float) -> tuple[SwarmState, list[Effect]]:
    """What the coordinator knows and does after an event.

    Args:
        state: what it knew.
        event: what happened.
        now_s: monotonic seconds.
    """
    turn = _Turn(state, now_s)
    match event:
        case PeerSaid(peer_id, message):
            turn.peer_said(peer_id, message)
        case PeerLost(peer_id):
            turn.peer_gone(peer_id, "is gone", away_since_s=now_s)
        case RunSubmitted(run_id, spec):
            turn.put(Run(run_id=run_id, spec=spec))
        case RunCancelled(run_id):
            turn.end(run_id, RunPhase.CANCELLED, "cancelled by a client")
        case ResultCollected(run_id):
            turn.collected(run_id)
        case SnapshotWritten(run_id, snapshot):
            turn.snapshot_written(run_id, snapshot)
        case Tick():
            turn.dismiss_silent()
    turn.advance()
    return turn.state, turn.effects


class _Turn:
    """One call of `decide`: the state as it changes, and the effects so far."""

    def __init__(self, state: SwarmState, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    # ---- what peers say

    def peer_said(self, peer_id: PeerId, message: FromPeer) -> None:
        self.state = self.state.with_heard(peer_id, self.now_s)
        run = self.state.active_run
        match message:
            case PeerHello():
                self._joined(message)
            case PeerGoodbye():
                self.peer_gone(peer_id, "left", away_since_s=-math.inf)
            case StageReady() if run and self._is_current(run, peer_id, message):
                self._stage_ready(run, peer_id, message)
            case StageOffered() if run and self._is_current(run, peer_id, message):
                self._stage_offered(run, peer_id, message)
            case StepReady() if run and self._is_current(run, peer_id, message):
                self._step_ready(run, peer_id, message)
            case StageFailed() if run and self._is_current(run, peer_id, message):
                self._stage_failed(run, peer_id, from_code(message.code, message.message))
            case StageSaved() if run and run.run_id == message.name.run_id and peer_id in run.peers:
                self._stage_saved(run, message)
            case StageExported() if run and run.run_id == message.run_id and peer_id in run.peers:
                self._stage_exported(run, peer_id)
            case _:
                pass  # of an attempt, or a run, that is over

    @staticmethod
    def _is_current(
        run: Run, peer_id: PeerId, message: StageReady | StepReady | StageFailed | StageOffered
    ) -> bool:
        named = (message.run_id, message.attempt)
        return named == (run.run_id, run.attempt) and peer_id in run.peers

    def _joined(self, hello: PeerHello) -> None:
        self.state = with_exports_of(self.state, hello)
        refusal = refusal_of(self.state, hello)
        if refusal is not None:
            self.effects.append(Dismiss(hello.peer_id, refusal))
            return
        self.state = self.state.with_member(
            Member(hello=hello, joined_at_s=self.now_s, heard_at_s=self.now_s)
        )
        self.effects.append(Write(MemberRecord(hello, joined=True)))
        run = self.state.active_run
        if run is not None:
            self._came(run, hello)
        if hello.held and not is_wanted(self.state, hello.peer_id, hello.held):
            release = ReleaseStage(run_id=hello.held.run_id, reason="the run needs it no more")
            self._say(hello.peer_id, release)

    def _came(self, run: Run, hello: PeerHello) -> None:
        """A peer came, or came back: what it holds decides what can be done with it."""
        peer = hello.peer_id
        holds = {name: steps for name, steps in run.holds.items() if name != peer}
        if hello.held and missed_last_commit(run, hello.held, peer) and run.last_commit:
            self._say(peer, run.last_commit)
            holds[peer] = run.committed_steps
        elif hello.held and holds_last_commit(run, hello.held):
            holds[peer] = run.committed_steps
        away = {name: since for name, since in run.away_since_s.items() if name != peer}
        run = replace(run, holds=MappingProxyType(holds), away_since_s=MappingProxyType(away))
        is_loading = run.phase is RunPhase.LOADING
        if peer in run.peers or (is_loading and with_newcomers(self.state, run) is not run):
            self._interrupt(run)
        else:
            self.state = self.state.with_run(run)

    def _stage_ready(self, run: Run, peer_id: PeerId, ready: StageReady) -> None:
        if run.phase is not RunPhase.LOADING:
            return
        holds = {**run.holds, peer_id: run.committed_steps}
        run = replace(
            run,
            loaded=run.loaded | {peer_id},
            holds=MappingProxyType(holds),
            state_bytes=run.state_bytes + (ready.state_bytes if peer_id not in run.loaded else 0),
        )
        if run.loaded >= set(run.peers):
            run = replace(run, phase=RunPhase.TRAINING, detail="", step_began_s=self.now_s)
            self.put(run)
            self._plan_or_export(run)
        else:
            self.state = self.state.with_run(run)

    def _stage_offered(self, run: Run, peer_id: PeerId, offer: StageOffered) -> None:
        """Pass the first offer on to the stage's takers; the other donors have the same bytes."""
        stage = next(stage for stage in run.pipeline if peer_id in stage.peers)
        takers = set(takers_of(self.state, run)) & set(stage.peers)
        is_first = run.phase is RunPhase.LOADING and stage.layers not in run.offered
        if peer_id in takers or not is_first:
            return
        self.state = self.state.with_run(replace(run, offered=run.offered | {stage.layers}))
        donors = tuple(peer for peer in stage.peers if peer not in takers)
        first_donors = (peer_id, *(donor for donor in donors if donor != peer_id))
        take = TakeStage(
            run_id=run.run_id, attempt=run.attempt, digest=offer.digest, donors=first_donors
        )
        for taker in stage.peers:
            if taker in takers:
                self._say(taker, take)

    def _step_ready(self, run: Run, peer_id: PeerId, message: StepReady) -> None:
        if run.phase is not RunPhase.TRAINING or message.step != run.committed_steps:
            return
        run = replace(run, ready=MappingProxyType({**run.ready, peer_id: message}))
        self.state = self.state.with_run(run)
        if run.ready.keys() >= set(run.peers):
            self._commit(run)

    def _stage_failed(self, run: Run, peer_id: PeerId, error: SwarmError) -> None:
        if isinstance(error, NonFinite):
            self.end(run.run_id, RunPhase.FAILED, f"peer {peer_id}: {error.message}")
        elif isinstance(error, BadInput):
            self.peer_gone(peer_id, f"cannot host them: {error.message}", away_since_s=-math.inf)
            self.effects.append(Dismiss(peer_id, error))
        elif isinstance(error, OutOfTurn) and run.phase is RunPhase.LOADING:
            # What it holds is not what is known here; start from what is known.
            holds = {peer: steps for peer, steps in run.holds.items() if peer != peer_id}
            self._interrupt(replace(run, holds=MappingProxyType(holds)))
        else:
            # The peer's own trouble (a neighbour it cannot reach): try again, all together.
            self._interrupt(
                replace(
                    run,
                    detail=f"peer {peer_id}: {error.message}",
                    not_before_s=self.now_s + RETRY_S,
                )
            )

    # ---- snapshots

    def _save(self, run: Run) -> None:
        """Ask one replica of each stage to save the state as of the last commit."""
        if run.last_commit is None:
            return
        self.state = self.state.with_run(replace(run, saving=Snapshot(last_commit=run.last_commit)))
        step = StepNumber(run.committed_steps)
        for stage in run.pipeline:
            self._say(stage.peers[0], SaveStage(run_id=run.run_id, step=step))

    def _stage_saved(self, run: Run, message: StageSaved) -> None:
        saving = run.saving
        if saving is None or message.name.step != saving.step:
            return  # a later snapshot took its place
        saved = SavedStage(
            layers=message.name.layers, digest=message.digest, total_bytes=message.total_bytes
        )
        others = [stage for stage in saving.stages if stage.layers != saved.layers]
        stages = tuple(sorted((*others, saved), key=lambda stage: stage.layers))
        saving = replace(saving, stages=stages)
        is_whole = [s.layers for s in stages] == [s.layers for s in run.pipeline]
        self.state = self.state.with_run(replace(run, saving=None if is_whole else saving))
        if is_whole:
            self.effects.append(WriteSnapshot(run.run_id, run.spec, saving))

    def snapshot_written(self, run_id: RunId, snapshot: Snapshot) -> None:
        run = self.state.runs.get(run_id)
        if run is None or run.phase.is_over or snapshot.step > run.committed_steps:
            return
        self.state = self.state.with_run(replace(run, snapshot=snapshot))
        self.effects.append(Write(SnapshotRecord(run_id, snapshot)))

    def _stage_exported(self, run: Run, peer_id: PeerId) -> None:
        if run.phase is not RunPhase.EXPORTING:
            return
        run = replace(run, exported=run.exported | {peer_id})
        if run.exported >= set(run.peers):
            self.put(replace(run, phase=RunPhase.FINISHED, detail="the result can be fetched"))
        else:
            self.state = self.state.with_run(run)

    # ---- who comes and goes

    def dismiss_silent(self) -> None:
        """Do without peers of which nothing was heard for too long."""
        for peer_id, member in self.state.members.items():
            silent_s = self.now_s - member.heard_at_s
            if silent_s >= SILENT_S:
                why = f"said nothing for {silent_s:.0f} s"
                self.peer_gone(peer_id, why, away_since_s=self.now_s)
                self.effects.append(Dismiss(peer_id, Unavailable(f"peer {peer_id} {why}")))

    def peer_gone(self, peer_id: PeerId, why: str, *, away_since_s: float) -> None:
        member = self.state.members.get(peer_id)
        if member is None:
            return
        self.state = self.state.without_member(peer_id)
        self.effects.append(Write(MemberRecord(member.hello, joined=False)))
        run = self.state.active_run
        if run is not None and peer_id in run.peers:
            away = {**run.away_since_s, peer_id: away_since_s}
            detail = loss_in_words(self.state, run, peer_id, why)
            self._interrupt(replace(run, detail=detail, away_since_s=MappingProxyType(away)))

    def _interrupt(self, run: Run) -> None:
        """The present attempt cannot go on; `advance` starts the next when it can."""
        self.put(
            replace(
                run,
                phase=RunPhase.WAITING,
                loaded=frozenset(),
                ready=MappingProxyType({}),
            )
        )

    def advance(self) -> None:
        """Bring the active run forward if everything it waits for is there."""
        run = self.state.active_run
        if run is None or run.phase > RunPhase.WAITING or self.now_s < run.not_before_s:
            return
        self._dismiss_misfits(run)
        if run.stages:
            self._resume(run)
        else:
            self._place(run)

    def _dismiss_misfits(self, run: Run) -> None:
        """Send away peers whose layers this run has no use for, rather than let them wait."""
        for peer_id, member in self.state.members.items():
            refusal = layers_refusal(self.state, run, member.hello)
            if refusal is not None:
                self.state = self.state.without_member(peer_id)
                self.effects.append(Write(MemberRecord(member.hello, joined=False)))
                self.effects.append(Dismiss(peer_id, refusal))

    def _abandon(self, run: Run) -> Run:
        """Go back to the newest snapshot, or the beginning, with whoever is there."""
        kept = run.snapshot
        step = kept.step if kept else StepNumber(0)
        self.effects.append(Write(RollbackRecord(run.run_id, step)))
        before = run
        run = replace(
            run,
            stages=(),
            holds=MappingProxyType({}),
            away_since_s=MappingProxyType({}),
            exported=frozenset(),
            committed_steps=step,
            committers=frozenset(),
            last_commit=kept.last_commit if kept else None,
            saving=None,
        )
        self.put(run)
        if kept is None:
            self._release(before, "the run goes back to its beginning")
        return run

    def _resume(self, run: Run) -> None:
        kept = settled(self.state, run, self.now_s)
        if kept is None:
            self._place(self._abandon(run))
            return
        away = [stage for stage in kept.stages if stage.peer_id not in self.state.members]
        if away:
            layers = ", ".join(dict.fromkeys(str(stage.layers) for stage in away))
            self._wait(kept, f"waiting for layers {layers}: their peer may come back")
        else:
            self._assign(with_newcomers(self.state, kept), fresh=not kept.committed_steps)

    def _place(self, run: Run) -> None:
        members = self.state.members.items()
        free = tuple(member for peer, member in members if not self.state.keeps_result(peer))
        cuts = [stage.layers for stage in run.snapshot.stages] if run.snapshot else []
        placement = (
            place_on(cuts, run.spec.model, free, self.now_s)
            if cuts
            else place(run.spec.model, free, self.now_s)
        )
        if placement.stages:
            self._assign(replace(run, stages=placement.stages), fresh=True)
        else:
            busy = len(members) - len(free)
            keep = f"; {busy} peers keep a result until it is collected" if busy else ""
            self._wait(run, placement.reason + keep)

    def _wait(self, run: Run, detail: str) -> None:
        if (run.phase, run.detail) != (RunPhase.WAITING, detail):
            self.put(replace(run, phase=RunPhase.WAITING, detail=detail))

    def _assign(self, run: Run, *, fresh: bool) -> None:
        run = replace(
            run,
            phase=RunPhase.LOADING,
            detail="peers load their stages",
            attempt=Attempt(run.attempt + 1),
            loaded=frozenset(),
            offered=frozenset(),
            ready=MappingProxyType({}),
            away_since_s=MappingProxyType({}),
        )
        self.put(run)
        self._dismiss_misfits(run)
        went_back = fresh and run.committed_steps and run.snapshot
        assign = Assign(
            run_id=run.run_id,
            spec=run.spec,
            attempt=run.attempt,
            stages=run.stages,
            committed_steps=run.committed_steps,
            fresh=fresh,
            spec_digest=run.spec.digest(),
            takers=() if went_back else takers_of(self.state, run),
            saved=run.snapshot.stages if went_back and run.snapshot else (),
            last_attempt=run.last_commit.attempt if run.last_commit else NO_ATTEMPT,
        )
        for peer in run.peers:
            self._say(peer, assign)

    # ---- steps

    def _plan_or_export(self, run: Run) -> None:
        if run.committed_steps < run.spec.train.num_steps:
            self._plan(run)
            return
        self.put(replace(run, phase=RunPhase.EXPORTING, detail="peers write their stages down"))
        for peer in run.peers:
            self._say(peer, ExportStage(run_id=run.run_id))

    def _plan(self, run: Run) -> None:
        plan = plan_step(run)
        samples = tuple(sample for batch in plan.microbatches for sample in batch.samples)
        self.effects.append(Write(PlanRecord(run.run_id, plan.step, run.attempt, samples)))
        for peer in run.peers:
            self.effects.append(Say(peer, plan, tokens_for(run, plan, peer)))

    def _commit(self, run: Run) -> None:
        run, committed, commit = commit_step(run, self.now_s)
        self.state = self.state.with_run(run)
        self.effects.append(Write(CommitRecord(run.run_id, committed, commit)))
        for peer in run.peers:
            self._say(peer, commit)
        self.effects.append(Publish(run.run_id, committed))
        goes_on = run.committed_steps < run.spec.train.num_steps
        save_steps = run.spec.train.save_steps
        if goes_on and save_steps and run.committed_steps % save_steps == 0:
            self._save(run)
            run = self.state.runs[run.run_id]
        if goes_on and with_newcomers(self.state, run) is not run:
            self._interrupt(run)
        else:
            self._plan_or_export(run)

    # ---- ends

    def end(self, run_id: RunId, phase: RunPhase, detail: str) -> None:
        run = self.state.runs.get(run_id)
        if run is None or run.phase > RunPhase.FINISHED:
            return
        self.put(replace(run, phase=phase, detail=detail))
        self._release(run, detail)

    def collected(self, run_id: RunId) -> None:
        run = self.state.runs.get(run_id)
        if run is None or run.phase is not RunPhase.FINISHED:
            return
        self.put(replace(run, phase=RunPhase.COLLECTED, detail="a client has the result"))
        self._release(run, "a client has the result")

    def _release(self, run: Run, reason: str) -> None:
        for peer in run.peers:
            if peer in self.state.members:
                self._say(peer, ReleaseStage(run_id=run.run_id, reason=reason))

    # ---- shorthands

    def put(self, run: Run) -> None:
        """Keep the run, write it down and tell its watchers."""
        self.state = self.state.with_run(run)
        self.effects.append(Write(RunRecord(run)))
        self.effects.append(Publish(run.run_id, run.status))

    def _say(self, peer_id: PeerId, message: ToPeer) -> None:
        self.effects.append(Say(peer_id, message))
