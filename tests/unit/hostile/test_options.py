"""Numeric options at the ends of their bounds: which there are, and what specs make of them."""

import itertools

import pytest

from swarm_ft.errors import SwarmError
from swarm_ft.protocol.spec.options import option_fields
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainOptions
from swarm_ft.protocol.wire import RUN_SPEC
from tests.hostile.options import (
    End,
    all_ends,
    all_pairs,
    covering,
    extremes,
    job_with,
    numeric_options,
    with_end,
)
from tests.specs import run_spec


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return run_spec(forward_codec="none", backward_codec="none", key_codec="fp16")


def test_all_numbers_that_a_job_takes_have_ends() -> None:
    numbers = {one.field for one in option_fields(TrainOptions) if one.kind in (int, float)}
    assert {end.field for end in all_ends()} == numbers
    assert {"batch_size", "learning_rate", "lora_dropout", "buffer_bits", "seed"} <= numbers
    assert End("batch_size", 1) in all_ends()
    assert all(
        len({e for e in all_ends() if e.field == one.field}) > 1 for one in numeric_options()
    )


def test_each_end_alone_is_refused_in_words_or_is_the_same_behind_the_wire(spec: RunSpec) -> None:
    taken = [end for end in all_ends() if is_taken(spec, (end,))]
    assert len(taken) > len(all_ends()) / 2


def test_each_pair_of_ends_too(spec: RunSpec) -> None:
    pairs = list(all_pairs())
    fields = {one.field for one in numeric_options()}
    assert {frozenset(e.field for e in pair) for pair in pairs} == {
        frozenset(two) for two in itertools.combinations(fields, 2)
    }
    assert sum(is_taken(spec, pair) for pair in pairs) > len(pairs) / 2


def is_taken(spec: RunSpec, ends: tuple[End, ...]) -> bool:
    """Whether a client makes a job of these; any error but one of the project's own fails."""
    try:
        job = job_with(spec, ends)
    except SwarmError:
        return False
    assert RUN_SPEC.from_bytes(RUN_SPEC.to_bytes(job)).digest() == job.digest()
    return True


def test_few_jobs_have_all_pairs() -> None:
    ends = all_ends()
    jobs = covering(ends)
    had = {frozenset(pair) for job in jobs for pair in itertools.combinations(job, 2)}
    assert had >= {frozenset(pair) for pair in all_pairs()}
    assert len(jobs) < len(ends)
    for job in jobs:
        assert len({end.field for end in job}) == len(job) == len(numeric_options())


def test_extremes_and_one_end_beside_them() -> None:
    ends = (End("a", 1), End("a", 9), End("b", 0), End("b", 5))
    low, high = extremes(ends)
    assert (low, high) == ((End("a", 1), End("b", 0)), (End("a", 9), End("b", 5)))
    assert with_end(End("a", 7), high) == (End("a", 7), End("b", 5))
