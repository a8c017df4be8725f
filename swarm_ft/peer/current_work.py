"""A peer's present work, run by run, for its volunteer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.control import Assign, CommitStep, PlanStep, stages_of
from swarm_ft.protocol.spec.layers import LayerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class RunWork:
    """Work for a run of which this peer hosts a stage.

    Attributes:
        run_id: Id of the run.
        layers: Layers of the stage.
        step: Number of committed steps, of `num_steps`.
        num_steps: Number of steps in the run.
        samples: Samples of the newest planned step that pass this peer, of `batch`; 0 of 0 before
            the first step.
        batch: Samples of the newest planned step.
    """

    run_id: RunId
    layers: LayerRange
    step: int
    num_steps: int
    samples: int = 0
    batch: int = 0


@dataclass(slots=True)
class _Work:
    """Work for one run.

    `open`: the newest planned step, and how many of its samples pass this peer.
    """

    assign: Assign
    doing: RunWork
    open: tuple[PlanStep, int] | None = None


class CurrentWork:
    """Tracks this peer's stages and steps from the coordinator's messages.

    Args:
        own: Id of this peer.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._works: dict[RunId, _Work] = {}

    def on_assign(self, assign: Assign) -> None:
        """Register that this peer hosts a stage of the run."""
        before, layers = self._works.get(assign.run_id), assign.layers_of(self._own)
        doing = RunWork(
            run_id=assign.run_id,
            layers=layers,
            step=assign.committed_steps,
            num_steps=assign.spec.train.num_steps,
        )
        if before is not None and before.doing.layers == layers:
            doing = replace(doing, samples=before.doing.samples, batch=before.doing.batch)
        self._works[assign.run_id] = _Work(assign, doing)

    @property
    def runs(self) -> tuple[RunWork, ...]:
        """Work for each run; empty while this peer hosts no stage."""
        return tuple(work.doing for work in self._works.values())

    def on_plan(self, plan: PlanStep) -> None:
        """Register a planned step, possibly for the second time."""
        work = self._works.get(plan.run_id)
        if work is None or plan.attempt != work.assign.attempt:
            return
        stages = stages_of(work.assign.assignments, but=plan.listeners)
        index = next((i for i, s in enumerate(stages) if self._own in s.peers), None)
        if index is not None:
            replica = stages[index].peers.index(self._own)
            own = (b for b in plan.microbatches if b.replica_at(index) == replica)
            samples = sum(len(batch.samples) for batch in own)
            batch = sum(len(batch.samples) for batch in plan.microbatches)
            work.open = plan, samples
            work.doing = replace(work.doing, samples=samples, batch=batch)

    def on_commit(self, commit: CommitStep) -> None:
        """Register a committed step; a repeated commit has no effect."""
        work = self._works.get(commit.run_id)
        if work is not None and work.open is not None and work.open[0].step == commit.step:
            work.open = None
            work.doing = replace(work.doing, step=commit.step + 1)

    def on_release(self, run_id: RunId) -> None:
        """Register that this peer hosts nothing of the run any more."""
        self._works.pop(run_id, None)
