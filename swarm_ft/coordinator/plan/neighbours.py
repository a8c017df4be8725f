"""Order of a run's peers in the pipeline, so that few bytes go over relays. Pure.

Placement chooses the stages and their peers, see `placement`. Here peers that left the choice to it
swap seats, where each still fits, until the expected relayed bytes are least. Without knowledge of
the peers' connectivity all stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from swarm_ft.codec.spec import Direction
from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.state import Member
from swarm_ft.coordinator.plan.hosting import refusal
from swarm_ft.coordinator.plan.placement import fits
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

MAX_TRIES = 10_000
"""Most swaps that are tried: the coordinator decides nothing else meanwhile."""
MAX_SEARCHED = 16
"""Most peers whose orders are all searched; more peers only swap seats in pairs."""
_WEIGHT_BYTES = 4


def with_better_neighbours(
    spec: RunSpec,
    placed: Sequence[StageAssignment],
    members: Mapping[PeerId, Member],
    ways: Connectivity,
) -> tuple[StageAssignment, ...]:
    """Return the same stages with the same peers, in an order that relays fewer bytes.

    Args:
        spec: RunSpec, which determines what each peer may host, and the traffic.
        placed: Assignments, first stage to last, replicas next to each other. This order is kept if
            no other is better.
        members: Member of each peer.
        ways: Connectivity of members.
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


def _are_alike(peers: Collection[PeerId], ways: Connectivity) -> bool:
    """Whether all pairs of them connect equally well, so that no order is better."""
    if any(one in peers and other in peers for one, other in ways.met):
        return False
    homes = {ways.homes.get(peer) for peer in peers}
    return len(homes) <= 1 or all(home is not None and home.is_open for home in homes)


def relayed_percent(spec: RunSpec, placed: Sequence[StageAssignment], ways: Connectivity) -> int:
    """Return the percentage of traffic that is expected to be relayed; 0 if unknown."""
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
"""The other seats that each seat exchanges bytes with, and how many per step."""
Order = Sequence[int]
"""The first seat of each seat's present peer."""


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
            # Each sends its part of the other's shard, and the sum of its own shard.
            link(one, other, 4 * gradient_bytes(spec, layers) / len(seats))
        before = seats
    return links


def _crossing_bytes(spec: RunSpec) -> float:
    """Return the bytes of a step over one boundary: activations and their gradients."""
    train = spec.train
    values = train.batch_size * train.seq_length * spec.model.hidden_size
    return values * sum(train.codec(direction).nominal_bits for direction in Direction) / 8


def gradient_bytes(spec: RunSpec, layers: LayerRange) -> float:
    """Return the bytes of a stage's gradients, once, as replicas send them to each other."""
    values = spec.trained_bytes(layers) / _WEIGHT_BYTES
    return values * spec.train.reduction_codec.nominal_bits / 8


def _costs(peers: Sequence[PeerId], ways: Connectivity) -> Callable[[int, int], int]:
    """Return a function from two peers' first seats to the percentage of their link's relay."""

    @cache
    def cost(one: int, other: int) -> int:
        return ways.relayed_percent(peers[one], peers[other])

    return cost


class _Table:
    """Seats, their possible peers, and the costs of links.

    Args:
        links: Traffic between seats.
        free: Seats whose peers may change.
        may_sit: Function that decides whether a peer may have one of these seats.
        cost: Function from two peers to the cost of each byte between them.
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
        """Whether the limit of tries is reached."""
        return self.tries >= MAX_TRIES

    def at(self, order: Order, seat: int, peer: int) -> int:
        """Return the cost of a seat's links to earlier seats, with this peer there."""
        links = self.links[seat].items()
        return sum(size * self.cost(order[other], peer) for other, size in links if other < seat)

    def around(self, order: Order, one: int, other: int) -> int:
        """Return the cost of two seats' links, without the link between them: a swap keeps that."""
        return sum(
            size * self.cost(order[seat], order[neighbour])
            for seat in (one, other)
            for neighbour, size in self.links[seat].items()
            if neighbour not in (one, other)
        )

    def total(self, order: Order) -> int:
        """Return the cost of all links."""
        return sum(self.at(order, seat, peer) for seat, peer in enumerate(order))


# ---- the search


def _changed_in_pairs(table: _Table) -> list[int]:
    """Swap pairs of peers as long as that lowers the cost."""
    order, is_better = list(range(len(table.links))), True
    while is_better:
        is_better = False
        for one, other in combinations(table.free, 2):
            if table.is_tired:
                return order
            is_better |= _change(table, order, one, other)
    return order


def _change(table: _Table, order: list[int], one: int, other: int) -> bool:
    """Swap the peers of two seats if that lowers the cost; return whether it does."""
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
    """A depth-first search over the seats, cheapest peer first, without hopeless branches.

    It also cuts branches that use the same peers as an equally cheap one and end alike (Held and
    Karp 1962): among eight stages no order is cheaper than the one found.

    Args:
        table: Seats and peers.
        stages: Stage of each seat.
        order: Best known order.
    """

    def __init__(self, table: _Table, stages: Sequence[LayerRange], order: Order) -> None:
        self._table = table
        self._stages = stages
        self._best = list(order)
        self._best_cost = table.total(order)
        self._order = list(order)
        seats = range(len(order))
        # For each seat, the earlier ones that the cost of it, or of later ones, depends on.
        self._ends = [
            [s for s in range(seat) if max(table.links[s], default=0) >= seat] for seat in seats
        ]
        # For each seat, the bytes between it and earlier ones.
        self._bytes = [sum(size for s, size in table.links[t].items() if s < t) for t in seats]
        # For each peer, the cost of a byte to its nearest other peer.
        self._least = [min((table.cost(p, q) for q in seats if q != p), default=0) for p in seats]
        self._reached: dict[tuple[frozenset[int], frozenset[tuple[LayerRange, int]]], int] = {}

    def best(self) -> list[int]:
        """Return the cheapest order within the limit of tries; the given one if none is cheaper."""
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
            remaining = unused - {peer}
            least = cost + more + self._least_behind(seat, remaining)
            if least < self._best_cost and not self._table.is_tired:
                self._order[seat] = peer
                self._look(seat + 1, remaining, cost + more)

    def _least_behind(self, seat: int, unused: Collection[int]) -> int:
        """Return a lower bound on the cost of the later free seats with these peers."""
        sizes = [self._bytes[free] for free in self._table.free if free > seat]
        costs = [self._least[peer] for peer in unused]
        if not costs:
            return 0
        return max(min(sizes) * sum(costs), sum(sizes) * min(costs))

    def _candidates(self, seat: int, unused: frozenset[int]) -> list[tuple[int, int]]:
        """Return the cost of each peer that may have this seat, the cheapest first."""
        table, peers = self._table, [seat]
        if seat in table.free:
            peers = [peer for peer in unused if table.may_sit(peer, seat)]
        table.tries += len(peers)
        return sorted((table.at(self._order, seat, peer), peer) for peer in peers)
