"""What a model learns from a sample: which of its words are targets, of what, and how well. Pure.

All that differs from one task to another is said here, and in `stage.heads` for what computes.
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
    """See the module's docstring."""

    @property
    def kind(self) -> TaskKind:
        """Which it is."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of classes, by their numbers; none where a target is a token."""

    def num_outputs(self, vocab_size: int) -> int:
        """What a target is one of, that is, logits of each."""

    def refusal(self, rows: Words, vocab_size: int) -> tuple[int, str] | None:
        """The first of rows [N, T] that is no sample, and why; None if all are some."""

    @property
    def num_counts(self) -> int:
        """Of what `metrics` are made of; they are sums over targets. 0 if there are none."""

    def metrics(self, counts: Sequence[int]) -> Mapping[str, float]:
        """How well targets were told, by the usual names."""


@dataclass(frozen=True, slots=True)
class CausalLm:
    """Each token is told by those in front of it."""

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
        """See `Task`: the loss says it all."""
        return {}


@dataclass(frozen=True, slots=True)
class Classification:
    """Samples have a class, or each of their tokens does.

    Attributes:
        kind: one of the two.
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
        """See `Task`: for each class the targets that were told rightly, told so, and are so."""
        return 3 * len(self.labels)

    def metrics(self, counts: Sequence[int]) -> Mapping[str, float]:
        """See `Task`: as `evaluate` and scikit-learn define them.

        F1 is that of class 1 of two; of more, the mean over all that are told or there.
        """
        right, told, there = np.array(counts, dtype=np.int64).reshape(3, -1).tolist()
        return {
            "accuracy": sum(right) / max(1, sum(there)),
            "matthews_correlation": _matthews(right, told, there),
            "f1": _f1(right, told, there),
        }


def task_of(train: TrainOptions) -> Task:
    """What a run learns, by its options."""
    if train.task_kind is TaskKind.CAUSAL_LM:
        return CausalLm()
    return Classification(train.task_kind, train.labels)


def summed(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Counts of several parts of the targets, as those of all."""
    there = [one for one in counts if one]
    return tuple(sum(of_parts) for of_parts in zip(*there, strict=True))


def _matthews(right: list[int], told: list[int], there: list[int]) -> float:
    """Gorodkin's R_K (2004), which for two classes is Matthews' coefficient; 0 without spread."""
    count = sum(there)
    both = sum(right) * count - sum(a * b for a, b in zip(told, there, strict=True))
    of_told = count**2 - sum(a**2 for a in told)
    of_there = count**2 - sum(b**2 for b in there)
    return both / math.sqrt(of_told * of_there) if of_told and of_there else 0.0


def _f1(right: list[int], told: list[int], there: list[int]) -> float:
    sums = [a + b for a, b in zip(told, there, strict=True)]
    scores = [2 * hits / total if total else None for hits, total in zip(right, sums, strict=True)]
    if len(scores) == 2:
        return scores[1] or 0.0
    known = [score for score in scores if score is not None]
    return sum(known) / max(1, len(known))
