"""Questions about peers: who is welcome, who is wanted, whose weights are lost. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import Member, Run, SwarmState
from swarm_ft.coordinator.plan.placement import Placement, fits, place, place_on
from swarm_ft.errors import BadLayers, RunMismatch, SwarmError
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import HeldStage, PeerHello, StageAssignment, Taker
from swarm_ft.protocol.spec.digest import check_spec_digest
from swarm_ft.protocol.spec.layers import LayerRange

GRACE_S = 30.0
"""How long, at most, a peer whose stream broke may take to come back with weights that nobody
else has."""
SHORT_GRACE_S = 5.0
"""How long at least: a peer that is well is back in a second or two."""
GATHER_S = 3.0
"""How long a coordinator that was restarted waits for peers that replicas could stand in for."""
SILENT_S = 8.0
"""A peer that says nothing for so long is gone, whatever its connection looks like."""


def refusal_of(state: SwarmState, hello: PeerHello) -> SwarmError | None:
    """Why a peer cannot be a member now, if it cannot."""
    run = state.active_run
    if run is None:
        return None
    held, whose = hello.held, f"peer {hello.peer_id}"
    if held and held.run_id == run.run_id:
        try:
            check_spec_digest(f"run {run.run_id}", run.spec.digest(), held.spec_digest, whose)
        except RunMismatch as error:
            return error
    return layers_refusal(state, run, hello)


def layers_refusal(state: SwarmState, run: Run, hello: PeerHello) -> BadLayers | None:
    """Why the layers that a peer offers are of no use to the run, if they are of none.

    A peer that keeps the result of an earlier run may stay whatever it offers.
    """
    layers, model = hello.layers, run.spec.model
    if layers is None or hello.peer_id in run.peers or state.keeps_result(hello.peer_id):
        return None
    if layers.stop > model.num_blocks:
        return BadLayers(
            f"layers {layers}: outside the model of run {run.run_id}, "
            f"{model.reference}, which has layers {model.layers}"
        )
    taken = [stage.layers for stage in run.stages]
    if not taken and run.snapshot:
        taken = [stage.layers for stage in run.snapshot.stages]
    if taken and layers not in taken:
        listed = ", ".join(str(part) for part in taken)
        return BadLayers(f"layers {layers}: match no stage of run {run.run_id} ({listed})")
    return None


def is_wanted(state: SwarmState, peer_id: PeerId, held: HeldStage) -> bool:
    """Whether what this peer holds of a run is of any use: to the run, or to its client."""
    run = state.runs.get(held.run_id)
    if run is None or run.phase > RunPhase.FINISHED:
        return False
    is_current = not run.phase.is_over and run.holds.get(peer_id) == run.committed_steps
    return is_current or peer_id in run.peers


def loss_in_words(state: SwarmState, run: Run, peer_id: PeerId, why: str) -> str:
    """Who of the run is lost, and what happens now if that depends on nobody else."""
    stage = next(stage for stage in run.pipeline if peer_id in stage.peers)
    busy = {peer for peer in stage.peers if peer in state.members and peer not in run.listeners}
    others = [peer for peer in stage.peers if peer in busy - {peer_id}]
    told = f"peer {peer_id} (layers {stage.layers}) {why}"
    if peer_id in run.listeners:
        return f"{told} before it had caught up"
    return f"{told}; its part goes to {' and '.join(others)}" if others else told


def holds_last_commit(run: Run, held: HeldStage) -> bool:
    """Whether the weights are those of the run's last commit, and not of a void one."""
    if held.run_id != run.run_id or held.committed_steps != run.committed_steps:
        return False
    return run.last_commit is None or held.last_attempt == run.last_commit.attempt


def missed_last_commit(run: Run, held: HeldStage, peer_id: PeerId) -> bool:
    """Whether all that the peer lacks is to hear of the last commit, in which it took part."""
    is_behind = held.run_id == run.run_id and held.committed_steps == run.committed_steps - 1
    return is_behind and run.last_commit is not None and peer_id in run.committers


def with_exports_of(state: SwarmState, hello: PeerHello) -> SwarmState:
    """Whether a run's part of the result lies with this peer is for the peer to say."""
    held = hello.held
    for run in state.runs.values():
        if hello.peer_id in run.peers:
            exported = {peer: file for peer, file in run.exported.items() if peer != hello.peer_id}
            if held is not None and held.exported and holds_last_commit(run, held):
                exported[hello.peer_id] = held.exported
            state = state.with_run(replace(run, exported=MappingProxyType(exported)))
    return state


def lost_parts(state: SwarmState, run: Run, now_s: float) -> tuple[LayerRange, ...]:
    """Stages of a finished run whose result nobody has who is there, or may come back."""
    return tuple(
        stage.layers
        for stage in run.pipeline
        if not any(
            peer in state.members or _may_return(state, run, peer, now_s, GRACE_S)
            for peer in stage.peers
            if peer in run.exported
        )
    )


def arrangement(state: SwarmState, run: Run, now_s: float) -> Placement:
    """Who would host the run if it went back now: on the stages of its snapshot, if it has one."""
    free = tuple(member for peer, member in state.members.items() if not state.keeps_result(peer))
    if run.snapshot is None:
        return place(run.spec.model, free, now_s)
    cuts = [stage.layers for stage in run.snapshot.stages]
    return place_on(cuts, run.spec.model, free, now_s)


