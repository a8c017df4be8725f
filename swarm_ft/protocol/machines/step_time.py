"""How long a step of a pipeline takes, at least. Pure.

One microbatch goes all the way there and back, and each other one follows at the pace of the
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
    """What of a stage a step may be bound by."""

    COMPUTE = "compute"
    UPLINK = "uplink"
    DOWNLINK = "downlink"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime:
    """One stage, as far as a step's time follows from it.

    Attributes:
        compute_s: of one microbatch, there and back, at the mean replica.
        turn_s: from one microbatch to the next, all replicas together.
        comes: over the boundary in front of it; nothing at the first.
        hop_s: that this takes there, from the stage in front, and back.
        up_bytes_per_s: that all replicas send together; infinite if nobody knows.
        down_bytes_per_s: and receive.
        reduced_s: to sum a step's gradients.
    """

    compute_s: float
    turn_s: float
    comes: Crossing
    hop_s: tuple[float, float]
    up_bytes_per_s: float
    down_bytes_per_s: float
    reduced_s: float


class StepTime(NamedTuple):
    """Seconds of a step, and what no step can be faster for: of which stage, counted from 0."""

    seconds: float
    stage: int
    bound: Bound


def step_time(stages: Sequence[StageTime], num_microbatches: int, told_s: float = 0.0) -> StepTime:
    """How long a step takes over these stages.

    Args:
        stages: first to last.
        num_microbatches: of a step.
        told_s: from the last stage that is ready to the first that begins the next step.
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
    seconds = alone_s + (num_microbatches - 1) * slowest_s + reduced_s + told_s
    return StepTime(seconds, at, bound)


def exchanged(crossings: Sequence[Crossing], index: int) -> tuple[float, float]:
    """Bytes that a stage sends and receives for a microbatch.

    Args:
        crossings: of all stages, over the boundary in front of each.
        index: of the stage.
    """
    comes = crossings[index]
    goes = crossings[index + 1] if index < len(crossings) - 1 else Crossing()
    return goes.forward + comes.backward, comes.forward + goes.backward


def foreseen_s(took_s: float, was_s: float, will_s: float) -> float:
    """How long something that took so long takes after a change, by forecasts of before and after.

    A forecast is a bound from below. How much longer it says it takes than before is added to what
    was measured; where that was shorter than the forecast, it changes in proportion.
    """
    if took_s < was_s:
        return took_s * will_s / was_s
    return max(took_s + will_s - was_s, will_s)
