"""Least duration of a pipeline's step. Pure.

One microbatch goes all the way forward and back, and each other one follows at the pace of the
slowest stage or link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Crossing(NamedTuple):
    """Bytes of one microbatch over one boundary."""

    forward: float = 0.0
    backward: float = 0.0


class Bound(Enum):
    """Bound of a step at one stage."""

    COMPUTE = "compute"
    UPLINK = "uplink"
    DOWNLINK = "downlink"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """Times of one stage, as far as a step's duration depends on them.

    Attributes:
        compute_s: Seconds of one microbatch, forward and backward, at the mean replica.
        turn_s: Seconds from one microbatch to the next, all replicas together.
        comes: Bytes over the boundary in front of it; none at the first stage.
        hop_s: Seconds of these bytes from the stage in front, and back to it.
        up_bytes_per_s: Rate at which all replicas send together; infinite if unknown.
        down_bytes_per_s: Rate at which all replicas receive together; infinite if unknown.
        reduced_s: Seconds of a step's sum of gradients.
    """

    compute_s: float
    turn_s: float
    comes: Crossing
    hop_s: tuple[float, float]
    up_bytes_per_s: float
    down_bytes_per_s: float
    reduced_s: float


class StepTime(NamedTuple):
    """Seconds of a step, with the stage, counted from 0, and the kind of its bound."""

    seconds: float
    stage: int
    bound: Bound


def step_time(
    stages: Sequence[StageTime], num_microbatches: int, control_s: float = 0.0
) -> StepTime:
    """Return the duration of a step over these stages.

    Args:
        stages: Stages, first to last.
        num_microbatches: Microbatches of a step.
        control_s: Seconds from the last stage's readiness to the first stage's next step.
    """
    alone_s = sum(stage.compute_s + sum(stage.hop_s) for stage in stages)
    comes = [stage.comes for stage in stages]
    slowest_s, at, bound = 0.0, 0, Bound.COMPUTE
    for index, stage in enumerate(stages):
        sent, received = exchanged(comes, index)
        for seconds, what in (
            (stage.turn_s, Bound.COMPUTE),
            (sent / stage.up_bytes_per_s, Bound.UPLINK),
            (received / stage.down_bytes_per_s, Bound.DOWNLINK),
        ):
            if seconds > slowest_s:
                slowest_s, at, bound = seconds, index, what
    reduced_s = max(stage.reduced_s for stage in stages)
    seconds = alone_s + (num_microbatches - 1) * slowest_s + reduced_s + control_s
    return StepTime(seconds, at, bound)


def exchanged(crossings: Sequence[Crossing], index: int) -> tuple[float, float]:
    """Return the bytes that a stage sends and receives for a microbatch.

    Args:
        crossings: Bytes of all stages over the boundary in front of each.
        index: Number of the stage.
    """
    comes = crossings[index]
    goes = crossings[index + 1] if index < len(crossings) - 1 else Crossing()
    return goes.forward + comes.backward, comes.forward + goes.backward


def forecast_after_change_s(took_s: float, was_s: float, will_s: float) -> float:
    """Return the duration of something after a change, by forecasts before and after it.

    A forecast is a lower bound. The forecasts' difference is added to the measured duration; where
    that was shorter than its forecast, it changes in proportion.
    """
    if took_s < was_s:
        return took_s * will_s / was_s
    return max(took_s + will_s - was_s, will_s)