def patience_s(state: SwarmState, run: Run, now_s: float) -> float:
    """How long a stage's last peer is waited for while it is away.

    Waiting costs time; going back costs the steps since the newest snapshot, and makes sense only
    where others could host all layers now. Whether the peer comes back is not known, so the run
    waits as long as going back would cost and then goes back: that never costs more than twice
    what the better of the two would have (the ski rental problem).
    """
    if not arrangement(state, run, now_s).stages:
        return GRACE_S
    saved_steps = run.snapshot.step if run.snapshot else 0
    redone_s = (run.committed_steps - saved_steps) * median(run.step_seconds or (0.0,))
    return min(GRACE_S, max(SHORT_GRACE_S, redone_s))


def settled(state: SwarmState, run: Run, now_s: float) -> Run | None:
    """The run without peers that nobody needs to wait for: replicas stand in for them.

    A peer that is away stays if it may come back and no replica of its stage is there, or as long
    as peers are gathered; who listens stays, and is nobody to wait for. None if a stage has nobody
    left: its weights are gone, or nobody waits for them any more (`patience_s`).
    """
    grace_s = patience_s(state, run, now_s)
    kept: list[StageAssignment] = []
    for stage in run.pipeline:
        able = {peer for peer in stage.peers if _is_able(state, run, peer, stage.layers)}
        is_waited_for = not able or now_s < run.gather_until_s
        expected = {
            p for p in stage.peers if is_waited_for and _may_return(state, run, p, now_s, grace_s)
        }
        if not able | expected:
            return None
        listening = {peer for peer in run.listeners if peer in state.members}
        staying = able | expected | listening
        kept += [a for a in run.stages if a.layers == stage.layers and a.peer_id in staying]
    return run if tuple(kept) == run.stages else replace(run, stages=tuple(kept))


def _is_able(state: SwarmState, run: Run, peer: PeerId, layers: LayerRange) -> bool:
    """Whether a peer is there and has the stage as of the last commit, or can load it."""
    member = state.members.get(peer)
    if member is None or member.hello.layers not in (None, layers):
        return False
    return not run.committed_steps or run.holds.get(peer) == run.committed_steps


def _may_return(state: SwarmState, run: Run, peer: PeerId, now_s: float, grace_s: float) -> bool:
    if peer in state.members or peer in run.listeners:
        return False
    return now_s - run.away_since_s.get(peer, -math.inf) < grace_s


def with_newcomers(state: SwarmState, run: Run) -> Run:
    """The run with members that can join its stages, each beside the stage's replicas."""
    stages = list(run.stages)
    for peer, member in state.members.items():
        layers = _wanted_layers(state, replace(run, stages=tuple(stages)), member)
        if layers is not None:
            last = max(i for i, stage in enumerate(stages) if stage.layers == layers)
            stages.insert(last + 1, StageAssignment(peer_id=peer, layers=layers))
    return run if len(stages) == len(run.stages) else replace(run, stages=tuple(stages))


def takers_of(state: SwarmState, run: Run) -> Iterator[Taker]:
    """Peers of the run that have to take their stage's state from its other replicas.

    Who listens already goes on with what it began, as long as a donor of that state is left.
    """
    before = {taker.peer_id: taker for taker in run.takers}
    for stage in run.pipeline:
        able = tuple(p for p in stage.peers if _is_able(state, run, p, stage.layers))
        for peer in stage.peers:
            if peer not in able:
                yield _taker(run, peer, able, before.get(peer))


def _taker(run: Run, peer: PeerId, able: tuple[PeerId, ...], before: Taker | None) -> Taker:
    donors = tuple(donor for donor in before.donors if donor in able) if before else ()
    if before and donors and peer in run.listeners:
        return replace(before, donors=donors)
    return Taker(peer_id=peer, step=StepNumber(run.committed_steps), donors=able)


def without_state(run: Run, peer: PeerId) -> Run:
    """The run in which nothing is known of what this peer holds, or has begun to take."""
    holds = {name: steps for name, steps in run.holds.items() if name != peer}
    return replace(
        run,
        holds=MappingProxyType(holds),
        takers=tuple(taker for taker in run.takers if taker.peer_id != peer),
        taken=run.taken - {peer},
    )


def with_taken(run: Run) -> Run:
    """The run in which takers that have caught up are replicas as all others."""
    if not run.taken:
        return run
    holds = {**run.holds, **dict.fromkeys(run.taken, run.committed_steps)}
    return replace(
        run,
        holds=MappingProxyType(holds),
        takers=tuple(taker for taker in run.takers if taker.peer_id not in run.taken),
        taken=frozenset(),
    )


def joining_in_words(run: Run) -> str:
    """Who takes over while the others train; empty if nobody does."""
    joining = [stage for stage in run.stages if stage.peer_id in run.listeners]
    return "; ".join(
        f"peer {stage.peer_id} joins layers {stage.layers}: it takes over while the others train"
        for stage in joining
    )


def caught_up_in_words(run: Run) -> str:
    """Who has caught up; empty if nobody did."""
    return "; ".join(
        f"peer {stage.peer_id} (layers {stage.layers}) has caught up at step "
        f"{run.committed_steps} and computes from now on"
        for stage in run.stages
        if stage.peer_id in run.taken
    )


def _wanted_layers(state: SwarmState, run: Run, member: Member) -> LayerRange | None:
    """The stage that a newcomer is to host: its own, what it holds, or where it helps most."""
    hello = member.hello
    if hello.peer_id in run.peers or state.keeps_result(hello.peer_id):
        return None
    held = hello.held.layers if hello.held and hello.held.run_id == run.run_id else None
    choice = hello.layers or held
    fitting = [stage for stage in run.pipeline if choice in (None, stage.layers)]
    affordable = [s for s in fitting if choice or fits(run.spec.model, s.layers, hello)]
    busiest = max(affordable, key=lambda s: len(s.layers) / len(s.peers), default=None)
    return busiest.layers if busiest else None
