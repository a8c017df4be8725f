"""Placement of blocks on peers, or the reason why there is none. Pure.

Peers that name their layers keep them. Peers that leave the choice (`--layers auto`) share the rest
as evenly as their memory allows; frozen blocks below all that trains compute only forward, so fewer
peers share these. All remaining peers become replicas. No peer hosts layers that it may not, see
`hosting`. Replicas on probation have no part here: they join existing stages, see `membership`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from typing import NamedTuple

from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Member
from swarm_ft.coordinator.plan.hosting import missing_layers, refusal
from swarm_ft.coordinator.plan.offers import Offers, may_host_ends
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec

SETTLE_S = 2.0
"""Seconds after the last automatic peer joined, in which more are gathered before an assignment."""
_GATHERING = Reason(kind=ReasonKind.GATHERING)
ROUNDING = 1e-9
"""Relative difference up to which sums of bytes count as equal."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Hosts of all stages, first to last, replicas next to each other; or none, with the reason.

    Attributes:
        reason: Reason why there are no hosts.
        is_by_speed: Whether layers follow each peer's speed, so that no two peers may swap.
    """

    assignments: tuple[StageAssignment, ...]
    reason: Reason | None = None
    is_by_speed: bool = False

    @property
    def is_gathering(self) -> bool:
        """Whether more peers are expected in a moment."""
        return self.reason is not None and self.reason.kind is ReasonKind.GATHERING


def place(spec: RunSpec, members: Sequence[Member], now_s: float) -> Placement:
    """Assign all blocks of the model to members, or return the reason why that fails."""
    offers = Offers(members)
    return grown(spec, first_hosts(spec, offers, now_s), offers)


def grown(spec: RunSpec, placement: Placement, offers: Offers) -> Placement:
    """Add replicas to a placement's first hosts: all others that can host one of the stages."""
    if not placement.assignments or placement.is_by_speed:
        return placement
    assignments = with_replicas(spec, placement.assignments, offers.carriers)
    return replace(placement, assignments=assignments)


def first_hosts(spec: RunSpec, offers: Offers, now_s: float) -> Placement:
    """Assign all blocks with one member per stage, or return the reason why that fails."""
    parts = _cover(spec.model.num_blocks, _keepers(spec, offers))
    gaps = [part for part in parts if isinstance(part, LayerRange)]
    if gaps and not offers.autos:
        return Placement((), missing_layers(spec, offers.limited(spec), gaps))
    if offers.autos and now_s - offers.newest_auto_s < SETTLE_S:
        return Placement((), _GATHERING)
    return _filled(spec, parts, gaps, offers)


