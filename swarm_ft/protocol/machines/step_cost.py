"""Costs of a step beside operations and bytes, learned from measured steps. Pure.

A step of a small model takes longer than its operations and bytes suggest: Python prepares each
block and each frame, the coordinator plans and commits, and peers on one machine share its cores.
Seven factors stand for that. Their logarithms have a normal distribution, so a forecast is a range.
Each measured step moves and narrows it by an extended Kalman filter (Jazwinski 1970, Stochastic
Processes and Filtering Theory, ch. 8). Machines have more or less to do from one run to the next,
so the range widens again between two measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from swarm_ft.protocol.machines.step_time import Bound, StageTime, StepTime, step_time
from swarm_ft.protocol.messages.capacity import MAX_LOG, NUM_COSTS, Costs


class Factors(NamedTuple):
    """Factors of a step's cost beside operations and bytes.

    Attributes:
        block_s: Seconds of a block, forward and backward, for one microbatch.
        message_s: Seconds of a frame, at both of its ends together.
        step_s: Seconds from a step's plan to its commit, beside its microbatches.
        update_s: Seconds of the optimizer for a byte of the weights that it trains.
        compute: Ratio of an operation's seconds to those that a peer measured.
        link: Ratio of a byte's seconds to those that a peer measured.
        load: Factor by which other work on the machines stretches all but links.
    """

    block_s: float
    message_s: float
    step_s: float
    update_s: float
    compute: float
    link: float
    load: float


PRIOR = Factors(
    block_s=0.0025, message_s=0.005, step_s=0.005, update_s=3e-9, compute=1.1, link=1.0, load=1.0
)
"""Factors before the first measured run: those of two quiet cores, by `benchmarks/forecasts.py`."""
PRIOR_SPREAD = Factors(
    block_s=0.25, message_s=0.25, step_s=0.4, update_s=0.4, compute=0.25, link=0.12, load=0.22
)
"""Standard deviations of the factors' logarithms."""
DRIFT = 0.06
"""Standard deviation of the change of the load's logarithm, from one run to the next."""
NOISE = 0.13
"""Relative standard deviation of a step's seconds by effects outside the model."""
FEW_STEPS_NOISE = 0.35
"""Relative standard deviation of one step's seconds; the mean of more varies less."""
COMPUTE_NOISE = 0.3
"""Relative standard deviation of peers' reported computing time."""
DISTANCE = 1.645
"""Standard deviations on either side of a range with 90 % probability."""
PRIOR_SURPRISES = 8.0
"""Weight of the expected noise, in measurements, against that of the measured runs."""
MAX_SURPRISE = 9.0
"""Largest surprise that one measurement counts with, since an outlier is no rule."""
PRECISION = 1e-6
"""Relative precision of a step's seconds."""
_LEAST = 1e-9
CROWDED = 1.2
"""Slowdown from which on a machine's cores count as the bound of a step."""
_PROBE = 0.25
"""Step of a factor's logarithm in the numerical derivative."""


class Limit(Enum):
    """Bound of a step beside those of one stage."""

    CORES = "cores"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """Work of one stage, as far as a step's cost depends on it.

    Attributes:
        time: Times of its operations and bytes alone.
        blocks: Number of its blocks.
        trained_bytes: Bytes of its weights that train.
        frames: Frames of a microbatch over the boundary in front of it.
        machines: Machines of its replicas; peers with the same name share cores.
        busy: Share of their time that other runs take, at the mean replica.
    """

    time: StageTime
    blocks: int
    trained_bytes: float
    frames: int
    machines: tuple[str, ...]
    busy: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Facts that determine a step's cost.

    Attributes:
        stages: Stages, first to last.
        num_microbatches: Microbatches of a step.
        control_s: Seconds from the last stage's readiness to the first stage's next step.
        cores: Number of peers for which each known machine computes at full speed.
        busy: Peers' worth of cores that other runs need, by machine.
        load: Peers' worth of cores that other programs need, by machine.
    """

    stages: tuple[StageWork, ...]
    num_microbatches: int
    control_s: float = 0.0
    cores: Mapping[str, float]
    busy: Mapping[str, float]
    load: Mapping[str, float]

    @property
    def alone(self) -> Pipeline:
        """The same pipeline without other runs on its machines; its rates of links stay."""
        stages = tuple(replace(stage, busy=0.0) for stage in self.stages)
        return replace(self, stages=stages, busy={})

    @property
    def quiet(self) -> Pipeline:
        """The same pipeline without other runs and programs."""
        return replace(self.alone, load={})


class StepCost(NamedTuple):
    """Seconds of a step, and its bound: a stage, counted from 0, or a machine's cores."""

    seconds: float
    stage: int
    bound: Bound | Limit
    machine: str = ""


