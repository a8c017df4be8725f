"""Which peer hosts which blocks, and why nobody does yet. Pure.

Peers that name their layers keep them; peers that leave the choice (`--layers auto`) share what
is left, as evenly as their memory allows. Whoever is left over then is a replica of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from swarm_ft.coordinator.facts.state import Member
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.run_spec import COPIES_PER_WEIGHT, ModelSpec

SETTLE_S = 2.0
"""How long automatic peers are gathered after the last one came, before the first assignment."""
GATHERING = "gathering peers"


@dataclass(frozen=True, slots=True)
class Placement:
    """Who hosts what, first stage to last, replicas beside each other; or nobody, and why."""

    assignments: tuple[StageAssignment, ...]
    reason: str

    @property
    def is_gathering(self) -> bool:
        """Whether more is known in a moment."""
        return self.reason == GATHERING


def place(model: ModelSpec, members: Sequence[Member], now_s: float) -> Placement:
    """Cover all blocks of the model with members, or say what is missing."""
    fixed = [m for m in members if m.hello.layers and m.hello.layers.stop <= model.num_blocks]
    free = [m for m in members if m.hello.layers is None]
    parts = _cover(model.num_blocks, fixed)
    gaps = [part for part in parts if isinstance(part, LayerRange)]
    if gaps and not free:
        return Placement((), f"waiting for layers {_listed(gaps)}")
    if free and now_s - max(m.joined_at_s for m in free) < SETTLE_S:
        return Placement((), GATHERING)
    filled = _filled(model, parts, gaps, free)
    assignments = _with_replicas(model, filled.assignments, members)
    return replace(filled, assignments=assignments)


def place_on(
    cuts: Sequence[LayerRange], model: ModelSpec, members: Sequence[Member], now_s: float
) -> Placement:
    """As `place`, on stages that are given: those of a snapshot."""
    autos = [m for m in members if m.hello.layers is None]
    if autos and now_s - max(m.joined_at_s for m in autos) < SETTLE_S:
        return Placement((), GATHERING)
    autos.sort(key=lambda m: (-m.hello.memory_bytes, m.joined_at_s))
    hosts = {m.hello.layers: m.hello.peer_id for m in reversed(members) if m.hello.layers}
    for layers in sorted(cuts, key=len, reverse=True):
        if layers not in hosts and autos and fits(model, layers, autos[0].hello):
            hosts[layers] = autos.pop(0).hello.peer_id
    missing = [layers for layers in cuts if layers not in hosts]
    if missing:
        return Placement((), f"waiting for layers {_listed(missing)}")
    first = tuple(StageAssignment(peer_id=hosts[layers], layers=layers) for layers in cuts)
    return Placement(_with_replicas(model, first, members), "")


def _filled(
    model: ModelSpec,
    parts: Sequence[Member | LayerRange],
    gaps: Sequence[LayerRange],
    free: Sequence[Member],
) -> Placement:
    if not gaps:
        return _fill(model, parts, gaps, ())
    # All of them if their memory allows; else the larger ones, for an even share may be too much.
    by_memory = sorted(free, key=lambda m: (-m.hello.memory_bytes, m.joined_at_s))
    most = min(len(free), sum(len(gap) for gap in gaps))
    tries = (_fill(model, parts, gaps, by_memory[:n]) for n in range(most, 0, -1))
    refused = next(tries)
    return next((fit for fit in (refused, *tries) if fit.assignments), refused)


def fits(model: ModelSpec, layers: LayerRange, hello: PeerHello) -> bool:
    """Whether blocks fit into the memory that a peer lends."""
    return len(layers) * model.block_bytes * COPIES_PER_WEIGHT <= hello.memory_bytes


def _with_replicas(
    model: ModelSpec, first: tuple[StageAssignment, ...], members: Sequence[Member]
) -> tuple[StageAssignment, ...]:
    """One peer a stage, and every other member that can host one of the stages too."""
    hosts = {assignment.layers: [assignment] for assignment in first}
    named = {assignment.peer_id for assignment in first}
    for member in members if first else ():
        hello = member.hello
        if hello.peer_id in named:
            continue
        open_to = [r for r in hosts if hello.layers == r]
        if hello.layers is None:
            open_to = [r for r in hosts if fits(model, r, hello)]
        if open_to:
            busiest = max(open_to, key=lambda r: len(r) / len(hosts[r]))
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
    model: ModelSpec,
    parts: Sequence[Member | LayerRange],
    gaps: Sequence[LayerRange],
    by_memory: Sequence[Member],
) -> Placement:
    shares = _shares(gaps, len(by_memory))
    if shares is None:
        listed = _listed(gaps)
        return Placement((), f"waiting for peers: {len(by_memory)} to share layers {listed}")
    ranges = [r for gap in gaps for r in split_evenly(gap, shares[gap])]
    hosts = dict(zip(sorted(ranges, key=len, reverse=True), by_memory, strict=False))
    for layers, member in hosts.items():
        if not fits(model, layers, member.hello):
            return Placement(
                (), f"waiting for more peers: layers {layers} fit into nobody's memory"
            )
    chosen = []
    for part in parts:
        if isinstance(part, LayerRange):
            inside = [r for r in ranges if part.start <= r.start < part.stop]
            chosen += [StageAssignment(peer_id=hosts[r].hello.peer_id, layers=r) for r in inside]
        elif part.hello.layers is not None:
            chosen.append(StageAssignment(peer_id=part.hello.peer_id, layers=part.hello.layers))
    return Placement(tuple(chosen), "")


def _shares(gaps: Sequence[LayerRange], num_peers: int) -> dict[LayerRange, int] | None:
    """How many peers share each gap: one each, then wherever the parts are longest."""
    if num_peers < len(gaps):
        return None
    shares = dict.fromkeys(gaps, 1)
    for _ in range(num_peers - len(gaps)):
        longest = max(gaps, key=lambda gap: len(gap) / shares[gap])
        if shares[longest] == len(longest):
            break
        shares[longest] += 1
    return shares


def _listed(gaps: Sequence[LayerRange]) -> str:
    return ", ".join(str(gap) for gap in gaps)
