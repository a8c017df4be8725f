"""One step's plan and one step's commit, computed from the run. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import Measured, Past, PlannedStep, Run
from swarm_ft.coordinator.plan.membership import joining_in_words
from swarm_ft.coordinator.plan.routes import plan_again, plan_microbatches, routes_of
from swarm_ft.ids import PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.messages.control import CommitStep, PlanStep, StepReady
from swarm_ft.protocol.messages.reports import GradientTraffic, summed_by_boundary
from swarm_ft.protocol.spec.training_plan import clip_factor, learning_rate_at, step_samples

MEASURED_STEPS = 5
"""How many a peer's speed, and that of a step, is told from."""
FORGIVEN = 0.9


def plan_step(run: Run, now_s: float) -> tuple[Run, PlanStep]:
    """The run with its first uncommitted step planned, and the plan, for everybody.

    What peers have done of it in earlier attempts stays done, and with whom.
    """
    number, stages, seconds = StepNumber(run.committed_steps), run.computing, run.measured.seconds
    if run.step is None:
        microbatches = plan_microbatches(run.spec.train, number, stages, seconds, run.past.ledger)
    else:
        microbatches = plan_again(run.step, stages, run.attempt.done, seconds)
    plan = PlanStep(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=number,
        microbatches=microbatches,
        listeners=run.listeners,
    )
    step = PlannedStep(microbatches=microbatches, stages=stages, began_s=now_s)
    return replace(run, step=step), plan


def tokens_for(run: Run, plan: PlanStep, peer: PeerId) -> tuple[SampleId, ...]:
    """Samples whose tokens a peer needs: inputs at the first stage, targets at the last."""
    stages = run.computing
    ends = {0: stages[0], len(stages) - 1: stages[-1]}
    return tuple(
        sample
        for index, stage in ends.items()
        if peer in stage.peers
        for batch in plan.microbatches
        if stage.peers[batch.replica_at(index)] == peer and index not in batch.done
        for sample in batch.samples
    )


def commit_step(run: Run, step: PlannedStep, now_s: float) -> tuple[Run, StepCommitted, CommitStep]:
    """The run after a step that all stages are ready for, what happened, and what to tell peers.

    The loss is the mean over all target tokens of the batch; gradients are clipped by the norm
    over all stages.
    """
    train, number = run.spec.train, StepNumber(run.committed_steps)
    reports = [step.ready[peer] for peer in run.peers]
    stages = run.computing
    # Replicas of a stage have one gradient, so any of them can tell its norm.
    norms = [step.ready[stage.peers[0]].squared_grad_norm for stage in stages]
    grad_norm = math.sqrt(math.fsum(norms))
    loss_sum = math.fsum(step.ready[peer].loss_sum for peer in stages[-1].peers)
    num_samples = len(step_samples(train, number))
    commit = CommitStep(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=number,
        clip_factor=clip_factor(train, grad_norm),
        learning_rate=learning_rate_at(train, number),
    )
    committed = StepCommitted(
        step=number,
        loss=loss_sum / (num_samples * (train.seq_length - 1)),
        learning_rate=commit.learning_rate,
        grad_norm=grad_norm,
        num_samples=num_samples,
        seconds=now_s - step.began_s,
        traffic=summed_by_boundary(t for report in reports for t in report.traffic),
        gradients=sum((report.gradients for report in reports), GradientTraffic()),
        state_bytes=run.measured.state_bytes,
    )
    after = replace(
        run,
        detail=joining_in_words(run),
        past=_past_after(run, step, committed, commit),
        step=None,
        doubts=MappingProxyType({p: d for p, d in run.doubts.items() if d.step > number}),
        measured=_measured_after(run, step, committed),
    )
    return after, committed, commit


def _past_after(run: Run, step: PlannedStep, committed: StepCommitted, commit: CommitStep) -> Past:
    past, steps = run.past, commit.step + 1
    computing = [peer for stage in run.computing for peer in stage.peers]
    return replace(
        past,
        committed_steps=steps,
        last_commit=commit,
        committers=frozenset(computing),
        holds=MappingProxyType(dict.fromkeys(computing, steps)),
        sent=past.sent + committed.sent,
        traffic=summed_by_boundary((*past.traffic, *committed.traffic)),
        ledger=past.ledger and past.ledger.after(routes_of(step.microbatches, step.stages)),
    )


def _measured_after(run: Run, step: PlannedStep, committed: StepCommitted) -> Measured:
    before = run.measured
    seconds = {}
    for index, stage in enumerate(run.computing):
        for replica, peer in enumerate(stage.peers):
            known = before.seconds.get(peer, ())
            newest = _newest(known, step.ready[peer], step.share(index, replica))
            seconds[peer] = (*known, *newest)[-MEASURED_STEPS:]
    return Measured(
        seconds=MappingProxyType(seconds),
        step_seconds=(*before.step_seconds, committed.seconds)[-MEASURED_STEPS:],
        buffers=before.buffers,
    )


def _newest(before: tuple[float, ...], ready: StepReady, count: int) -> tuple[float, ...]:
    if count:
        return (ready.compute_s / count,) if ready.compute_s else ()
    # Who was too slow to get any is thought a little faster, until it is tried again.
    return (before[-1] * FORGIVEN,) if before else ()
