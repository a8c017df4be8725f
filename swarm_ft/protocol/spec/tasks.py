"""Tasks: the targets among a sample's words, their kind, and their metrics. Pure.

This module, and `stage.heads` for the computing part, hold all differences between tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarm_ft.protocol.spec.run_spec import TaskKind, TrainOptions
from swarm_ft.protocol.spec.sample_rows import (
    CONTEXT,
    Flags,
    Words,
    first_refused,
    labels_in,
    starts_in,
    text_refusal,
)


class Task(Protocol):
    """A task; see the module's docstring."""

    @property
    def kind(self) -> TaskKind:
        """Kind of the task."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of classes, by their numbers; empty if a target is a token."""

    def num_outputs(self, vocab_size: int) -> int:
        """Return the number of logits of a target."""

    def refusal(self, rows: Words, vocab_size: int) -> tuple[int, str] | None:
        """Return the first of rows [N, T] that is no sample, with the reason; None for none."""

    @property
    def num_counts(self) -> int:
        """Number of counts behind `metrics`, which are sums over targets; 0 without metrics."""

    def metrics(self, counts: Sequence[int]) -> Mapping[str, float]:
        """Return metrics of the predictions by their usual names."""


@dataclass(frozen=True, slots=True)
class CausalLm:
    """Causal language modelling: the tokens before a token predict it."""

    @property
    def kind(self) -> TaskKind:
        """See `Task`."""
        return TaskKind.CAUSAL_LM

    @property
    def labels(self) -> tuple[str, ...]:
        """See `Task`."""
        return ()

    def num_outputs(self, vocab_size: int) -> int:
        """See `Task`."""
        return vocab_size

    def refusal(self, rows: Words, vocab_size: int) -> tuple[int, str] | None:
        """See `Task`."""
        return text_refusal(rows, vocab_size)

    @property
    def num_counts(self) -> int:
        """See `Task`."""
        return 0

    def metrics(self, counts: Sequence[int]) -> Mapping[str, float]:
        """See `Task`: the loss is the only metric."""
        return {}


@dataclass(frozen=True, slots=True)
class Classification:
    """Classification of samples, or of each of their tokens.

    Attributes:
        kind: Kind of the classification.
        labels: Names of the classes.
    """

    kind: TaskKind
    labels: tuple[str, ...]

    def num_outputs(self, vocab_size: int) -> int:
        """See `Task`."""
        return len(self.labels)

    def refusal(self, rows: Words, vocab_size: int) -> tuple[int, str] | None:
        """See `Task`. The class of a whole sample stands at one token, which a decoder reads."""
        labels = labels_in(rows)
        has_label = labels >= 0
        is_outside: Flags = np.any(labels >= len(self.labels), axis=1)
        wrong = [(is_outside, f"expected classes below {len(self.labels)}")]
        if self.kind is TaskKind.CLASSIFICATION:
            is_not_one: Flags = has_label.sum(axis=1) != 1
            wrong.append((is_not_one, "expected one class"))
        else:
            has_none: Flags = ~np.any(has_label, axis=1)
            wrong.append((has_none, "expected a token with a class"))
        is_text: Flags = np.any(~has_label & (rows < CONTEXT), axis=1)
        wrong.append((is_text, "expected tokens that have a class or are only read"))
        is_packed: Flags = np.any(starts_in(rows), axis=1)
        wrong.append((is_packed, "expected one document a sample"))
        return first_refused(rows, vocab_size, wrong)

    @property
    def num_counts(self) -> int:
        """See `Task`: for each class the correct predictions, all predictions, and all targets."""
        return 3 * len(self.labels)

    def metrics(self, counts: Sequence[int]) -> Mapping[str, float]:
        """See `Task`: as `evaluate` and scikit-learn define them.

        F1 is that of class 1 of two; of more, the mean over all that are predicted or present.
        """
        right, predicted, actual = np.array(counts, dtype=np.int64).reshape(3, -1).tolist()
        return {
            "accuracy": sum(right) / max(1, sum(actual)),
            "matthews_correlation": _matthews(right, predicted, actual),
            "f1": _f1(right, predicted, actual),
        }


def task_of(train: TrainOptions) -> Task:
    """Return the task of a run."""
    if train.task_kind is TaskKind.CAUSAL_LM:
        return CausalLm()
    return Classification(train.task_kind, train.labels)


def sum_counts(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the counts of all targets from the counts of parts of them."""
    parts = [one for one in counts if one]
    return tuple(sum(of_parts) for of_parts in zip(*parts, strict=True))


def _matthews(right: list[int], predicted: list[int], actual: list[int]) -> float:
    """Return Gorodkin's R_K (2004), Matthews' coefficient for two classes; 0 without spread."""
    count = sum(actual)
    both = sum(right) * count - sum(a * b for a, b in zip(predicted, actual, strict=True))
    of_predicted = count**2 - sum(a**2 for a in predicted)
    of_actual = count**2 - sum(b**2 for b in actual)
    return both / math.sqrt(of_predicted * of_actual) if of_predicted and of_actual else 0.0


def _f1(right: list[int], predicted: list[int], actual: list[int]) -> float:
    sums = [a + b for a, b in zip(predicted, actual, strict=True)]
    scores = [2 * hits / total if total else None for hits, total in zip(right, sums, strict=True)]
    if len(scores) == 2:
        return scores[1] or 0.0
    known = [score for score in scores if score is not None]
    return sum(known) / max(1, len(known))
