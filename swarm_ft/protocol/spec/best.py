"""Best evaluation of a run, and the count of evaluations without improvement. Pure.

The rules and names are those of transformers' Trainer and its EarlyStoppingCallback: any better
value is the best from then on, and an evaluation that is not better than the previous best by more
than the threshold uses patience up. The evaluation before the first step counts for neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import TrainOptions
from swarm_ft.protocol.spec.tasks import task_of


@dataclass(frozen=True, slots=True)
class Best:
    """Number of steps in some weights, and their value of the run's metric."""

    step: StepNumber
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Summary of all evaluations of a run so far.

    Attributes:
        step: Steps in the newest evaluated weights; None before the first.
        best: First of the best evaluations; None before one counts.
        saved: First of the best evaluations whose weights are saved.
        num_worse: Evaluations in a row, up to the newest, without an improvement above the
            threshold.
    """

    step: StepNumber | None = None
    best: Best | None = None
    saved: Best | None = None
    num_worse: int = 0

    def after(
        self, train: TrainOptions, step: StepNumber, value: float, *, is_saved: bool
    ) -> Judged:
        """Return the summary after one more evaluation.

        Args:
            train: Options of the run.
            step: Steps in the weights.
            value: Value of the metric, see `metric_of`.
            is_saved: Whether the weights are saved.
        """
        if not step:
            return replace(self, step=step)
        new, before = Best(step, value), self.best
        has_improved = before is None or (
            _is_better(train, new, before)
            and abs(value - before.value) > train.early_stopping_threshold
        )
        return Judged(
            step=step,
            best=new if _is_better(train, new, before) else before,
            saved=new if is_saved and _is_better(train, new, self.saved) else self.saved,
            num_worse=0 if has_improved else self.num_worse + 1,
        )

    def stops(self, train: TrainOptions) -> bool:
        """Whether the run ends with the weights of the last evaluation."""
        return 0 < train.early_stopping_patience <= self.num_worse


def _is_better(train: TrainOptions, new: Best, before: Best | None) -> bool:
    if before is None:
        return True
    return new.value < before.value if train.lower_is_better else new.value > before.value


def metric_of(train: TrainOptions, loss: float, counts: Sequence[int]) -> float:
    """Return the run's metric of an evaluation.

    Args:
        train: Options of the run.
        loss: Mean over all targets.
        counts: Counts behind the task's metrics; if they are missing the metric is 0.
    """
    if train.best_metric == "loss":
        return loss
    task = task_of(train)
    return task.metrics(counts)[train.best_metric] if len(counts) == task.num_counts else 0.0
