"""Who of those that share a model sits beside whom, so that few bytes go over relays. Pure.

Placement decides which stages there are and who takes part, see `placement`. Here peers that left
the choice to it change seats, where each still fits, until the bytes that are expected to be
relayed are as few as can be. Where nothing is known of who reaches whom all stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from swarm_ft.coordinator.facts.state import Member
from swarm_ft.coordinator.facts.ways import Ways
from swarm_ft.coordinator.plan.hosting import refusal
from swarm_ft.coordinator.plan.placement import fits
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.spec.codec_spec import CodecName, CodecSpec, Direction
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

MAX_TRIES = 10_000
"""Of changes that are looked at: the coordinator decides nothing else meanwhile."""
MAX_SEARCHED = 16
"""Peers among which all orders are searched; more only change seats in pairs."""
OTHER_BITS = 4.0
"""A value, by codecs that are told by something else than bits."""
_OF_BITS = {CodecName.NONE, CodecName.FP16, CodecName.BF16, CodecName.Q, CodecName.AQ, CodecName.HQ}
_WEIGHT_BYTES = 4


def with_better_neighbours(
    spec: RunSpec, placed: Sequence[StageAssignment], members: Mapping[PeerId, Member], ways: Ways
) -> tuple[StageAssignment, ...]:
    """The same stages with the same peers, in an order in which fewer bytes are relayed.

    Args:
        spec: says what each peer may host, and how much goes where.
        placed: first stage to last, replicas beside each other; of orders that are as good as this
            one, this one is kept.
        members: who the peers are.
        ways: who reaches whom.
    """
    peers = [one.peer_id for one in placed]
    if _are_alike(frozenset(peers), ways):
        return tuple(placed)

    @cache
    def may_sit(peer: int, seat: int) -> bool:
        member, layers = members[peers[peer]], placed[seat].layers
        return fits(spec, layers, member.hello) and not refusal(spec, member, layers)

    free = [
        seat
        for seat, peer in enumerate(peers)
        if peer in members and members[peer].hello.layers is None
    ]
    table = _Table(_links(spec, placed), free, may_sit, _costs(peers, ways))
    order = _changed_in_pairs(table)
    if len(placed) <= MAX_SEARCHED:
        order = _Search(table, [one.layers for one in placed], order).best()
    return tuple(replace(one, peer_id=peers[i]) for one, i in zip(placed, order, strict=True))


def _are_alike(peers: Collection[PeerId], ways: Ways) -> bool:
    """Whether any two of them reach each other as any other two: no order is better then."""
    if any(one in peers and other in peers for one, other in ways.met):
        return False
    homes = {ways.homes.get(peer) for peer in peers}
    return len(homes) <= 1 or all(home is not None and home.is_open for home in homes)


def relayed_percent(spec: RunSpec, placed: Sequence[StageAssignment], ways: Ways) -> int:
    """How much of what peers send each other is expected to be relayed; 0 if nothing is known."""
    percent = _costs([one.peer_id for one in placed], ways)
    links = [
        (size, percent(one, other))
        for one, others in enumerate(_links(spec, placed))
        for other, size in others.items()
    ]
    num_bytes = sum(size for size, _ in links)
    if not num_bytes or not ways.homes:
        return 0
    return round(sum(size * share for size, share in links) / num_bytes)


# ---- seats, and how much goes between two of them in a step

Links = list[dict[int, int]]
"""Of each seat the others that it exchanges bytes with, and how many."""
Order = Sequence[int]
"""At each seat the peer that had this seat before."""


def _links(spec: RunSpec, placed: Sequence[StageAssignment]) -> Links:
    stages: dict[LayerRange, list[int]] = {}
    for seat, assignment in enumerate(placed):
        stages.setdefault(assignment.layers, []).append(seat)
    links: Links = [{} for _ in placed]

    def link(one: int, other: int, num_bytes: float) -> None:
        links[one][other] = links[other][one] = math.ceil(num_bytes)

    before: list[int] = []
    for layers, seats in stages.items():
        for seat in seats:
            for other in before:
                link(seat, other, _crossing_bytes(spec) / (len(seats) * len(before)))
        for one, other in combinations(seats, 2):
            # Of the gradient each sends its part of the other's shard, and the sum of its own.
            link(one, other, 4 * gradient_bytes(spec, layers) / len(seats))
        before = seats
    return links


def _crossing_bytes(spec: RunSpec) -> float:
    """Of a step, over one boundary: activations, and their gradients back."""
    train = spec.train
    values = train.batch_size * train.seq_length * spec.model.hidden_size
    return values * sum(bits_of(train.codec(direction)) for direction in Direction) / 8


def gradient_bytes(spec: RunSpec, layers: LayerRange) -> float:
    """Of a stage's gradients once, as replicas send them to each other."""
    values = spec.trained_bytes(layers) / _WEIGHT_BYTES
    return values * bits_of(spec.train.reduction_codec) / 8


def bits_of(codec: CodecSpec) -> float:
    """About how many a value takes."""
    if codec.is_directional:
        return codec.usual_bits
    return codec.number if codec.name in _OF_BITS else OTHER_BITS


