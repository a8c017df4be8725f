"""Runs that wait between two steps, made of a swarm at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from swarm_ft.coordinator.facts.events import SendMessage, Transition
from swarm_ft.coordinator.facts.state import Run, Snapshot, SwarmState
from swarm_ft.protocol.messages.control import SavedStage
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.unit.coordinator.conftest import FakePeer, Swarm

STEPS = 8


def train(swarm: Swarm, spec: RunSpec, *peers: FakePeer, steps: int = 2) -> None:
    """Train until this number of steps is committed."""
    swarm.join(*peers)
    swarm.submit(spec)
    swarm.settle_until(lambda: swarm.run().committed_steps == steps)


class Between(NamedTuple):
    """A policy's input: a state, a run of it that waits between two steps, and the time."""

    state: SwarmState
    run: Run
    now_s: float


def between_steps(swarm: Swarm, *changes: Callable[[Run], Run]) -> Between:
    """Return the swarm's run without its plan of the next step, and changed."""
    run = replace(swarm.run(), step=None)
    for change in changes:
        run = change(run)
    return Between(swarm.state.with_run(run), run, swarm.now_s)


def saved(run: Run) -> Run:
    """Return the run with a complete snapshot of its last commit."""
    assert run.past.last_commit is not None
    stages = tuple(
        SavedStage(layers=stage.layers, digest=bytes(32), total_bytes=1) for stage in run.stages
    )
    snapshot = Snapshot(last_commit=run.past.last_commit, sent=run.past.sent, stages=stages)
    return replace(run, past=replace(run.past, snapshots=(snapshot,)))


def paused(run: Run) -> Run:
    """Return the run as a person paused it."""
    return replace(run, steering=replace(run.steering, is_paused=True))


def after_last_step(run: Run) -> Run:
    """Return the run after its last step."""
    return replace(run, past=replace(run.past, committed_steps=run.spec.train.num_steps))


def receivers(turn: Transition, kind: type) -> list[str]:
    """Return the receivers of messages of this type."""
    sends = (effect for effect in turn.effects if isinstance(effect, SendMessage))
    return [send.peer_id for send in sends if isinstance(send.message, kind)]
