"""What a step costs beside operations and bytes, learned from steps that were measured. Pure.

A step of a small model takes longer than its operations and bytes say: Python prepares each block
and each frame, the coordinator plans and commits, and peers on one machine share its cores. Six
factors stand for that. They are known as logarithms with a normal distribution, so what they say
of a step is a range; each measured step moves and narrows it by an extended Kalman filter
(Jazwinski 1970, Stochastic Processes and Filtering Theory, ch. 8). Machines have more or less to do
from one run to the next: between two measurements the range widens again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from swarm_ft.protocol.machines.step_time import Bound, StageTime, step_time
from swarm_ft.protocol.messages.capacity import MAX_LOG, NUM_COSTS, Costs


class Factors(NamedTuple):
    """What a step costs beside operations and bytes.

    Attributes:
        block_s: of a block, there and back, for one microbatch.
        message_s: of a frame, at both of its ends together.
        step_s: from a step's plan to its commit, beside its microbatches.
        compute: seconds of an operation, to those that a peer measured.
        link: seconds of a byte, to those that a peer measured.
        load: by which other work on the machines stretches all but links.
    """

    block_s: float
    message_s: float
    step_s: float
    compute: float
    link: float
    load: float


PRIOR = Factors(block_s=0.0025, message_s=0.006, step_s=0.04, compute=1.2, link=1.15, load=1.0)
"""Before a run of the swarm was measured: a processor of a laptop, by `benchmarks/forecasts.py`."""
PRIOR_SPREAD = Factors(block_s=0.5, message_s=0.5, step_s=0.5, compute=0.35, link=0.15, load=0.35)
"""Standard deviations of their logarithms."""
DRIFT = 0.1
"""Of the logarithm of the load, from one run to the next."""
NOISE = 0.1
"""Of a step's seconds, relative: whatever else the model leaves out."""
COMPUTE_NOISE = 0.3
"""So too of what peers report that they compute."""
DISTANCE = 1.645
"""Standard deviations on either side that hold nine of ten."""
PRIOR_SURPRISES = 3.0
"""How many measurements the expected noise weighs, against that of the runs that were measured."""
MAX_SURPRISE = 9.0
"""That one measurement counts, at most: an outlier is no rule."""
_PROBE = 0.25
"""By which a logarithm is moved to see what depends on it."""


class Limit(Enum):
    """What a step may be bound by beside the bounds of one stage."""

    CORES = "cores"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """One stage, as far as a step's cost follows from it.

    Attributes:
        time: of its operations and bytes alone.
        blocks: that it computes.
        frames: of a microbatch, over the boundary in front of it.
        machines: of its replicas; peers with the same name share cores.
        busy: share of their time that other runs take, at the mean replica.
    """

    time: StageTime
    blocks: int
    frames: int
    machines: tuple[str, ...]
    busy: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """All that a step's cost follows from.

    Attributes:
        stages: first to last.
        num_microbatches: of a step.
        told_s: from the last stage that is ready to the first that begins the next step.
        cores: of machines whose number of cores is known.
        busy: share of these that other runs take.
    """

    stages: tuple[StageWork, ...]
    num_microbatches: int
    told_s: float = 0.0
    cores: Mapping[str, float]
    busy: Mapping[str, float]

    @property
    def alone(self) -> Pipeline:
        """The same without other runs."""
        stages = tuple(replace(stage, busy=0.0) for stage in self.stages)
        return replace(self, stages=stages, busy={})


class StepCost(NamedTuple):
    """Seconds of a step, and its bound: of a stage, counted from 0, or of a machine's cores."""

    seconds: float
    stage: int
    bound: Bound | Limit
    machine: str = ""


class SecondsRange(NamedTuple):
    """Seconds that hold nine of ten, and those in the middle."""

    low: float
    likely: float
    high: float

    @property
    def width(self) -> float:
        """How many times the highest is the lowest."""
        return self.high / self.low if self.low else math.inf


# ---- a step, were the factors known