def _costs(peers: Sequence[PeerId], ways: Ways) -> Callable[[int, int], int]:
    """The chance in percent that a link of two peers, by their first seats, is relayed."""

    @cache
    def cost(one: int, other: int) -> int:
        return ways.relayed_percent(peers[one], peers[other])

    return cost


class _Table:
    """Seats, who may have them, and what links cost.

    Args:
        links: between seats.
        free: seats whose peers may change.
        may_sit: whether a peer may have a seat of these.
        cost: of each byte between two peers.
    """

    def __init__(
        self,
        links: Links,
        free: Collection[int],
        may_sit: Callable[[int, int], bool],
        cost: Callable[[int, int], int],
    ) -> None:
        self.links = links
        self.free = free
        self.may_sit = may_sit
        self.cost = cost
        self.tries = 0

    @property
    def is_tired(self) -> bool:
        """Whether enough was looked at."""
        return self.tries >= MAX_TRIES

    def at(self, order: Order, seat: int, peer: int) -> int:
        """What the links of a seat to earlier ones cost, with this peer there."""
        links = self.links[seat].items()
        return sum(size * self.cost(order[other], peer) for other, size in links if other < seat)

    def around(self, order: Order, one: int, other: int) -> int:
        """What the links of two seats cost; that between them is the same if they change."""
        return sum(
            size * self.cost(order[seat], order[neighbour])
            for seat in (one, other)
            for neighbour, size in self.links[seat].items()
            if neighbour not in (one, other)
        )

    def total(self, order: Order) -> int:
        """What all links cost."""
        return sum(self.at(order, seat, peer) for seat, peer in enumerate(order))


# ---- the search


def _changed_in_pairs(table: _Table) -> list[int]:
    """Two peers change seats as long as that makes it cheaper."""
    order, is_better = list(range(len(table.links))), True
    while is_better:
        is_better = False
        for one, other in combinations(table.free, 2):
            if table.is_tired:
                return order
            is_better |= _change(table, order, one, other)
    return order


def _change(table: _Table, order: list[int], one: int, other: int) -> bool:
    """Have two seats change their peers if that is cheaper; whether it is."""
    table.tries += 1
    if not (table.may_sit(order[one], other) and table.may_sit(order[other], one)):
        return False
    before = table.around(order, one, other)
    order[one], order[other] = order[other], order[one]
    is_better = table.around(order, one, other) < before
    if not is_better:
        order[one], order[other] = order[other], order[one]
    return is_better


class _Search:
    """Seat by seat, the cheapest peer first, and back; what cannot beat the best is left out.

    So is what uses the same peers as something that was no dearer, and ends alike (Held and Karp
    1962): among eight stages no order is cheaper than the one found.

    Args:
        table: seats and peers.
        stages: of each seat.
        order: the best that is known.
    """

    def __init__(self, table: _Table, stages: Sequence[LayerRange], order: Order) -> None:
        self._table = table
        self._stages = stages
        self._best = list(order)
        self._best_cost = table.total(order)
        self._order = list(order)
        seats = range(len(order))
        # Of each seat the earlier ones on which the cost of it, or of later ones, depends.
        self._ends = [
            [s for s in range(seat) if max(table.links[s], default=0) >= seat] for seat in seats
        ]
        # Of each seat, the bytes between it and earlier ones.
        self._bytes = [sum(size for s, size in table.links[t].items() if s < t) for t in seats]
        # Of each peer, what a byte to whoever is nearest to it costs.
        self._least = [min((table.cost(p, q) for q in seats if q != p), default=0) for p in seats]
        self._reached: dict[tuple[frozenset[int], frozenset[tuple[LayerRange, int]]], int] = {}

    def best(self) -> list[int]:
        """The cheapest order there is, as far as it was looked for; the given one if that is."""
        self._look(0, frozenset(self._table.free), 0)
        return self._best

    def _look(self, seat: int, unused: frozenset[int], cost: int) -> None:
        if seat == len(self._order):
            self._best, self._best_cost = list(self._order), cost
            return
        end = unused, frozenset((self._stages[s], self._order[s]) for s in self._ends[seat])
        if self._reached.get(end, math.inf) <= cost:
            return
        self._reached[end] = cost
        for more, peer in self._candidates(seat, unused):
            rest = unused - {peer}
            least = cost + more + self._least_behind(seat, rest)
            if least < self._best_cost and not self._table.is_tired:
                self._order[seat] = peer
                self._look(seat + 1, rest, cost + more)

    def _least_behind(self, seat: int, unused: Collection[int]) -> int:
        """What no order of these peers in the free seats behind can go below."""
        sizes = [self._bytes[free] for free in self._table.free if free > seat]
        costs = [self._least[peer] for peer in unused]
        if not costs:
            return 0
        return max(min(sizes) * sum(costs), sum(sizes) * min(costs))

    def _candidates(self, seat: int, unused: frozenset[int]) -> list[tuple[int, int]]:
        """What each peer costs that may have this seat, and who it is, the cheapest first."""
        table, peers = self._table, [seat]
        if seat in table.free:
            peers = [peer for peer in unused if table.may_sit(peer, seat)]
        table.tries += len(peers)
        return sorted((table.at(self._order, seat, peer), peer) for peer in peers)
