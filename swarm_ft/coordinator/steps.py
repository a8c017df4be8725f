"""One step's plan and one step's commit, computed from the run. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.state import Run
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages import CommitStep, PlanStep, StepCommitted, StepReady, Traffic
from swarm_ft.protocol.training_plan import (
    clip_factor,
    learning_rate_at,
    step_microbatches,
    step_samples,
)


def plan_step(run: Run) -> PlanStep:
    """The first uncommitted step, for everybody."""
    step = StepNumber(run.committed_steps)
    return PlanStep(
        run_id=run.run_id,
        attempt=run.attempt,
        step=step,
        microbatches=step_microbatches(run.spec.train, step),
    )


def commit_step(run: Run, now_s: float) -> tuple[Run, StepCommitted, CommitStep]:
    """The run after a step that all stages are ready for, what happened, and what to tell peers.

    The loss is the mean over all target tokens of the batch; gradients are clipped by the norm
    over all stages.
    """
    train, step = run.spec.train, StepNumber(run.committed_steps)
    reports = [run.ready[peer] for peer in run.peers]
    grad_norm = math.sqrt(math.fsum(report.squared_grad_norm for report in reports))
    num_samples = len(step_samples(train, step))
    commit = CommitStep(
        run_id=run.run_id,
        step=step,
        clip_factor=clip_factor(train, grad_norm),
        learning_rate=learning_rate_at(train, step),
    )
    committed = StepCommitted(
        step=step,
        loss=reports[-1].loss_sum / (num_samples * (train.seq_length - 1)),
        learning_rate=commit.learning_rate,
        grad_norm=grad_norm,
        num_samples=num_samples,
        seconds=now_s - run.step_began_s,
        traffic=merge_traffic(reports),
    )
    after = replace(
        run,
        ready=MappingProxyType({}),
        committed_steps=step + 1,
        holds=MappingProxyType(dict.fromkeys(run.peers, step + 1)),
        last_commit=commit,
        step_began_s=now_s,
    )
    return after, committed, commit


def merge_traffic(reports: list[StepReady]) -> tuple[Traffic, ...]:
    """Both sides' counts of every boundary, added up, in the order of the boundaries."""
    merged: dict[int, Traffic] = {}
    for traffic in (t for report in reports for t in report.traffic):
        known = merged.get(traffic.boundary)
        merged[traffic.boundary] = known + traffic if known else traffic
    return tuple(merged[boundary] for boundary in sorted(merged))