def step_cost(pipeline: Pipeline, factors: Factors) -> StepCost:
    """Compute the seconds of a step.

    A microbatch is computed by one core. Where a machine has fewer cores than peers of the
    pipeline, all that they compute in a step passes its cores.
    """
    times = stage_times(pipeline, factors)
    told_s = pipeline.told_s + factors.step_s * factors.load
    found = step_time(times, pipeline.num_microbatches, told_s)
    crowded_s, machine = _crowded(pipeline, times)
    crowded_s += told_s
    if crowded_s > found.seconds:
        return StepCost(crowded_s, found.stage, Limit.CORES, machine)
    return StepCost(*found)


def forward_turn_s(pipeline: Pipeline, forward_s: Sequence[float], factors: Factors) -> float:
    """Compute the seconds from one microbatch to the next, of those that are evaluated alone.

    Args:
        pipeline: that they pass.
        forward_s: of a microbatch's operations, at each stage.
        factors: see `Factors`.
    """
    frames = [*(stage.frames for stage in pipeline.stages), 0]
    found = []
    for index, stage in enumerate(pipeline.stages):
        python_s = factors.block_s * stage.blocks / 3
        python_s += factors.message_s * (frames[index] + frames[index + 1]) / 4
        computed_s = factors.load * (factors.compute * forward_s[index] + python_s)
        computed_s *= 1 + stage.busy
        found.append(replace(stage.time, turn_s=computed_s / len(stage.machines)))
    crowded_s, _ = _crowded(replace(pipeline, num_microbatches=1), found)
    return max(crowded_s, *(time.turn_s for time in found))


def stage_times(pipeline: Pipeline, factors: Factors) -> list[StageTime]:
    """Compute what each stage adds to a step, with all that its machine does beside."""
    frames = [*(stage.frames for stage in pipeline.stages), 0]
    found = []
    for index, stage in enumerate(pipeline.stages):
        handled = (frames[index] + frames[index + 1]) / 2
        computed_s = compute_s(stage, factors) + factors.load * handled * factors.message_s
        computed_s *= 1 + stage.busy
        forward_s, backward_s = stage.time.hop_s
        found.append(
            replace(
                stage.time,
                compute_s=computed_s,
                turn_s=computed_s / len(stage.machines),
                hop_s=(factors.link * forward_s, factors.link * backward_s),
                up_bytes_per_s=stage.time.up_bytes_per_s / factors.link,
                down_bytes_per_s=stage.time.down_bytes_per_s / factors.link,
                reduced_s=factors.link * stage.time.reduced_s,
            )
        )
    return found


def compute_s(stage: StageWork, factors: Factors) -> float:
    """Compute the seconds of a microbatch at a stage, there and back, without its frames."""
    operations_s = factors.compute * stage.time.compute_s
    return factors.load * (operations_s + factors.block_s * stage.blocks)


def _crowded(pipeline: Pipeline, times: Sequence[StageTime]) -> tuple[float, str]:
    """Return the seconds of the machine whose cores have most to do, and its name."""
    work_s: dict[str, float] = {}
    for stage, time in zip(pipeline.stages, times, strict=True):
        share_s = pipeline.num_microbatches * time.turn_s / (1 + stage.busy)
        for machine in stage.machines:
            work_s[machine] = work_s.get(machine, 0.0) + share_s
    crowded = {
        machine: seconds * (1 + pipeline.busy.get(machine, 0.0)) / pipeline.cores[machine]
        for machine, seconds in work_s.items()
        if pipeline.cores.get(machine)
    }
    if not crowded:
        return 0.0, ""
    slowest = max(crowded, key=crowded.__getitem__)
    return crowded[slowest], slowest


# ---- what is known of the factors


def prior() -> Costs:
    """Return what is known before any run was measured."""
    covariance = [
        spread**2 if row == column else 0.0
        for row, spread in enumerate(PRIOR_SPREAD)
        for column in range(NUM_COSTS)
    ]
    return Costs(logs=tuple(map(math.log, PRIOR)), covariance=tuple(covariance))


def bare() -> Costs:
    """Return costs of nothing but operations and bytes: what they give is a bound from below."""
    nothing = (-MAX_LOG,) * 3
    return Costs(logs=(*nothing, 0.0, 0.0, 0.0), covariance=(0.0,) * NUM_COSTS**2)


