"""What replicas of a stage must tell alike: who is in the right where they differ. Pure.

Most of them are believed. Where as many say the one as the other, whoever failed less is, and of
those whoever joined first: a name that costs nothing must not outvote one that did well for hours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from swarm_ft.coordinator.facts.state import PlannedStep, Run, SwarmState
from swarm_ft.ids import PeerId

T = TypeVar("T")

NORM_TOLERANCE = 1e-6
"""Relative, of squared norms. Replicas have the same bits of the gradient and add up their squares
in float64, each in an order of its own: that makes less than this of 10^10 values."""


def in_the_right(
    state: SwarmState, told: Mapping[PeerId, T], agree: Callable[[T, T], bool]
) -> tuple[PeerId, ...]:
    """Of some replicas those that are believed, whom to ask first in front.

    Args:
        state: who they are, and how they did of late.
        told: by each of them; at least one.
        agree: whether two of these are the same.
    """
    ranked = sorted(told, key=lambda peer: _rank(state, peer))
    sides = [tuple(q for q in ranked if agree(told[p], told[q])) for p in ranked]
    return max(sides, key=len)  # of those that are as many the first


def _rank(state: SwarmState, peer: PeerId) -> tuple[int, float, PeerId]:
    standing, member = state.standing(peer), state.members.get(peer)
    failures = standing.times_aside + len(standing.failed_in)
    return failures, member.joined_at_s if member else math.inf, peer


def wrong_norms(state: SwarmState, run: Run, step: PlannedStep) -> tuple[PeerId, ...]:
    """Peers that tell another norm of their stage's summed gradient than its other replicas."""
    wrong: list[PeerId] = []
    for stage in run.computing:
        told = {peer: step.ready[peer].squared_grad_norm for peer in stage.peers}
        right = in_the_right(state, told, _is_same_norm)
        wrong += [peer for peer in stage.peers if peer not in right]
    return tuple(wrong)


def _is_same_norm(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NORM_TOLERANCE)
