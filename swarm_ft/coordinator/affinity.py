"""Samples together with those that are held by the same peers, and sent to these. Pure.

How much a peer may be given is not decided here, see `routes`: loads are as even as without
buffers, and within that as few samples as can be leave the peers that hold them. A buffer counts
where both of its ends are: of one end alone, the sample begins anew wherever it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from swarm_ft.coordinator.ledger import Ledger, Side
from swarm_ft.ids import SampleId
from swarm_ft.protocol.coordinator_messages import Stage

ANY = -1
"""In a route: whichever replica has room."""
MAX_WISHES = 4
"""Routes that a microbatch tries to take, those of most of its samples first."""

Route = tuple[int, ...]


class Affinity:
    """Where one step's samples are held.

    Args:
        ledger: whose boundaries are those of the stages.
        stages: the pipeline, first to last.
        samples: in the order of their places.
    """

    def __init__(
        self, ledger: Ledger, stages: Sequence[Stage], samples: Sequence[SampleId]
    ) -> None:
        self._samples = samples
        self._rows = {sample: row for row, sample in enumerate(samples)}
        # [samples, boundaries, 2]: the replica at each end; ANY unless both are of the pipeline.
        self._ends = _held_ends(ledger, stages, samples)
        self._routes: list[Route] = [tuple(r) for r in _held_routes(self._ends).tolist()]

    def groups(self, size: int, room: Sequence[Counter[int]]) -> list[tuple[SampleId, ...]]:
        """The samples cut into groups of `size`, the last one smaller, that are held together.

        Samples that nobody holds, and those that their peers have no room for, fill groups up, so
        that each is one route's alone if it can be.

        Args:
            size: samples in a group.
            room: of each stage, how many groups each replica takes.
        """
        kept, fillers = self._divided([Counter({r: n * size for r, n in c.items()}) for c in room])
        fillers.reverse()
        ordered: list[int] = []
        for _, group in groupby(kept, key=self._routes.__getitem__):
            ordered += group
            ordered += [fillers.pop() for _ in range(min(-len(ordered) % size, len(fillers)))]
        ordered += reversed(fillers)
        samples = [self._samples[row] for row in ordered]
        return [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]

    def _divided(self, left: list[Counter[int]]) -> tuple[list[int], list[int]]:
        """Samples that may stay with who holds them, by route, and all others, as rows."""
        rows = range(len(self._samples))
        nobody = (ANY,) * len(left)
        weights = self._weights(rows, np.array(self._routes)).tolist()
        kept: list[int] = []
        unheld: list[int] = []
        excess: list[int] = []
        for row in sorted(rows, key=lambda row: -weights[row]):
            route = self._routes[row]
            if route == nobody:
                unheld.append(row)
            elif _fits(route, left):
                _taken(route, left)
                kept.append(row)
            else:
                excess.append(row)
        kept.sort(key=lambda row: (self._routes[row], row))
        excess.sort(key=lambda row: (self._routes[row], row))
        return kept, [*unheld, *excess]

    def wishes(self, group: Sequence[SampleId]) -> list[tuple[int, Route]]:
        """Routes that hold some of a group, and how much of it, most first."""
        rows = [self._rows[sample] for sample in group]
        counted = Counter(self._routes[row] for row in rows)
        common = (route for route, _ in counted.most_common(MAX_WISHES))
        routes = [route for route in common if route != (ANY,) * len(route)]
        weighed = [(int(self._weights(rows, np.array([r])).sum()), r) for r in routes]
        return sorted(weighed, key=lambda wish: -wish[0])

    def _weights(self, rows: Sequence[int], along: NDArray[np.int64]) -> NDArray[np.int64]:
        """At how many boundaries the peers of a route hold each sample's buffers.

        Args:
            rows: samples.
            along: routes, one for each or one for all, [samples, stages].
        """
        pairs = np.stack([along[:, :-1], along[:, 1:]], axis=2)
        is_there = (self._ends[rows] == pairs) & (pairs != ANY)
        weights: NDArray[np.int64] = is_there.all(axis=2).sum(axis=1)
        return weights


def assign(
    wishes: Sequence[Sequence[tuple[int, Route]]], room: Sequence[Counter[int]]
) -> list[Route]:
    """The route of each group.

    Those that have most to lose choose first. Who finds its route full at some stage is sent
    elsewhere at as few other stages as can be, since every change of peers is a buffer lost.

    Args:
        wishes: of each group, most wanted first.
        room: of each stage, how many groups each replica takes; as many as there are in all.
    """
    left = [Counter(replicas) for replicas in room]
    routes: dict[int, Route] = {}
    ranked = sorted(
        (-weight, rank, group, route)
        for group, wanted in enumerate(wishes)
        for rank, (weight, route) in enumerate(wanted)
    )
    for _, _, group, route in ranked:
        if group not in routes and _fits(route, left):
            routes[group] = _taken(route, left)
    for group, wanted in enumerate(wishes):
        if group not in routes:
            route = wanted[0][1] if wanted else (ANY,) * len(left)
            routes[group] = _taken(route, left)
    free = [counter.elements() for counter in left]
    return [
        tuple(next(free[i]) if r == ANY else r for i, r in enumerate(routes[group]))
        for group in range(len(wishes))
    ]


def _fits(route: Route, left: Sequence[Counter[int]]) -> bool:
    return all(r == ANY or counter[r] > 0 for r, counter in zip(route, left, strict=True))


def _taken(route: Route, left: Sequence[Counter[int]]) -> Route:
    """As much of the route as there is room for, which is taken."""
    kept = tuple(
        r if r != ANY and counter[r] > 0 else ANY for r, counter in zip(route, left, strict=True)
    )
    for replica, counter in zip(kept, left, strict=True):
        if replica != ANY:
            counter[replica] -= 1
    return kept


def _held_ends(
    ledger: Ledger, stages: Sequence[Stage], samples: Sequence[SampleId]
) -> NDArray[np.int64]:
    entries = ledger.entries(samples)
    ends = np.empty(entries.shape, np.int64)
    numbers = ledger.numbers()
    for index, stage in enumerate(stages):
        replicas = np.full(len(ledger.peers) + 1, ANY)
        for replica, peer in enumerate(stage.peers):
            if peer in numbers:
                replicas[numbers[peer]] = replica
        if index:
            ends[:, index - 1, Side.DOWNSTREAM] = replicas[entries[:, index - 1, Side.DOWNSTREAM]]
        if index < len(stages) - 1:
            ends[:, index, Side.UPSTREAM] = replicas[entries[:, index, Side.UPSTREAM]]
    ends[(ends == ANY).any(axis=2)] = ANY
    return ends


def _held_routes(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The replica of each stage that holds a sample's buffers, [samples, stages]."""
    num_samples, num_boundaries, _ = ends.shape
    routes = np.full((num_samples, num_boundaries + 1), ANY)
    for boundary in range(num_boundaries):
        for side in Side:
            stage = boundary + side
            is_open = routes[:, stage] == ANY
            routes[is_open, stage] = ends[is_open, boundary, side]
    return routes
