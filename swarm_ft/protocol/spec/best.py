"""Which of a run's evaluations is the best, and when enough in a row were no better. Pure.

As the Trainer of transformers and its EarlyStoppingCallback decide it, with the same names: any
better value is the best from then on, and an evaluation that is not better than the best before by
more than the threshold wears the patience out. What the model was worth before the first step
counts for neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import TrainOptions
from swarm_ft.protocol.spec.tasks import task_of


@dataclass(frozen=True, slots=True)
class Best:
    """Weights with so many steps in them, and what they are worth by the run's metric."""

    step: StepNumber
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What follows from all evaluations of a run so far, in a few numbers.

    Attributes:
        step: of the newest; None before the first.
        best: the first of the best; None where none counts yet.
        saved: so too of those whose weights can be had again.
        num_worse: how many in a row, up to the newest, were not better by more than the threshold.
    """

    step: StepNumber | None = None
    best: Best | None = None
    saved: Best | None = None
    num_worse: int = 0

    def after(
        self, train: TrainOptions, step: StepNumber, value: float, *, is_saved: bool
    ) -> Judged:
        """After one more evaluation.

        Args:
            train: how the run is trained.
            step: how many steps are in the weights.
            value: what they are worth, see `metric_of`.
            is_saved: whether they can be had again.
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
        """Whether the run ends with the weights that were evaluated last."""
        return 0 < train.early_stopping_patience <= self.num_worse


def _is_better(train: TrainOptions, new: Best, before: Best | None) -> bool:
    if before is None:
        return True
    return new.value < before.value if train.lower_is_better else new.value > before.value


def metric_of(train: TrainOptions, loss: float, counts: Sequence[int]) -> float:
    """What an evaluation says of the weights, by the run's metric.

    Args:
        train: how the run is trained.
        loss: mean over all targets.
        counts: that the task's metrics are made of; where they are missing the metric is 0.
    """
    if train.best_metric == "loss":
        return loss
    task = task_of(train)
    return task.metrics(counts)[train.best_metric] if len(counts) == task.num_counts else 0.0
