"""One step's plan and one step's commit, computed from the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import OpenStep, Run
from swarm_ft.coordinator.plan.membership import joining_in_words
from swarm_ft.coordinator.plan.routes import plan_again, plan_microbatches, routes_of
from swarm_ft.ids import PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.messages.control import CommitStep, PlanStep, StepReady
from swarm_ft.protocol.messages.reports import GradientTraffic, Traffic
from swarm_ft.protocol.spec.training_plan import clip_factor, learning_rate_at, step_samples

MEASURED_STEPS = 5
"""How many a peer's speed, and that of a step, is told from."""
FORGIVEN = 0.9


def plan_step(run: Run) -> tuple[Run, PlanStep]:
    """The run with its first uncommitted step planned, and the plan, for everybody.

    What peers have done of it in earlier attempts stays done, and with whom.
    """
    step, pipeline = StepNumber(run.committed_steps), run.computing
    if run.open_step is None:
        microbatches = plan_microbatches(run.spec.train, step, pipeline, run.seconds, run.ledger)
    else:
        microbatches = plan_again(run.open_step, pipeline, run.done, run.seconds)
    plan = PlanStep(
        run_id=run.run_id,
        attempt=run.attempt,
        step=step,
        microbatches=microbatches,
        listeners=run.listeners,
    )
    return replace(run, open_step=OpenStep(microbatches=microbatches, pipeline=pipeline)), plan


def tokens_for(run: Run, plan: PlanStep, peer: PeerId) -> tuple[SampleId, ...]:
    """Samples whose tokens a peer needs: inputs at the first stage, targets at the last."""
    pipeline = run.computing
    ends = {0: pipeline[0], len(pipeline) - 1: pipeline[-1]}
    return tuple(
        sample
        for index, stage in ends.items()
        if peer in stage.peers
        for batch in plan.microbatches
        if stage.peers[batch.replica_at(index)] == peer and index not in batch.done
        for sample in batch.samples
    )


def commit_step(run: Run, now_s: float) -> tuple[Run, StepCommitted, CommitStep]:
    """The run after a step that all stages are ready for, what happened, and what to tell peers.

    The loss is the mean over all target tokens of the batch; gradients are clipped by the norm
    over all stages.
    """
    train, step = run.spec.train, StepNumber(run.committed_steps)
    reports = [run.ready[peer] for peer in run.peers]
    pipeline = run.computing
    # Replicas of a stage have one gradient, so any of them can tell its norm.
    norms = [run.ready[stage.peers[0]].squared_grad_norm for stage in pipeline]
    grad_norm = math.sqrt(math.fsum(norms))
    loss_sum = math.fsum(run.ready[peer].loss_sum for peer in pipeline[-1].peers)
    num_samples = len(step_samples(train, step))
    commit = CommitStep(
        run_id=run.run_id,
        attempt=run.attempt,
        step=step,
        clip_factor=clip_factor(train, grad_norm),
        learning_rate=learning_rate_at(train, step),
    )
    committed = StepCommitted(
        step=step,
        loss=loss_sum / (num_samples * (train.seq_length - 1)),
        learning_rate=commit.learning_rate,
        grad_norm=grad_norm,
        num_samples=num_samples,
        seconds=now_s - run.step_began_s,
        traffic=added_up(t for report in reports for t in report.traffic),
        gradients=sum((report.gradients for report in reports), GradientTraffic()),
        state_bytes=run.state_bytes,
    )
    computing = [peer for stage in pipeline for peer in stage.peers]
    opened = run.open_step or OpenStep(microbatches=())
    routes = routes_of(opened.microbatches, opened.pipeline)
    after = replace(
        run,
        detail=joining_in_words(run),
        ready=MappingProxyType({}),
        open_step=None,
        done=MappingProxyType({}),
        committed_steps=step + 1,
        holds=MappingProxyType(dict.fromkeys(computing, step + 1)),
        committers=frozenset(computing),
        sent=run.sent + committed.sent,
        traffic=added_up((*run.traffic, *committed.traffic)),
        ledger=run.ledger and run.ledger.after(routes),
        state_bytes=0,
        seconds=MappingProxyType(_measured(run)),
        step_seconds=(*run.step_seconds, committed.seconds)[-MEASURED_STEPS:],
        last_commit=commit,
        step_began_s=now_s,
    )
    return after, committed, commit


def _measured(run: Run) -> dict[PeerId, tuple[float, ...]]:
    """Seconds a microbatch of each peer's last steps, this one included."""
    measured = {}
    for index, stage in enumerate(run.computing):
        for replica, peer in enumerate(stage.peers):
            count = run.share(index, replica)
            before = run.seconds.get(peer, ())
            measured[peer] = (*before, *_newest(before, run.ready[peer], count))[-MEASURED_STEPS:]
    return measured


def _newest(before: tuple[float, ...], ready: StepReady, count: int) -> tuple[float, ...]:
    if count:
        return (ready.compute_s / count,) if ready.compute_s else ()
    # Who was too slow to get any is thought a little faster, until it is tried again.
    return (before[-1] * FORGIVEN,) if before else ()


def added_up(counts: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """The sum of each boundary's counts, in the order of the boundaries."""
    merged: dict[int, Traffic] = {}
    for traffic in counts:
        known = merged.get(traffic.boundary)
        merged[traffic.boundary] = known + traffic if known else traffic
    return tuple(merged[boundary] for boundary in sorted(merged))