def factors_of(costs: Costs) -> Factors:
    """Return the factors in the middle of what is known."""
    return Factors(*map(math.exp, costs.logs))


def learned(costs: Costs, step_s: Callable[[Factors], float], measured_s: float) -> Costs:
    """Return what is known after one more run.

    Args:
        costs: known before.
        step_s: what the model says of the run's mean step.
        measured_s: how long it took.
    """
    drifted = _drifted(costs)
    after, surprise = _updated(drifted, step_s, measured_s, NOISE)
    return replace(
        after,
        num_runs=costs.num_runs + 1,
        surprise=costs.surprise + min(surprise, MAX_SURPRISE),
    )


def learned_compute(costs: Costs, seconds: Callable[[Factors], float], measured_s: float) -> Costs:
    """Return what is known after peers reported the seconds that their tasks took."""
    after, _ = _updated(costs, seconds, measured_s, COMPUTE_NOISE)
    return after


def expected(
    costs: Costs, seconds: Callable[[Factors], float], more_spread: float = 0.0
) -> SecondsRange:
    """Return the range of what depends on the factors.

    Args:
        costs: what is known of them.
        seconds: that follow from them.
        more_spread: standard deviation of its logarithm by all else that is not known.
    """
    middle = seconds(factors_of(costs))
    if not middle:
        return SecondsRange(0.0, 0.0, 0.0)
    slopes = _slopes(costs, seconds)
    known = _drifted(costs) if costs.num_runs else costs
    noise = NOISE if any(costs.covariance) else 0.0
    variance = _along(known, slopes, slopes) + noise**2
    variance = variance * _noisiness(costs) + more_spread**2
    factor = math.exp(DISTANCE * math.sqrt(max(0.0, variance)))
    return SecondsRange(middle / factor, middle, middle * factor)


def _noisiness(costs: Costs) -> float:
    """How many times the expected variance runs had that were measured."""
    return (PRIOR_SURPRISES + costs.surprise) / (PRIOR_SURPRISES + costs.num_runs)


def _drifted(costs: Costs) -> Costs:
    at = Factors._fields.index("load") * (NUM_COSTS + 1)
    covariance = list(costs.covariance)
    covariance[at] += DRIFT**2
    return replace(costs, covariance=tuple(covariance))


def _updated(
    costs: Costs, seconds: Callable[[Factors], float], measured_s: float, noise: float
) -> tuple[Costs, float]:
    """Return the costs after a measurement, and its squared distance in standard deviations."""
    middle = seconds(factors_of(costs))
    if not (middle > 0 and measured_s > 0):
        return costs, 0.0
    apart = math.log(measured_s / middle)
    slopes = _slopes(costs, seconds)
    gains = [_row(costs, row, slopes) for row in range(NUM_COSTS)]
    variance = math.fsum(s * g for s, g in zip(slopes, gains, strict=True)) + noise**2
    logs = tuple(
        known + gain * apart / variance for known, gain in zip(costs.logs, gains, strict=True)
    )
    covariance = tuple(
        costs.covariance[row * NUM_COSTS + column] - gains[row] * gains[column] / variance
        for row in range(NUM_COSTS)
        for column in range(NUM_COSTS)
    )
    return replace(costs, logs=logs, covariance=covariance), apart**2 / variance


def _slopes(costs: Costs, seconds: Callable[[Factors], float]) -> list[float]:
    """How much the logarithm of the seconds changes with each factor's."""
    found = []
    for index in range(NUM_COSTS):
        above, below = (
            seconds(
                Factors(
                    *(
                        math.exp(known + (by if number == index else 0.0))
                        for number, known in enumerate(costs.logs)
                    )
                )
            )
            for by in (_PROBE, -_PROBE)
        )
        found.append(math.log(above / below) / (2 * _PROBE) if above and below else 0.0)
    return found


def _row(costs: Costs, row: int, slopes: Sequence[float]) -> float:
    begin = row * NUM_COSTS
    values = costs.covariance[begin : begin + NUM_COSTS]
    return math.fsum(value * slope for value, slope in zip(values, slopes, strict=True))


def _along(costs: Costs, one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(value * _row(costs, row, other) for row, value in enumerate(one))
