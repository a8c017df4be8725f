"""How coarsely to code activations for an asked loss of quality. Pure.

Now and then the samples of a step are computed without compression as well, by the same weights.
What compression adds to their loss there foretells what it adds to the loss that training ends
with; benchmarks/reports/quality.md has how well. The step of the quantiser, in the activations'
own spread, follows it: coarser while less is lost than was asked for, finer where more is. What
the codec of gradients costs is not measured on the way: it follows from what is asked, by a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.codec_spec import MAX_QUALITY_STEP, MIN_QUALITY_STEP

MEASURE_EVERY_STEPS = 8
_EXCESS_OF_STEP, _POWER = 0.04, 1.5
"""A step of S times the spread adds about so many nats, times S to this power."""
_GAIN = 0.4
_MOST = 2.0
"""No measurement moves the step by more: one of a few samples is off by a quarter."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of compression for a kind of training, as shares of the perplexity.

    Attributes:
        a_nat: for each nat that compression adds to the loss of a step, on average over a run:
            twice what activations cost, or more, since what gradients cost is not measured.
        gradients: codecs of gradients, each behind the least share to ask for, which is twice
            what it cost; falling.
    """

    a_nat: float
    gradients: tuple[tuple[float, str], ...]

    @staticmethod
    def of(*, adapts: bool) -> Prices:
        """Of training adapters, or the model's own weights."""
        return OF_ADAPTERS if adapts else OF_WEIGHTS

    def backward_codec(self, asked: float) -> str:
        """The coarsest codec of gradients that leaves half of what is asked to activations."""
        return next((text for least, text in self.gradients if asked >= least), _FINEST)


_FINEST = "q4+z"
"""Of gradients: costs nothing that can be told from zero."""
OF_WEIGHTS = Prices(1.0, ((0.07, "q1+z"), (0.02, "q1.5+z"), (0.01, "q2+z"), (0.003, "q3+z")))
OF_ADAPTERS = Prices(2.0, ((0.04, "q1.5+z"), (0.02, "q2+z"), (0.01, "q3+z")))


@dataclass(frozen=True, slots=True)
class QualityControl:
    """What was asked, what was found so far, and what follows.

    Attributes:
        asked: share of the perplexity that compression may cost, such as 0.01.
        step_size: of the quantiser, times the spread of the activations.
        num_measured: steps in which it was measured.
        excess: what compression added to the loss in these, in nats, summed.
        adapts: whether adapters train, for which a nat costs more.
    """

    asked: Annotated[float, Range(0.0, 1.0)]
    step_size: Annotated[float, Range(MIN_QUALITY_STEP, MAX_QUALITY_STEP)]
    num_measured: int = 0
    excess: float = 0.0
    adapts: bool = False

    @staticmethod
    def of(asked: float, *, adapts: bool) -> QualityControl:
        """Before anything was measured."""
        excess = asked / Prices.of(adapts=adapts).a_nat
        step_size = (excess / _EXCESS_OF_STEP) ** (1 / _POWER)
        return QualityControl(asked, _bounded(step_size), adapts=adapts)

    @property
    def cost(self) -> float:
        """Share of the perplexity that compression cost so far, as far as can be told."""
        return self._cost_a_nat * max(0.0, self.excess) / max(1, self.num_measured)

    def measured(self, excess: float) -> QualityControl:
        """After a step whose loss was so many nats above that without compression."""
        if not math.isfinite(excess):
            return self
        found = replace(self, num_measured=self.num_measured + 1, excess=self.excess + excess)
        allowed = self.asked / self._cost_a_nat
        ratio = min(max(allowed / max(excess, 1e-9), 1 / _MOST**2), _MOST**2)
        factor = ratio ** (_GAIN / _POWER)
        return replace(found, step_size=_bounded(self.step_size * factor))

    @property
    def _cost_a_nat(self) -> float:
        return Prices.of(adapts=self.adapts).a_nat


def measures_at(step: int) -> bool:
    """Whether a step is also computed without compression.

    Not the first: to a model that has learned nothing, compression does good as often as harm.
    """
    return step > 0 and step % MEASURE_EVERY_STEPS == 0


def num_measured(num_steps: int) -> int:
    """How many of so many steps are."""
    return max(0, num_steps - 1) // MEASURE_EVERY_STEPS


def _bounded(step_size: float) -> float:
    """In hundredths, as codecs are named."""
    return min(max(round(step_size, 2), MIN_QUALITY_STEP), MAX_QUALITY_STEP)
