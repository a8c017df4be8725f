"""What a few measured times say of the next one. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MANY_SPREADS = 4.0
"""Median absolute deviations; of normal noise, less than one in a hundred lies so far out."""
LEAST_SPREAD = 0.1
"""Of the median: what was steady so far is not held to less."""


def expected_s(measured: Sequence[float]) -> float:
    """What the next one will take: the median, or the last one if it is out of all bounds.

    So noise moves nothing, and a change is believed at once.
    """
    usual = statistics.median(measured)
    return measured[-1] if abs(measured[-1] - usual) > _spread(measured) else usual


def longest_s(measured: Sequence[float]) -> float:
    """What the next one takes at most, if nothing has changed."""
    return statistics.median(measured) + _spread(measured)


def _spread(measured: Sequence[float]) -> float:
    usual = statistics.median(measured)
    deviation = statistics.median(abs(seconds - usual) for seconds in measured)
    return MANY_SPREADS * max(deviation, LEAST_SPREAD * usual)