class SecondsRange(NamedTuple):
    """Range of seconds with 90 % probability, and its middle."""

    low: float
    likely: float
    high: float

    @property
    def width(self) -> float:
        """Ratio of the highest to the lowest seconds."""
        return self.high / self.low if self.low else math.inf


# ---- a step with known factors


def step_cost(pipeline: Pipeline, factors: Factors) -> StepCost:
    """Compute the seconds of a step.

    A peer computes on one core of those that its machine has for peers like it. Where programs need
    more cores than a machine has, all of them take longer in proportion, since the kernel shares
    cores evenly. The pipeline's own need depends on its step's duration, so both are found
    together.
    """
    step_s, slowed, found = _settled(pipeline, factors)
    machine = max(slowed, key=slowed.__getitem__)
    is_crowded = found.bound is Bound.COMPUTE and slowed[machine] > CROWDED
    return StepCost(step_s, found.stage, Limit.CORES if is_crowded else found.bound, machine)


def _settled(pipeline: Pipeline, factors: Factors) -> tuple[float, dict[str, float], StepTime]:
    """Return the seconds of a step, its machines' slowdown, and its bound."""
    times = stage_times(pipeline, factors)
    told_s = pipeline.control_s + factors.step_s * factors.load

    def step(slowed: Mapping[str, float]) -> StepTime:
        known = [
            replace(time, reduced_s=time.reduced_s + by * _update_s(stage, factors))
            for stage, time, by in _slowed(pipeline, times, slowed)
        ]
        return step_time(known, pipeline.num_microbatches, told_s)

    work_s = _with_updates(pipeline, factors, _work_s(pipeline, times))
    step_s, slowed = _on_shared_cores(pipeline, work_s, lambda by: step(by).seconds)
    return step_s, slowed, step(slowed)


def _on_shared_cores(
    pipeline: Pipeline,
    work_s: Mapping[str, float],
    seconds: Callable[[Mapping[str, float]], float],
) -> tuple[float, dict[str, float]]:
    """Return the seconds of some work on machines with other work, and the machines' slowdown.

    Args:
        pipeline: Pipeline that does the work.
        work_s: Seconds of one core of each machine for the work.
        seconds: Returns the seconds of the work for a slowdown by machine; it rises with each.
    """
    alone = dict.fromkeys(work_s, 1.0)
    alone_s = seconds(alone)
    cores = {name: pipeline.cores.get(name) or math.inf for name in work_s}
    others = {name: pipeline.busy.get(name, 0.0) + pipeline.load.get(name, 0.0) for name in work_s}

    def slowed(whole_s: float) -> dict[str, float]:
        # The whole demand, waiting work of this pipeline included, shares the cores.
        left = {name: cores[name] - work_s[name] / whole_s for name in work_s}
        return {name: max(1.0, others[name] / max(left[name], _LEAST)) for name in work_s}

    least_s = max([alone_s, *(work_s[name] / cores[name] for name in work_s)])
    if not least_s or seconds(slowed(least_s)) <= least_s:
        return least_s, dict.fromkeys(work_s, least_s / alone_s if alone_s else 1.0)
    most_s = 2 * least_s
    while seconds(slowed(most_s)) > most_s:
        most_s *= 2
    while most_s > least_s * (1 + PRECISION):
        middle_s = (least_s + most_s) / 2
        if seconds(slowed(middle_s)) > middle_s:
            least_s = middle_s
        else:
            most_s = middle_s
    return most_s, slowed(most_s)


def _work_s(pipeline: Pipeline, times: Sequence[StageTime]) -> dict[str, float]:
    """Return the seconds of a step that one core of each machine would need."""
    work_s: dict[str, float] = {}
    for stage, time in zip(pipeline.stages, times, strict=True):
        share_s = pipeline.num_microbatches * time.turn_s / (1 + stage.busy)
        for machine in stage.machines:
            work_s[machine] = work_s.get(machine, 0.0) + share_s
    return work_s


def _with_updates(
    pipeline: Pipeline, factors: Factors, work_s: Mapping[str, float]
) -> dict[str, float]:
    """Add the seconds of a step's updates of the weights at all replicas."""
    found = dict(work_s)
    for stage in pipeline.stages:
        for machine in stage.machines:
            found[machine] += _update_s(stage, factors)
    return found


def _update_s(stage: StageWork, factors: Factors) -> float:
    return factors.load * factors.update_s * stage.trained_bytes


