"""Costs of a step beside operations and bytes, and learning of them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.machines.step_cost import (
    PRIOR,
    Factors,
    Limit,
    Pipeline,
    StageWork,
    bare,
    expected_range,
    factors_of,
    forward_turn_s,
    prior,
    step_cost,
    update_compute_cost,
    update_costs,
)
from swarm_ft.protocol.machines.step_time import Crossing, StageTime
from swarm_ft.protocol.messages.capacity import NUM_COSTS, Costs


def work(
    compute_s: float = 0.1,
    blocks: int = 2,
    frames: int = 0,
    machines: Sequence[str] = ("a",),
    busy: float = 0.0,
    hop_s: float = 0.0,
    trained_bytes: float = 0.0,
) -> StageWork:
    return StageWork(
        time=StageTime(
            compute_s=compute_s,
            turn_s=compute_s / len(machines),
            comes=Crossing(),
            hop_s=(hop_s, hop_s),
            up_bytes_per_s=math.inf,
            down_bytes_per_s=math.inf,
            reduced_s=0.0,
        ),
        blocks=blocks,
        trained_bytes=trained_bytes,
        frames=frames,
        machines=tuple(machines),
        busy=busy,
    )


def row(
    *stages: StageWork,
    microbatches: int = 4,
    cores: Mapping[str, float] | None = None,
    busy: Mapping[str, float] | None = None,
    load: Mapping[str, float] | None = None,
) -> Pipeline:
    return Pipeline(
        stages=stages,
        num_microbatches=microbatches,
        cores=cores or {},
        busy=busy or {},
        load=load or {},
    )


BARE = factors_of(bare())
works = st.builds(
    work,
    compute_s=st.floats(0.0, 10.0),
    blocks=st.integers(1, 40),
    frames=st.integers(0, 16),
    machines=st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
    busy=st.floats(0.0, 2.0),
    hop_s=st.floats(0.0, 1.0),
    trained_bytes=st.floats(0.0, 1e9),
)


def on_three_machines(stages: list[StageWork], microbatches: int, cores: float) -> Pipeline:
    return row(*stages, microbatches=microbatches, cores={"a": cores, "b": cores, "c": cores})


pipelines = st.builds(
    on_three_machines,
    st.lists(works, min_size=1, max_size=5),
    st.integers(1, 16),
    st.floats(0.5, 64.0),
)
factors = st.builds(
    Factors,
    block_s=st.floats(1e-5, 0.1),
    message_s=st.floats(1e-5, 0.1),
    step_s=st.floats(1e-4, 1.0),
    update_s=st.floats(1e-11, 1e-7),
    compute=st.floats(0.2, 20.0),
    link=st.floats(0.5, 5.0),
    load=st.floats(0.2, 20.0),
)


# ---- a step


@given(pipelines, factors, st.sampled_from(Factors._fields), st.floats(1.0, 10.0))
def test_no_factor_that_rises_makes_a_step_shorter(
    pipeline: Pipeline, known: Factors, name: str, times: float
) -> None:
    more = known._replace(**{name: times * getattr(known, name)})
    before, after = step_cost(pipeline, known).seconds, step_cost(pipeline, more).seconds
    assert after >= before * (1 - 1e-5)


@given(pipelines, factors)
def test_others_work_and_fewer_cores_make_no_step_shorter(
    pipeline: Pipeline, known: Factors
) -> None:
    seconds = step_cost(pipeline, known).seconds
    assert step_cost(pipeline.alone, known).seconds <= seconds * (1 + 1e-5)
    halved = replace(pipeline, cores={name: n / 2 for name, n in pipeline.cores.items()})
    assert step_cost(halved, known).seconds >= seconds * (1 - 1e-5)


@given(pipelines)
def test_without_overhead_a_step_is_what_operations_and_bytes_take(pipeline: Pipeline) -> None:
    """A peer on a shared machine is no faster than alone."""
    roomy = replace(pipeline.alone, cores={})
    stages = [stage.time for stage in roomy.stages]
    alone_s = sum(one.compute_s + sum(one.hop_s) for one in stages)
    turn_s = max(one.turn_s for one in stages)
    expected_s = alone_s + (pipeline.num_microbatches - 1) * turn_s
    assert step_cost(roomy, BARE).seconds == pytest.approx(expected_s, abs=1e-9)
    assert step_cost(pipeline, BARE).seconds >= expected_s * (1 - 1e-9)


def test_each_block_each_frame_and_each_step_takes_its_time() -> None:
    known = BARE._replace(block_s=0.01, message_s=0.1, step_s=1.0)
    two = row(work(0.0, blocks=3), work(0.0, blocks=1, frames=2), microbatches=1)
    # A frame costs half of its time at either end.
    assert step_cost(two, known).seconds == pytest.approx(4 * 0.01 + 2 * 0.1 + 1.0)
    assert step_cost(two, known._replace(load=3.0)).seconds == pytest.approx(3 * 1.24)


def test_weights_are_updated_once_a_step_at_all_stages_together() -> None:
    known = BARE._replace(update_s=1e-9)
    apart = [work(0.0, trained_bytes=1e9, machines=(name,)) for name in "ab"]
    assert step_cost(row(*apart), known).seconds == pytest.approx(1.0)
    together = [work(0.0, trained_bytes=1e9, machines=("one",)) for _ in range(2)]
    assert step_cost(row(*together, cores={"one": 1.0}), known).seconds == pytest.approx(2.0)


def test_a_machine_with_fewer_cores_than_peers_is_what_a_step_waits_for() -> None:
    many = [work(0.1, machines=("one",)) for _ in range(6)]
    found = step_cost(row(*many, microbatches=10, cores={"one": 2.0}), BARE)
    assert (found.bound, found.machine) == (Limit.CORES, "one")
    assert found.seconds == pytest.approx(6 * 10 * 0.1 / 2)
    apart = [work(0.1, machines=(f"{n}",)) for n in range(6)]
    own = step_cost(row(*apart, microbatches=10, cores={f"{n}": 2.0 for n in range(6)}), BARE)
    assert own.seconds == pytest.approx((6 + 9) * 0.1)


def test_another_run_has_its_share_of_a_peer_and_of_its_machine() -> None:
    assert step_cost(row(work(busy=1.0)), BARE).seconds == pytest.approx(0.8)
    pair = [work(machines=("one",)) for _ in range(2)]
    # Two stages take 0.5 s of their own, in which 1.6 of them compute at once; one more half waits.
    half, one = {"one": 0.5}, {"one": 1.0}
    for crowded in (row(*pair, cores=one, busy=half), row(*pair, cores=one, load=half)):
        found = step_cost(crowded, BARE)
        assert found.seconds == pytest.approx(0.5 * (1.6 + 0.5), rel=1e-4)
        assert found.bound is Limit.CORES


def test_a_microbatch_that_is_evaluated_goes_there_alone() -> None:
    known = BARE._replace(block_s=0.03)
    found = forward_turn_s(row(work(blocks=2), work(blocks=1)), [0.1, 0.2], known)
    assert found == pytest.approx(0.2 + 0.03 / 3)


# ---- what is learned


@given(pipelines, st.floats(1e-3, 1e3))
def test_a_measurement_moves_what_is_expected_towards_it_and_narrows_it(
    pipeline: Pipeline, measured_s: float
) -> None:
    def step_s(known: Factors) -> float:
        return step_cost(pipeline, known).seconds

    before = prior()
    after = update_costs(before, step_s, measured_s)
    was, after_range = expected_range(before, step_s), expected_range(after, step_s)
    assert after_range.low <= after_range.likely <= after_range.high
    assert all(math.isfinite(value) for value in (*after.logs, *after.covariance))
    variances = [after.covariance[n * (NUM_COSTS + 1)] for n in range(NUM_COSTS)]
    assert min(variances) > 0
    if 0.5 < measured_s / was.likely < 2:  # beyond, the model is far from where it was linear
        distances = [abs(math.log(one.likely / measured_s)) for one in (was, after_range)]
        assert distances[1] <= distances[0] + 1e-6
        assert after_range.width < was.width


TINY = row(work(1e-4, blocks=3), work(1e-4, blocks=3, frames=8, hop_s=1e-3), microbatches=4)
LARGE = row(work(2.0, blocks=3), work(2.0, blocks=3, frames=8, hop_s=1e-3), microbatches=4)


def seconds_of(pipeline: Pipeline, known: Factors) -> float:
    return step_cost(pipeline, known).seconds


def run_of(rng: random.Random, truth: Factors, pipeline: Pipeline) -> float:
    """Return the seconds of a step on machines whose load differs from run to run."""
    load = truth.load * math.exp(rng.gauss(0.0, 0.1))
    return step_cost(pipeline, truth._replace(load=load)).seconds * math.exp(rng.gauss(0.0, 0.05))


def test_after_runs_of_all_sizes_ranges_hold_the_truth_and_are_narrow() -> None:
    rng, num_right, wide, num_forecasts = random.Random(7), 0, 0, 0
    for _ in range(40):
        spreads = [0.4] * (NUM_COSTS - 1) + [0.3]
        truth = Factors._make(
            known * math.exp(rng.gauss(0.0, spread))
            for known, spread in zip(PRIOR, spreads, strict=True)
        )
        costs = prior()
        for pipeline in (TINY, LARGE, TINY, LARGE, TINY):
            taken_s, step_s = run_of(rng, truth, pipeline), partial(seconds_of, pipeline)
            if costs.num_runs >= 2:
                found = expected_range(costs, step_s)
                num_forecasts, num_right = (
                    num_forecasts + 1,
                    num_right + (found.low <= taken_s <= found.high),
                )
                wide += found.width > 2
            costs = update_costs(costs, step_s, taken_s)
    assert num_forecasts == 120
    assert num_right >= 108
    assert wide <= 30


def test_a_swarm_whose_runs_surprise_expects_less_exactly() -> None:
    def step_s(known: Factors) -> float:
        return step_cost(TINY, known).seconds

    def after(*measured_s: float) -> Costs:
        costs = prior()
        for seconds in measured_s:
            costs = update_costs(costs, step_s, seconds)
        return costs

    steady, jumpy = after(0.2, 0.2, 0.2, 0.2), after(0.1, 0.4, 0.1, 0.4)
    assert expected_range(jumpy, step_s).width > 1.3 * expected_range(steady, step_s).width


def test_seconds_that_peers_report_tell_compute_from_messages() -> None:
    """A slow stage does not make messages slow."""
    costs = update_compute_cost(prior(), lambda f: f.load * f.compute * 1.0, 4.0)
    known = factors_of(costs)
    half_way = math.sqrt(4.0 / (PRIOR.compute * PRIOR.load))
    assert known.compute * known.load > half_way * PRIOR.compute * PRIOR.load
    assert known.message_s == pytest.approx(PRIOR.message_s)


def test_nothing_is_learned_of_what_takes_no_time() -> None:
    assert update_compute_cost(prior(), lambda _: 0.0, 1.0) == prior()
    assert expected_range(prior(), lambda _: 0.0) == (0.0, 0.0, 0.0)


def test_a_bound_from_below_has_no_range() -> None:
    found = expected_range(bare(), lambda f: step_cost(LARGE, f).seconds)
    assert found.low == found.likely == found.high
