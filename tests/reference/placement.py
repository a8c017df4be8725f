"""The first form of `swarm_ft.coordinator.plan.placement`, to which the present one is compared.

With it comes that of `membership.arrangement`. Its own text follows.

Which peer hosts which blocks, and why nobody does yet. Pure.

Peers that name their layers keep them; peers that leave the choice (`--layers auto`) share what
is left, as evenly as their memory allows; blocks below all that trains have their forward alone, so
fewer share these. Whoever is left over then is a replica of a stage. Nobody
hosts what it may not, see `hosting`; replicas on probation are given no part here: they join what
others host, see `membership`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import Member, Run, SwarmState
from swarm_ft.coordinator.plan.hosting import end_refusal, missing_layers, refusal
from swarm_ft.coordinator.plan.placement import SETTLE_S, Placement
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import reason


def place(spec: RunSpec, members: Sequence[Member], now_s: float) -> Placement:
    """Cover all blocks of the model with members, or return the missing blocks."""
    carriers = [m for m in members if not m.grant.replica_only]
    fixed = [m for m in carriers if m.hello.layers and _may_keep(spec, m, m.hello.layers)]
    free = [m for m in carriers if m.hello.layers is None]
    parts = _cover(spec.model.num_blocks, fixed)
    gaps = [part for part in parts if isinstance(part, LayerRange)]
    if gaps and not free:
        return _waiting(spec, members, gaps)
    if free and now_s - max(m.joined_at_s for m in free) < SETTLE_S:
        return Placement((), reason(Kind.GATHERING))
    filled = _filled(spec, parts, gaps, free)
    assignments = with_replicas(spec, filled.assignments, carriers)
    return replace(filled, assignments=assignments)


def place_on(
    cuts: Sequence[LayerRange], spec: RunSpec, members: Sequence[Member], now_s: float
) -> Placement:
    """Place like `place`, on existing stages: those of a snapshot."""
    carriers = [m for m in members if not m.grant.replica_only]
    autos = [m for m in carriers if m.hello.layers is None]
    if autos and now_s - max(m.joined_at_s for m in autos) < SETTLE_S:
        return Placement((), reason(Kind.GATHERING))
    autos = _least_free_first(spec, autos)
    fixed = [m for m in reversed(carriers) if m.hello.layers]
    hosts = {m.hello.layers: m for m in fixed if _may_keep(spec, m, m.hello.layers)}
    for layers in sorted(cuts, key=len, reverse=True):
        host = None if layers in hosts else _host(spec, layers, autos)
        if host is not None:
            hosts[layers] = host
            autos.remove(host)
    missing = [layers for layers in cuts if layers not in hosts]
    if missing:
        return _waiting(spec, members, missing)
    first = tuple(
        StageAssignment(peer_id=hosts[layers].hello.peer_id, layers=layers) for layers in cuts
    )
    return Placement(with_replicas(spec, first, carriers))


def _may_keep(spec: RunSpec, member: Member, layers: LayerRange | None) -> bool:
    """Whether a member may host the layers that it names."""
    is_inside = layers is not None and layers.stop <= spec.model.num_blocks
    return is_inside and layers is not None and not refusal(spec, member, layers)


def _waiting(spec: RunSpec, members: Sequence[Member], missing: Sequence[LayerRange]) -> Placement:
    """Nobody hosts it as long as these are missing; members that may not host them are named."""
    return Placement((), missing_layers(spec, members, missing))


def _filled(
    spec: RunSpec,
    parts: Sequence[Member | LayerRange],
    gaps: Sequence[LayerRange],
    free: Sequence[Member],
) -> Placement:
    if not gaps:
        return _fill(spec, parts, gaps, (), 0)
    # All of them if their memory allows; else the larger ones, for an even share may be too much.
    candidates = _least_free_first(spec, free)
    most = min(len(free), sum(len(gap) for gap in gaps))
    ways = _ways_to_cut(spec, gaps, free)
    tries = (_fill(spec, parts, way, candidates, n) for n in range(most, 0, -1) for way in ways)
    refused = next(tries)
    return next((fit for fit in (refused, *tries) if fit.assignments), refused)


def _least_free_first(spec: RunSpec, autos: Sequence[Member]) -> list[Member]:
    """Return members in the order in which they choose their blocks.

    Those come first who have the least to choose from, of these those that lend all of their link,
    and of these those with the most memory.
    """

    def order(member: Member) -> tuple[bool, int, bool, int, float]:
        choices = len(member.grant.layers or spec.model.layers)
        sees_tokens = not end_refusal(spec, member)
        hello = member.hello
        is_capped = hello.max_up_bytes_per_s > 0 or hello.max_down_bytes_per_s > 0
        return sees_tokens, choices, is_capped, -hello.memory_bytes, member.joined_at_s

    return sorted(autos, key=order)


def _host(spec: RunSpec, layers: LayerRange, candidates: Sequence[Member]) -> Member | None:
    """The first that may host these blocks, and has the memory."""
    able = (m for m in candidates if fits(spec, layers, m.hello))
    return next((m for m in able if not refusal(spec, m, layers)), None)


def _ways_to_cut(
    spec: RunSpec, gaps: Sequence[LayerRange], free: Sequence[Member]
) -> list[Sequence[LayerRange]]:
    """The gaps as they are, and cut where members that are bound to layers may begin or end.

    Each of these comes first with a cut below all that trains, if there is something.
    """
    bound = [m.grant.layers for m in free if m.grant.layers]
    starts, stops = {layers.start for layers in bound}, {layers.stop for layers in bound}
    edges = (stops, starts, starts | stops) if bound else ()
    ways = [gaps, *([part for gap in gaps for part in _cut(gap, at)] for at in edges)]
    lowest = spec.trained_layers.start
    lower = [[part for gap in way for part in _cut(gap, {lowest})] for way in ways]
    return ways if lower == ways else lower + ways


def _cut(gap: LayerRange, edges: Collection[int]) -> list[LayerRange]:
    inside = sorted(edge for edge in edges if gap.start < edge < gap.stop)
    return [LayerRange(a, b) for a, b in pairwise((gap.start, *inside, gap.stop))]


def fits(spec: RunSpec, layers: LayerRange, hello: PeerHello) -> bool:
    """Whether blocks fit into the memory that a peer lends."""
    return spec.memory_bytes(layers) <= hello.memory_bytes


def with_replicas(
    spec: RunSpec, first: tuple[StageAssignment, ...], members: Sequence[Member]
) -> tuple[StageAssignment, ...]:
    """Those who host the stages, and every other member that can host one of them too."""
    hosts: dict[LayerRange, list[StageAssignment]] = {}
    for assignment in first:
        hosts.setdefault(assignment.layers, []).append(assignment)
    named = {assignment.peer_id for assignment in first}
    for member in members if first else ():
        hello = member.hello
        if hello.peer_id in named:
            continue
        open_to = [r for r in hosts if hello.layers == r]
        if hello.layers is None:
            open_to = [r for r in hosts if fits(spec, r, hello)]
        open_to = [r for r in open_to if not refusal(spec, member, r)]
        if open_to:
            busiest = max(open_to, key=lambda r: spec.work(r) / len(hosts[r]))
            hosts[busiest].append(StageAssignment(peer_id=hello.peer_id, layers=busiest))
    return tuple(assignment for replicas in hosts.values() for assignment in replicas)


class _Tail(NamedTuple):
    """The best tiling from a cut to the end: blocks that nobody hosts, members, first part."""

    gap_blocks: int
    num_members: int
    first: Member | None
    stop: int


def _cover(num_blocks: int, fixed: Sequence[Member]) -> list[Member | LayerRange]:
    """Members and gaps, in order, that tile the blocks with the smallest gaps."""
    offers: dict[int, list[tuple[int, Member]]] = {}
    for member in fixed:
        if member.hello.layers is not None:
            layers = member.hello.layers
            offers.setdefault(layers.start, []).append((layers.stop, member))
    stops = {stop for offered in offers.values() for stop, _ in offered}
    cuts = sorted({0, num_blocks} | stops | set(offers))
    tails = {num_blocks: _Tail(0, 0, None, num_blocks)}
    for start, cut in reversed(list(pairwise(cuts))):
        options = [
            _Tail(tails[stop].gap_blocks, tails[stop].num_members + 1, member, stop)
            for stop, member in offers.get(start, ())
        ]
        gap_blocks = tails[cut].gap_blocks + cut - start
        options.append(_Tail(gap_blocks, tails[cut].num_members, None, cut))
        tails[start] = min(options, key=lambda tail: tail[:2])
    return _parts(tails, num_blocks)


def _parts(tails: Mapping[int, _Tail], num_blocks: int) -> list[Member | LayerRange]:
    """The best tiling written out; adjoining gaps are one."""
    parts: list[Member | LayerRange] = []
    start = 0
    while start < num_blocks:
        tail = tails[start]
        before = parts[-1] if parts else None
        if tail.first is not None:
            parts.append(tail.first)
        elif isinstance(before, LayerRange):
            parts[-1] = LayerRange(before.start, tail.stop)
        else:
            parts.append(LayerRange(start, tail.stop))
        start = tail.stop
    return parts


def _fill(
    spec: RunSpec,
    parts: Sequence[Member | LayerRange],
    gaps: Sequence[LayerRange],
    candidates: Sequence[Member],
    num_peers: int,
) -> Placement:
    """Let so many candidates, or fewer, share the gaps."""
    shares = _shares(
        spec, gaps, num_peers, most_bytes=max((m.hello.memory_bytes for m in candidates), default=0)
    )
    if shares is None:
        too_few = reason(Kind.TOO_FEW_PEERS, amount=num_peers)
        return Placement((), replace(too_few, layers=tuple(gaps)))
    ranges = [r for gap in gaps for r in split_evenly(gap, shares[gap])]
    hosts: dict[LayerRange, Member] = {}
    unused = list(candidates)
    for layers in sorted(ranges, key=len, reverse=True):
        host = _host(spec, layers, unused)
        if host is None and any(fits(spec, layers, m.hello) for m in unused):
            return _waiting(spec, unused, [layers])
        if host is None:
            return Placement((), reason(Kind.NO_MEMORY, layers=str(layers)))
        hosts[layers] = host
        unused.remove(host)
    chosen = []
    for part in parts:
        if isinstance(part, LayerRange):
            inside = [r for r in ranges if part.start <= r.start < part.stop]
            chosen += [StageAssignment(peer_id=hosts[r].hello.peer_id, layers=r) for r in inside]
        elif part.hello.layers is not None:
            chosen.append(StageAssignment(peer_id=part.hello.peer_id, layers=part.hello.layers))
    return Placement(tuple(chosen))


def _shares(
    spec: RunSpec, gaps: Sequence[LayerRange], num_peers: int, most_bytes: int
) -> dict[LayerRange, int] | None:
    """Choose how many peers share each gap: as few as it fits into, more where most work is.

    Args:
        spec: of the run.
        gaps: blocks that are to be hosted.
        num_peers: in all.
        most_bytes: that any of them lends.
    """
    if num_peers < len(gaps):
        return None
    shares = {gap: min(len(gap), _least_share(spec, gap, most_bytes)) for gap in gaps}
    if sum(shares.values()) > num_peers:
        shares = dict.fromkeys(gaps, 1)  # they are too few, however it is cut
    for _ in range(num_peers - sum(shares.values())):
        open_to = [gap for gap in gaps if shares[gap] < len(gap)]
        if not open_to:
            break
        shares[max(open_to, key=lambda gap: spec.work(gap) / shares[gap])] += 1
    return shares


def _least_share(spec: RunSpec, gap: LayerRange, most_bytes: int) -> int:
    """Peers of so much memory that hold a gap, at least."""
    return max(1, math.ceil(spec.memory_bytes(gap) / max(1, most_bytes)))


def arrangement(state: SwarmState, run: Run, now_s: float) -> Placement:
    """Return the placement if the run went back now.

    On the stages of its snapshot, if it has one, whose buffers go on with them, unless it moves on
    to others from there; where nobody hosts these it is cut anew, and each stage is made of what
    the snapshot has of its layers.
    """
    full = {peer for peer in state.result_keepers if not hosts_beside(state, peer)}
    free = tuple(member for peer, member in state.members.items() if peer not in full)
    if run.past.snapshot is None:
        return place(run.spec, free, now_s)
    moved = moved_stages(state, run)
    if moved:
        return Placement(moved, is_by_speed=True)
    cuts = [stage.layers for stage in run.past.snapshot.stages]
    as_before = place_on(cuts, run.spec, free, now_s)
    # One whole model has its tied ends under one name.
    is_bound = run.spec.train.sync_tied_embeddings and len(cuts) == 1
    if as_before.assignments or as_before.is_gathering or is_bound:
        return as_before
    return place(run.spec, free, now_s)


def hosts_beside(state: SwarmState, peer: PeerId) -> bool:
    """Whether a member hosts stages of several runs, if its memory allows."""
    return peer in state.members and state.members[peer].hello.max_beside > 0


def moved_stages(state: SwarmState, run: Run) -> tuple[StageAssignment, ...]:
    """Return the stages of a repartition; empty where one of their peers is gone."""
    moving, snapshot = run.moving, run.past.snapshot
    if moving is None or not moving.has_begun or snapshot is None or snapshot.step != moving.step:
        return ()
    hosts = moving.assignments
    return hosts if all(_may_host(state, run, host) for host in hosts) else ()


def _may_host(state: SwarmState, run: Run, host: StageAssignment) -> bool:
    member = state.members.get(host.peer_id)
    is_full = host.peer_id in state.result_keepers and not hosts_beside(state, host.peer_id)
    if member is None or is_full:
        return False
    hello = member.hello
    has_room = hello.layers == host.layers or (
        hello.layers is None and fits(run.spec, host.layers, hello)
    )
    return has_room and not refusal(run.spec, member, host.layers)