def _slowed(
    pipeline: Pipeline, times: Sequence[StageTime], slowed: Mapping[str, float]
) -> Iterator[tuple[StageWork, StageTime, float]]:
    """Yield each stage with its times and its slowdown."""
    for stage, time in zip(pipeline.stages, times, strict=True):
        by = max(slowed[machine] for machine in stage.machines)
        slower = replace(time, compute_s=by * time.compute_s, turn_s=by * time.turn_s)
        yield stage, slower, by


def forward_turn_s(pipeline: Pipeline, forward_s: Sequence[float], factors: Factors) -> float:
    """Compute the seconds from one evaluated microbatch to the next.

    Args:
        pipeline: Pipeline of the run.
        forward_s: Seconds of a microbatch's operations at each stage.
        factors: Factors of the cost.
    """
    frames = [*(stage.frames for stage in pipeline.stages), 0]
    found = []
    for index, stage in enumerate(pipeline.stages):
        python_s = factors.block_s * stage.blocks / 3
        python_s += factors.message_s * (frames[index] + frames[index + 1]) / 4
        computed_s = factors.load * (factors.compute * forward_s[index] + python_s)
        computed_s *= 1 + stage.busy
        found.append(replace(stage.time, turn_s=computed_s / len(stage.machines)))
    work_s = _work_s(replace(pipeline, num_microbatches=1), found)

    def seconds(slowed: Mapping[str, float]) -> float:
        return max(time.turn_s for _, time, _ in _slowed(pipeline, found, slowed))

    return _on_shared_cores(pipeline, work_s, seconds)[0]


def stage_times(pipeline: Pipeline, factors: Factors) -> list[StageTime]:
    """Compute what each stage adds to a step, with all other work of its machine."""
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


def reported_compute_s(pipeline: Pipeline, factors: Factors) -> list[float]:
    """Compute the seconds that peers report of a microbatch's tasks, at each stage.

    A clock measures them, so they contain the machine's slowdown, but not other runs' work between
    these tasks.
    """
    _, slowed, _ = _settled(pipeline, factors)
    return [
        compute_s(stage, factors) * max(slowed[machine] for machine in stage.machines)
        for stage in pipeline.stages
    ]


def compute_s(stage: StageWork, factors: Factors) -> float:
    """Compute the seconds of a microbatch at a stage, forward and backward, without its frames."""
    operations_s = factors.compute * stage.time.compute_s
    return factors.load * (operations_s + factors.block_s * stage.blocks)


# ---- knowledge of the factors


def prior() -> Costs:
    """Return the costs before any run was measured."""
    covariance = [
        spread**2 if row == column else 0.0
        for row, spread in enumerate(PRIOR_SPREAD)
        for column in range(NUM_COSTS)
    ]
    return Costs(logs=tuple(map(math.log, PRIOR)), covariance=tuple(covariance))


def bare() -> Costs:
    """Return costs of operations and bytes alone, which yield a lower bound."""
    nothing = (-MAX_LOG,) * 4
    return Costs(logs=(*nothing, 0.0, 0.0, 0.0), covariance=(0.0,) * NUM_COSTS**2)


def factors_of(costs: Costs) -> Factors:
    """Return the factors in the middle of their distribution."""
    return Factors(*map(math.exp, costs.logs))


def update_costs(
    costs: Costs, step_s: Callable[[Factors], float], measured_s: float, num_steps: int = 100
) -> Costs:
    """Return the costs after one more run.

    Args:
        costs: Costs before it.
        step_s: Returns the model's seconds of the run's mean step.
        measured_s: Measured seconds of the mean step.
        num_steps: Number of steps in that mean.
    """
    noise = math.hypot(NOISE, FEW_STEPS_NOISE / math.sqrt(num_steps))
    after, surprise = _updated(_drifted(costs), step_s, measured_s, noise)
    return replace(
        after,
        num_runs=costs.num_runs + 1,
        surprise=costs.surprise + min(surprise, MAX_SURPRISE),
    )


def update_compute_cost(
    costs: Costs, seconds: Callable[[Factors], float], measured_s: float
) -> Costs:
    """Return the costs after peers reported the seconds of their tasks."""
    after, _ = _updated(costs, seconds, measured_s, COMPUTE_NOISE)
    return after


def expected_range(
    costs: Costs, seconds: Callable[[Factors], float], more_spread: float = 0.0
) -> SecondsRange:
    """Return the range of seconds that depend on the factors.

    Args:
        costs: Costs of the swarm.
        seconds: Returns the seconds for given factors.
        more_spread: Standard deviation of the logarithm by all other unknowns.
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
    """Return the ratio of the measured runs' variance to the expected one."""
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
    """Return the derivative of the seconds' logarithm by each factor's."""
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
