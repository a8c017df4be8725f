"""Coarseness of activations' codes for a configured loss of quality. Pure.

Now and then a step's samples are also computed without compression, by the same weights. The added
loss there predicts the added loss at the end of training, see benchmarks/reports/quality.md. The
quantiser's step, in multiples of the activations' spread, follows it: coarser while less is lost
than allowed, finer while more is. The cost of the gradients' codec is not measured on the way: a
table derives the codec from the allowed loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from swarm_ft.codec.spec import MAX_QUALITY_STEP, MIN_QUALITY_STEP
from swarm_ft.protocol.spec.bounds import Range

MEASURE_EVERY_STEPS = 8
_EXCESS_OF_STEP, _POWER = 0.04, 1.5
"""Nats that a quantiser's step of S times the spread adds, per S to this power."""
_GAIN = 0.4
_MOST = 2.0
"""Factor by which one measurement moves the step at most; one of a few samples is off by 25 %."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs of compression in a kind of training, as shares of the perplexity.

    Attributes:
        a_nat: Share for each nat that compression adds to the loss of a step, on average over a
            run: twice the cost of activations, or more, since that of gradients is not measured.
        gradients: Codecs of gradients, each after the least allowed share, which is twice their
            cost; falling.
    """

    a_nat: float
    gradients: tuple[tuple[float, str], ...]

    @staticmethod
    def of(*, adapts: bool) -> Prices:
        """Return the costs for training adapters, or the model's own weights."""
        return OF_ADAPTERS if adapts else OF_WEIGHTS

    def backward_codec(self, asked: float) -> str:
        """Return the coarsest codec of gradients that leaves half of the loss to activations."""
        return next((text for least, text in self.gradients if asked >= least), _FINEST)


_FINEST = "q4+z"
"""Codec of gradients whose cost is not distinguishable from zero."""
OF_WEIGHTS = Prices(1.0, ((0.07, "q1+z"), (0.02, "q1.5+z"), (0.01, "q2+z"), (0.003, "q3+z")))
OF_ADAPTERS = Prices(2.0, ((0.04, "q1.5+z"), (0.02, "q2+z"), (0.01, "q3+z")))


@dataclass(frozen=True, slots=True)
class QualityControl:
    """Allowed loss, measurements so far, and the resulting step.

    Attributes:
        allowed: Share of the perplexity that compression may cost, such as 0.01.
        step_size: Step of the quantiser, as a multiple of the activations' spread.
        num_measured: Number of measured steps.
        excess: Sum of the loss that compression added in these, in nats.
        adapts: Whether adapters train, for which a nat costs more.
    """

    allowed: Annotated[float, Range(0.0, 1.0)]
    step_size: Annotated[float, Range(MIN_QUALITY_STEP, MAX_QUALITY_STEP)]
    num_measured: int = 0
    excess: float = 0.0
    adapts: bool = False

    @staticmethod
    def of(asked: float, *, adapts: bool) -> QualityControl:
        """Return the state before any measurement."""
        excess = asked / Prices.of(adapts=adapts).a_nat
        step_size = (excess / _EXCESS_OF_STEP) ** (1 / _POWER)
        return QualityControl(asked, _bounded(step_size), adapts=adapts)

    @property
    def cost(self) -> float:
        """Share of the perplexity that compression has cost so far, as far as known."""
        return self._cost_a_nat * max(0.0, self.excess) / max(1, self.num_measured)

    def with_measurement(self, excess: float) -> QualityControl:
        """Return the state after a step with this added loss by compression, in nats."""
        if not math.isfinite(excess):
            return self
        found = replace(self, num_measured=self.num_measured + 1, excess=self.excess + excess)
        allowed = self.allowed / self._cost_a_nat
        ratio = min(max(allowed / max(excess, 1e-9), 1 / _MOST**2), _MOST**2)
        factor = ratio ** (_GAIN / _POWER)
        return replace(found, step_size=_bounded(self.step_size * factor))

    @property
    def _cost_a_nat(self) -> float:
        return Prices.of(adapts=self.adapts).a_nat


def measures_at(step: int) -> bool:
    """Whether a step is also computed without compression.

    The first is not: compression helps an untrained model as often as it harms.
    """
    return step > 0 and step % MEASURE_EVERY_STEPS == 0


def num_measured(num_steps: int) -> int:
    """Return the number of measured steps among `num_steps`."""
    return max(0, num_steps - 1) // MEASURE_EVERY_STEPS


def _bounded(step_size: float) -> float:
    """Return the step within its bounds, in hundredths, as codecs' names have it."""
    return min(max(round(step_size, 2), MIN_QUALITY_STEP), MAX_QUALITY_STEP)
