"""Questions about peers: who is welcome, who is wanted, whose weights are lost. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from swarm_ft.coordinator.state import Run, SwarmState
from swarm_ft.errors import BadLayers, RunMismatch, SwarmError
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages import PeerHello, RunPhase, StageAssignment

GRACE_S = 30.0
"""How long a peer whose stream broke may take to come back with its weights."""


def refusal_of(state: SwarmState, hello: PeerHello) -> SwarmError | None:
    """Why a peer cannot be a member now, if it cannot."""
    run = state.active_run
    if run is None:
        return None
    held, digest = hello.held, run.spec.digest()
    if held and held.run_id == run.run_id and held.spec_digest != digest:
        return RunMismatch(
            f"run {run.run_id}: RunSpec digest {digest.hex()} expected, "
            f"{held.spec_digest.hex()} held by peer {hello.peer_id}"
        )
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
    if taken and layers not in taken:
        listed = ", ".join(str(part) for part in taken)
        return BadLayers(f"layers {layers}: match no stage of run {run.run_id} ({listed})")
    return None


def is_wanted(state: SwarmState, peer_id: PeerId, run_id: RunId) -> bool:
    """Whether what this peer holds of a run is of any use."""
    run = state.runs.get(run_id)
    return run is not None and run.phase <= RunPhase.FINISHED and peer_id in run.peers


def with_exports_of(state: SwarmState, hello: PeerHello) -> SwarmState:
    """Whether a run's part of the result lies with this peer is for the peer to say."""
    held = hello.held
    for run in state.runs.values():
        if hello.peer_id in run.peers:
            has = held is not None and held.run_id == run.run_id and held.exported
            others = run.exported - {hello.peer_id}
            exported = others | {hello.peer_id} if has else others
            state = state.with_run(replace(run, exported=exported))
    return state


def is_lost(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether weights of the run are gone for good."""
    return any(_is_stage_lost(state, run, stage, now_s) for stage in run.stages)


def _is_stage_lost(state: SwarmState, run: Run, stage: StageAssignment, now_s: float) -> bool:
    """Whether its peer stayed away, or came back without the stage."""
    peer, steps = stage.peer_id, run.committed_steps
    member = state.members.get(peer)
    if member is None:
        return now_s - run.away_since_s.get(peer, -math.inf) >= GRACE_S
    if member.hello.layers not in (None, stage.layers):
        return True
    return steps > 0 and run.holds.get(peer) not in (steps, steps - 1)