def surely_fits(spec: RunSpec, offers: Offers) -> bool:
    """Whether `first_hosts` surely covers all blocks, judged by the sorted memory of members.

    It does where no member is restricted, and as many members as share the blocks each have room
    for the longest part. Otherwise `first_hosts` has to decide.
    """
    num_blocks = spec.model.num_blocks
    has_limits = offers.fixed or offers.bound or not offers.all_see_tokens
    if has_limits or spec.trusted_with_ends or len(spec.trained_layers) < num_blocks:
        return False
    num_peers = min(len(offers.autos), num_blocks)
    if not num_peers:
        return False
    longest = LayerRange(0, -(-num_blocks // num_peers))
    return offers.num_with(spec.memory_bytes(longest)) >= num_peers


def fits_nobody(spec: RunSpec, offers: Offers) -> bool:
    """Whether `first_hosts` surely fails, judged by sums, where no member names layers."""
    return not offers.fixed and not _may_hold(spec, [spec.model.layers], offers)


def first_hosts_on(
    cuts: Sequence[LayerRange], spec: RunSpec, offers: Offers, now_s: float
) -> Placement:
    """Find one host for each stage of a snapshot."""
    if offers.autos and now_s - offers.newest_auto_s < SETTLE_S:
        return Placement((), _GATHERING)
    autos = offers.in_trial_order(spec)
    fixed = {m.hello.layers: m for m in reversed(_keepers(spec, offers))}
    hosts = {layers: fixed[layers] for layers in cuts if layers in fixed}
    for layers in sorted(cuts, key=len, reverse=True):
        at = None if layers in hosts else _host(spec, layers, autos)
        if at is not None:
            hosts[layers] = autos.pop(at)
    missing = [layers for layers in cuts if layers not in hosts]
    if missing:
        return Placement((), missing_layers(spec, offers.limited(spec), missing))
    return Placement(tuple(StageAssignment(peer_id=hosts[r].hello.peer_id, layers=r) for r in cuts))


def _keepers(spec: RunSpec, offers: Offers) -> list[Member]:
    """Return members that keep the layers that they name: the first for each range, in order."""
    found: list[tuple[int, Member]] = []
    for layers, members in offers.fixed:
        if layers.stop <= spec.model.num_blocks:
            first = next((one for one in members if not refusal(spec, one[1], layers)), None)
            found += [first] if first else []
    return [member for _, member in sorted(found, key=lambda one: one[0])]


def _filled(
    spec: RunSpec,
    parts: Sequence[Member | LayerRange],
    gaps: Sequence[LayerRange],
    offers: Offers,
) -> Placement:
    if not gaps:
        return _fill(spec, parts, gaps, offers, 0)
    # Use all if their memory allows; else the larger ones, since an even share may be too much.
    most = min(len(offers.autos), sum(len(gap) for gap in gaps))
    ways = _ways_to_cut(spec, gaps, offers.bound)
    refused = _fill(spec, parts, ways[0], offers, most)
    if refused.assignments or not _may_hold(spec, gaps, offers):
        return refused
    limits = [_Limit(spec, way, offers) for way in ways]
    for num_peers in range(most, 0, -1):
        for way, limit in zip(ways, limits, strict=True):
            if limit.allows(num_peers):
                fit = _fill(spec, parts, way, offers, num_peers)
                if fit.assignments:
                    return fit
    return refused


def _may_hold(spec: RunSpec, gaps: Sequence[LayerRange], offers: Offers) -> bool:
    """Whether two cheap sums allow that members host the gaps.

    They refuse what no division can achieve: more memory than all members lend together, or an end
    where no member may see tokens.
    """
    least_bytes = sum(spec.memory_bytes(gap) for gap in gaps)
    if offers.total_bytes < least_bytes * (1 - ROUNDING):
        return False
    has_end = gaps[0].start == 0 or gaps[-1].stop == spec.model.num_blocks
    return not has_end or offers.has_ends(spec)


class _Limit:
    """Bounds on the number of parts of the gaps, from the members' sorted memory.

    Each part needs another member, so at least as many members as parts of a length must lend the
    memory of such a part. Whatever `allows` refuses, `_fill` refuses too.
    """

    def __init__(self, spec: RunSpec, gaps: Sequence[LayerRange], offers: Offers) -> None:
        self._spec = spec
        self._gaps = gaps
        self._offers = offers
        self._hosts: dict[int, int] = {}
        # A part is no longer than the longest that fits into any member's memory.
        longest = [self._longest(gap) for gap in gaps]
        self._can_be = all(longest)
        self._least = sum(-(-len(g) // n) for g, n in zip(gaps, longest, strict=True) if n)

    def allows(self, num_peers: int) -> bool:
        """Whether this number of members may be able to share the gaps."""
        if not self._can_be or num_peers < self._least:
            return False
        if len(self._gaps) > 1:
            return True
        shortest, num_longer = divmod(len(self._gaps[0]), num_peers)
        if self._num_hosts(shortest) < num_peers:
            return False
        return not num_longer or self._num_hosts(shortest + 1) >= num_longer

    def _num_hosts(self, length: int) -> int:
        """Count the members that lend the least bytes of a part of this length."""
        if length not in self._hosts:
            num_bytes = _least_bytes(self._spec, self._gaps[0], length)
            self._hosts[length] = self._offers.num_with(num_bytes)
        return self._hosts[length]

    def _longest(self, gap: LayerRange) -> int:
        def least_bytes(length: int) -> float:
            return _least_bytes(self._spec, gap, length)

        most_bytes = float(self._offers.most_bytes)
        return bisect_right(range(1, len(gap) + 1), most_bytes, key=least_bytes)


def _least_bytes(spec: RunSpec, gap: LayerRange, length: int) -> float:
    """Return the least bytes of so many adjoining blocks; blocks that train lie together."""
    first = LayerRange(gap.start, gap.start + length)
    return min(spec.memory_bytes(first), spec.memory_bytes(LayerRange(gap.stop - length, gap.stop)))


def _host(spec: RunSpec, layers: LayerRange, asked: Sequence[Member]) -> int | None:
    """Return the position of the first member that may host these blocks and has the memory."""
    num_bytes = spec.memory_bytes(layers)
    return next(
        (
            at
            for at, member in enumerate(asked)
            if num_bytes <= member.hello.memory_bytes and not refusal(spec, member, layers)
        ),
        None,
    )


def _ways_to_cut(
    spec: RunSpec, gaps: Sequence[LayerRange], bound: Sequence[LayerRange]
) -> list[Sequence[LayerRange]]:
    """Return the gaps, and the gaps cut where restricted members may begin or end.

    Each of these comes first with a cut below all blocks that train, if there is one.
    """
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
    """Return the hosts of the stages, and every other member that can host one of them too."""
    if not first:
        return ()
    hosts: dict[LayerRange, list[StageAssignment]] = {}
    for assignment in first:
        hosts.setdefault(assignment.layers, []).append(assignment)
    named = {assignment.peer_id for assignment in first}
    work = {layers: spec.work(layers) for layers in hosts}
    num_bytes = {layers: spec.memory_bytes(layers) for layers in hosts}
    for member in members:
        hello = member.hello
        if hello.peer_id in named:
            continue
        open_to = open_stages(spec, member, num_bytes)
        if open_to:
            busiest = max(open_to, key=lambda r: work[r] / len(hosts[r]))
            hosts[busiest].append(StageAssignment(peer_id=hello.peer_id, layers=busiest))
    return tuple(assignment for replicas in hosts.values() for assignment in replicas)


def open_stages(
    spec: RunSpec, member: Member, num_bytes: Mapping[LayerRange, float]
) -> list[LayerRange]:
    """Return the stages that a member can host as a replica."""
    hello = member.hello
    if hello.layers is not None:
        open_to = [hello.layers] if hello.layers in num_bytes else []
    else:
        open_to = [r for r, needed in num_bytes.items() if needed <= hello.memory_bytes]
    if member.grant.layers is None and may_host_ends(spec, member):
        return open_to
    return [r for r in open_to if not refusal(spec, member, r)]


class _Tail(NamedTuple):
    """Best tiling from a cut to the end: number of blocks without a host, members, first part."""

    gap_blocks: int
    num_members: int
    first: Member | None
    stop: int


def _cover(num_blocks: int, fixed: Sequence[Member]) -> list[Member | LayerRange]:
    """Return members and gaps, in order, that tile the blocks with the smallest gaps."""
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
    """Return the best tiling as a list; adjoining gaps are merged."""
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
    offers: Offers,
    num_peers: int,
) -> Placement:
    """Divide the gaps among at most so many members."""
    shares = _shares(spec, gaps, num_peers, most_bytes=offers.most_bytes)
    if shares is None:
        kind = ReasonKind.TOO_FEW_PEERS
        return Placement((), Reason(kind=kind, layers=tuple(gaps), amount=num_peers))
    if gaps and spec.memory_bytes(longest := _longest_part(shares)) > offers.most_bytes:
        return _fits_nobody(longest)
    ranges = [r for gap in gaps for r in split_evenly(gap, shares[gap])]
    hosts: dict[LayerRange, Member] = {}
    unused = offers.in_trial_order(spec) if ranges else []
    for layers in sorted(ranges, key=len, reverse=True):
        at = _host(spec, layers, unused)
        if at is None and any(fits(spec, layers, m.hello) for m in unused):
            return Placement((), missing_layers(spec, unused, [layers]))
        if at is None:
            return _fits_nobody(layers)
        hosts[layers] = unused.pop(at)
    chosen = []
    for part in parts:
        if isinstance(part, LayerRange):
            inside = [r for r in ranges if part.start <= r.start < part.stop]
            chosen += [StageAssignment(peer_id=hosts[r].hello.peer_id, layers=r) for r in inside]
        elif part.hello.layers is not None:
            chosen.append(StageAssignment(peer_id=part.hello.peer_id, layers=part.hello.layers))
    return Placement(tuple(chosen))


def _fits_nobody(layers: LayerRange) -> Placement:
    return Placement((), Reason(kind=ReasonKind.NO_MEMORY, layers=(layers,)))


def _longest_part(shares: Mapping[LayerRange, int]) -> LayerRange:
    """Return the first of the longest parts, where each gap is split evenly."""
    gap, share = max(shares.items(), key=lambda one: -(-len(one[0]) // one[1]))
    rest = len(gap) % share
    at = -(-share // rest) - 1 if rest else 0
    return LayerRange(gap.start + len(gap) * at // share, gap.start + len(gap) * (at + 1) // share)


def _shares(
    spec: RunSpec, gaps: Sequence[LayerRange], num_peers: int, most_bytes: int
) -> dict[LayerRange, int] | None:
    """Return how many peers share each gap: as few as fit, then more wherever parts are most work.

    Args:
        spec: RunSpec of the run.
        gaps: Blocks to be hosted.
        num_peers: Number of peers in all.
        most_bytes: Most memory that any of them lends.
    """
    if num_peers < len(gaps):
        return None
    if len(gaps) == 1:
        return {gaps[0]: min(len(gaps[0]), num_peers)}
    shares = {gap: min(len(gap), _least_share(spec, gap, most_bytes)) for gap in gaps}
    if sum(shares.values()) > num_peers:
        shares = dict.fromkeys(gaps, 1)  # they are too few, however it is cut
    work = [spec.work(gap) for gap in gaps]
    busiest = [
        (-work[at] / shares[gap], at) for at, gap in enumerate(gaps) if shares[gap] < len(gap)
    ]
    heapify(busiest)
    for _ in range(num_peers - sum(shares.values())):
        if not busiest:
            break
        at = busiest[0][1]
        gap = gaps[at]
        shares[gap] += 1
        if shares[gap] < len(gap):
            heapreplace(busiest, (-work[at] / shares[gap], at))
        else:
            heappop(busiest)
    return shares


def _least_share(spec: RunSpec, gap: LayerRange, most_bytes: int) -> int:
    """Return the least number of peers with so much memory that hold a gap."""
    return max(1, math.ceil(spec.memory_bytes(gap) / max(1, most_bytes)))
