"""Disagreement of replicas that must report the same: which of them are right. Pure.

The majority is believed. Between sides of equal size, the replica with fewer failures decides, and
then the one that joined first: a new name, which is free, must not outvote a peer that worked well
for hours. Replicas on probation have no vote where there are others.
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
"""Relative tolerance of squared norms. Replicas have the same bits of the gradient and sum their
squares in float64, each in its own order: for 10^10 values that differs by less than this.
"""


def believed_replicas(
    state: SwarmState, run: Run, reports: Mapping[PeerId, T], agree: Callable[[T, T], bool]
) -> tuple[PeerId, ...]:
    """Return the replicas that are believed, the most reliable first.

    Args:
        state: State with their reputations.
        run: Run of these replicas.
        reports: Report of each replica; at least one.
        agree: Function that compares two reports.
    """
    ranked = sorted(reports, key=lambda peer: _rank(state, run, peer))
    voters = _voters(state, ranked)
    sides = [tuple(q for q in ranked if agree(reports[p], reports[q])) for p in voters]
    return max(sides, key=lambda side: len(_voters(state, side)))  # the first of equals


def _voters(state: SwarmState, peers: Collection[PeerId]) -> tuple[PeerId, ...]:
    """Return those of these that may host a stage alone, or all if none may."""
    return tuple(filter(state.may_host_alone, peers)) or tuple(peers)


def _rank(state: SwarmState, run: Run, peer: PeerId) -> tuple[int, float, PeerId]:
    member, standings = (
        state.members.get(peer),
        (state.reputation(peer), run.conduct(peer).standing),
    )
    failures = sum(one.times_aside + len(one.failed_in) for one in standings)
    return failures, member.joined_at_s if member else math.inf, peer


def wrong_norms(state: SwarmState, run: Run, step: PlannedStep) -> tuple[PeerId, ...]:
    """Return peers whose gradient norm differs from that of their stage's other replicas."""
    wrong: list[PeerId] = []
    for stage in run.computing:
        norms = {peer: step.ready[peer].squared_grad_norm for peer in stage.peers}
        right = believed_replicas(state, run, norms, _is_same_norm)
        wrong += [peer for peer in stage.peers if peer not in right]
    return tuple(wrong)


def outvoted_results(state: SwarmState, run: Run) -> tuple[PeerId, ...]:
    """Return peers whose result differs from that of most replicas of their stage.

    Where results differ neither need be wrong: a CPU and a GPU compute other last bits.
    """
    outvoted: list[PeerId] = []
    for stage in run.stages:
        files = {peer: run.past.exported[peer] for peer in stage.peers}
        right = believed_replicas(state, run, files, operator.eq)
        if 2 * len(_voters(state, right)) > len(_voters(state, tuple(files))):
            outvoted += [peer for peer in stage.peers if peer not in right]
    return tuple(outvoted)


def differing_results(run: Run) -> tuple[LayerRange, ...]:
    """Return stages whose replicas reported different results."""
    exported = run.past.exported
    files = {s.layers: {exported.get(peer) for peer in s.peers} - {None} for s in run.stages}
    return tuple(layers for layers, found in files.items() if len(found) > 1)


def without_results_of(run: Run, peers: Collection[PeerId]) -> Run:
    """Return the finished run without these peers."""
    staying = (a for a in run.attempt.assignments if a.peer_id not in peers)
    exported = {peer: file for peer, file in run.past.exported.items() if peer not in peers}
    past = replace(run.past, exported=MappingProxyType(exported))
    return replace(run.with_assignments(staying), past=past)


def _is_same_norm(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=NORM_TOLERANCE)
