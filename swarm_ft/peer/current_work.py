"""The work of a peer now, run by run: for its volunteer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.control import Assign, CommitStep, PlanStep, stages_of
from swarm_ft.protocol.spec.layers import LayerRange


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What it does for a run of which it hosts a stage.

    Attributes:
        step: how many are committed, of `num_steps`.
        samples: of the newest step that it was told of, those that are its own, of `batch`; 0 of 0
            before the first.
    """

    run_id: RunId
    layers: LayerRange
    step: int
    num_steps: int
    samples: int = 0
    batch: int = 0


@dataclass(slots=True)
class _Work:
    """Of one run; `open`: the step that was planned last, and how many of its samples are ours."""

    assign: Assign
    doing: Doing
    open: tuple[PlanStep, int] | None = None


class CurrentWork:
    """Follows the coordinator's messages, and knows the stages and steps of this peer.

    Args:
        own: this peer's name.
    """

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._works: dict[RunId, _Work] = {}

    def assigned(self, assign: Assign) -> None:
        """It hosts a stage of the run from now on."""
        before, layers = self._works.get(assign.run_id), assign.layers_of(self._own)
        doing = Doing(
            run_id=assign.run_id,
            layers=layers,
            step=assign.committed_steps,
            num_steps=assign.spec.train.num_steps,
        )
        if before is not None and before.doing.layers == layers:
            doing = replace(doing, samples=before.doing.samples, batch=before.doing.batch)
        self._works[assign.run_id] = _Work(assign, doing)

    @property
    def doing(self) -> tuple[Doing, ...]:
        """What it does, for each run; nothing while it hosts nothing."""
        return tuple(work.doing for work in self._works.values())

    def planned(self, plan: PlanStep) -> None:
        """A step begins, again perhaps."""
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

    def committed(self, commit: CommitStep) -> None:
        """The step counts; said twice, it counts once."""
        work = self._works.get(commit.run_id)
        if work is not None and work.open is not None and work.open[0].step == commit.step:
            work.open = None
            work.doing = replace(work.doing, step=commit.step + 1)

    def released(self, run_id: RunId) -> None:
        """It hosts nothing of the run any more."""
        self._works.pop(run_id, None)
