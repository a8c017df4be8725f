"""What replicas of a stage must tell alike: who is in the right where they differ. Pure.

Most of them are believed. Where as many say the one as the other, whoever failed less is, and of
those whoever joined first: a name that costs nothing must not outvote one that did well for hours.
Replicas on probation have no voice where there are others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from swarm_ft.coordinator.facts.state import PlannedStep, Run, SwarmState
from swarm_ft.ids import PeerId
from swarm_ft.protocol.spec.layers import LayerRange

T = TypeVar("T")

NORM_TOLERANCE = 1e-6
"""Relative, of squared norms. Replicas have the same bits of the gradient and add up their squares
in float64, each in an order of its own: that makes less than this of 10^10 values."""


def in_the_right(
    state: SwarmState, run: Run, told: Mapping[PeerId, T], agree: Callable[[T, T], bool]
) -> tuple[PeerId, ...]:
    """Of some replicas those that are believed, whom to ask first in front.

    Args:
        state: who they are, and how they did of late.
        run: whose replicas they are.
        told: by each of them; at least one.
        agree: whether two of these are the same.
    """
    ranked = sorted(told, key=lambda peer: _rank(state, run, peer))
    voters = _voters(state, ranked)
    sides = [tuple(q for q in ranked if agree(told[p], told[q])) for p in voters]
    return max(sides, key=lambda side: len(_voters(state, side)))  # of as many the first


def _voters(state: SwarmState, peers: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Those of these that may carry a stage alone; all, if none may."""
    return tuple(filter(state.carries, peers)) or tuple(peers)


def _rank(state: SwarmState, run: Run, peer: PeerId) -> tuple[int, float, PeerId]:
    member, standings = state.members.get(peer), (state.standing(peer), run.conduct(peer).standing)
    failures = sum(one.times_aside + len(one.failed_in) for one in standings)
    return failures, member.joined_at_s if member else math.inf, peer


def wrong_norms(state: SwarmState, run: Run, step: PlannedStep) -> tuple[PeerId, ...]:
    """Peers that tell another norm of their stage's summed gradient than its other replicas."""
    wrong: list[PeerId] = []
    for stage in run.computing:
        told = {peer: step.ready[peer].squared_grad_norm for peer in stage.peers}
        right = in_the_right(state, run, told, _is_same_norm)
        wrong += [peer for peer in stage.peers if peer not in right]
    return tuple(wrong)


def outvoted_results(state: SwarmState, run: Run) -> tuple[PeerId, ...]:
    """Peers that have another result than most replicas of their stage, where most have one.

    Of two that differ neither need be wrong: a CPU and a GPU apply steps with other last bits.
    """
    outvoted: list[PeerId] = []
    for stage in run.stages:
        told = {peer: run.past.exported[peer] for peer in stage.peers}
        right = in_the_right(state, run, told, operator.eq)
        if 2 * len(_voters(state, right)) > len(_voters(state, tuple(told))):
            outvoted += [peer for peer in stage.peers if peer not in right]
    return tuple(outvoted)


def differing_results(run: Run) -> tuple[LayerRange, ...]:
    """Stages whose replicas have different results, as far as they told."""
    exported = run.past.exported
    files = {s.layers: {exported.get(peer) for peer in s.peers} - {None} for s in run.stages}
    return tuple(layers for layers, found in files.items() if len(found) > 1)


def without_results_of(run: Run, peers: Collection[PeerId]) -> Run:
    """The finished run without these peers."""
    staying = (a for a in run.attempt.assignments if a.peer_id not in peers)
    exported = {peer: file for peer, file in run.past.exported.items() if peer not in peers}
    past = replace(run.past, exported=MappingProxyType(exported))
    return replace(run.with_assignments(staying), past=past)


def _is_same_norm(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NORM_TOLERANCE)
