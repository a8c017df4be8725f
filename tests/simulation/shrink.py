"""Shrinking: a failing scenario becomes one with as few faults as still make it fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.scenario import Scenario


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Drop faults one by one, the last first, until each that is left is needed.

    Args:
        fails: whether a scenario fails; it does for `scenario`.
    """
    index = len(scenario.faults)
    while index:
        index -= 1
        fewer = (*scenario.faults[:index], *scenario.faults[index + 1 :])
        smaller = replace(scenario, faults=fewer)
        if fails(smaller):
            scenario, index = smaller, len(fewer)
    return scenario


def only(scenario: Scenario, indices: tuple[int, ...]) -> Scenario:
    """The scenario with these of its faults alone, by their places."""
    return replace(scenario, faults=tuple(scenario.faults[i] for i in indices))
