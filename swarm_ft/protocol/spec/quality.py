"""How coarsely to code activations for an asked loss of quality. Pure.

Now and then the samples of a step are computed without compression as well, by the same weights.
What compression adds to their loss there foretells what it adds to the loss that training ends
with; docs/quality.md has how well. The step of the quantiser, in the activations' own spread,
follows it: coarser while less is lost than was asked for, finer where more is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.codec_spec import MAX_QUALITY_STEP, MIN_QUALITY_STEP

MEASURE_EVERY_STEPS = 8
COST_A_NAT = 0.7
"""Of perplexity, as a share, for each nat that compression adds to the loss of a step, on average
over a run: adapters lose 0.5 to 0.9, whole models 0.1 to 0.25 (docs/quality.md)."""
_STEP_OF_QUALITY = (0.04, 2.0)
"""A step of S times the spread costs about so much, times S to this power: to begin with."""
_POWER = 1.5
"""Of the step, by which what it adds to the loss grows."""
_GAIN = 0.4
_MOST = 2.0
"""No measurement moves the step by more: one of a few samples is off by a quarter."""


@dataclass(frozen=True, slots=True)
class QualityControl:
    """What was asked, what was found so far, and what follows.

    Attributes:
        asked: share of the perplexity that compression may cost, such as 0.01.
        step_size: of the quantiser, times the spread of the activations.
        num_measured: steps in which it was measured.
        excess: what compression added to the loss in these, in nats, summed.
    """

    asked: Annotated[float, Range(0.0, 1.0)]
    step_size: Annotated[float, Range(MIN_QUALITY_STEP, MAX_QUALITY_STEP)]
    num_measured: int = 0
    excess: float = 0.0

    @staticmethod
    def of(asked: float) -> QualityControl:
        """Before anything was measured."""
        cost, power = _STEP_OF_QUALITY
        return QualityControl(asked, _bounded((asked / cost) ** (1 / power)))

    @property
    def cost(self) -> float:
        """Share of the perplexity that compression cost so far, as far as can be told."""
        return COST_A_NAT * max(0.0, self.excess) / max(1, self.num_measured)

    def measured(self, excess: float) -> QualityControl:
        """After a step whose loss was so many nats above that without compression."""
        if not math.isfinite(excess):
            return self
        found = replace(self, num_measured=self.num_measured + 1, excess=self.excess + excess)
        allowed = self.asked / COST_A_NAT
        ratio = min(max(allowed / max(excess, 1e-9), 1 / _MOST**2), _MOST**2)
        factor = ratio ** (_GAIN / _POWER)
        return replace(found, step_size=_bounded(self.step_size * factor))


def measures_at(step: int) -> bool:
    """Whether a step is also computed without compression: sooner at first."""
    return step % MEASURE_EVERY_STEPS == 0


def _bounded(step_size: float) -> float:
    """In hundredths, as codecs are named."""
    return min(max(round(step_size, 2), MIN_QUALITY_STEP), MAX_QUALITY_STEP)
