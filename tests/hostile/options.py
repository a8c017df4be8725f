"""Numeric options of a job at both ends of their declared bounds, alone and in pairs. Pure.

The list comes from the declarations, so that an option that is added is tried too. A pair of ends
is tried in some job that has both; jobs have many ends at once, so that few jobs try all pairs.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm_ft.protocol.spec.bounds import OneOf, Range
from swarm_ft.protocol.spec.options import OptionField, option_fields
from swarm_ft.protocol.spec.run_spec import MAX_BATCH_SIZE, Adapter, RunSpec, TrainOptions

LEAST_FLOAT = 5e-324


@dataclass(frozen=True, slots=True)
class End:
    """One option at one end of its bounds."""

    field: str
    value: float

    def __str__(self) -> str:
        return f"{self.field}={self.value:g}"


Ends = tuple[End, ...]


def numeric_options() -> tuple[OptionField, ...]:
    """The options of a job that take a number."""
    return tuple(one for one in option_fields(TrainOptions) if one.kind in (int, float))


def ends_of(option: OptionField) -> Ends:
    """Both ends of an option's bounds; of a number without a largest one, the largest float."""
    for bound in option.bounds:
        if isinstance(bound, OneOf):
            numbers = [value for value in bound.values if isinstance(value, int | float)]
            return End(option.field, min(numbers)), End(option.field, max(numbers))
        if isinstance(bound, Range):
            high = bound.maximum if math.isfinite(bound.maximum) else sys.float_info.max
            ends = [bound.minimum, *([LEAST_FLOAT] if option.kind is float else []), high]
            return tuple(End(option.field, option.kind(value)) for value in ends)
    raise ValueError(f"{option.flag} takes a number and declares no bounds")


def all_ends() -> Ends:
    """Return the ends of all options."""
    return tuple(end for option in numeric_options() for end in ends_of(option))


def all_pairs() -> Iterator[Ends]:
    """Each end of each option with each end of each other."""
    for one, other in itertools.combinations(all_ends(), 2):
        if one.field != other.field:
            yield one, other


COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "batch_size": {"micro_batch_size": 1},
    "micro_batch_size": {"batch_size": MAX_BATCH_SIZE},
    "lora_r": {"adapter": Adapter.LORA},
    "lora_alpha": {"adapter": Adapter.LORA},
    "lora_dropout": {"adapter": Adapter.LORA, "dropout": True},
    "fill_microbatches": {"fill_codec": "none"},
    "drain_microbatches": {"drain_codec": "none"},
    "eval_steps": {"num_eval_samples": 2},
    "early_stopping_patience": {"num_eval_samples": 2, "eval_steps": 1},
    "early_stopping_threshold": {
        "num_eval_samples": 2,
        "eval_steps": 1,
        "early_stopping_patience": 1,
    },
    "quality": {"forward_codec": "aq3+z", "backward_codec": "q3+z", "key_codec": "q4+z"},
}
"""Without which an option has no effect, or is refused."""


def job_with(spec: RunSpec, ends: Collection[End]) -> RunSpec:
    """A job with these ends, and with what they need beside them.

    Raises:
        SwarmError: the client refuses it.
    """
    values: dict[str, Any] = {}
    for end in ends:
        values |= COMPANIONS.get(end.field, {})
    values |= {end.field: end.value for end in ends}
    if values.get("quality") and "fill_codec" in values:
        values |= {"fill_codec": "", "drain_codec": ""}
    return replace(spec, train=replace(spec.train, num_steps=2, **values))


def covering(ends: Sequence[End]) -> list[Ends]:
    """Few jobs in which each pair of these ends occurs, each option once in a job. Greedy."""
    fields = dict.fromkeys(end.field for end in ends)
    choices = {field: [end for end in ends if end.field == field] for field in fields}
    missing = {
        frozenset((one, other))
        for one, other in itertools.combinations(ends, 2)
        if one.field != other.field
    }
    jobs: list[Ends] = []
    while missing:
        job: list[End] = sorted(next(iter(sorted(missing, key=str))), key=str)
        for field, some in choices.items():
            if all(end.field != field for end in job):
                job.append(max(some, key=lambda end: _new_pairs(job, end, missing)))
        missing -= {frozenset(pair) for pair in itertools.combinations(job, 2)}
        jobs.append(tuple(job))
    return jobs


def _new_pairs(job: Sequence[End], end: End, missing: Collection[frozenset[End]]) -> int:
    return sum(frozenset((end, other)) in missing for other in job)


def extremes(ends: Sequence[End]) -> list[Ends]:
    """Two jobs: all options at their lowest of these ends, and all at their highest."""
    fields = dict.fromkeys(end.field for end in ends)
    own = [sorted((e for e in ends if e.field == field), key=lambda e: e.value) for field in fields]
    return [tuple(some[at] for some in own) for at in (0, -1)]


def with_end(end: End, job: Ends) -> Ends:
    """A job with this end too."""
    return (end, *(one for one in job if one.field != end.field))
