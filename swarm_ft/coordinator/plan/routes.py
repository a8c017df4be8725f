"""Routes of microbatches over the replicas of each stage. Pure.

Every stage divides a step's microbatches among its replicas by their speed, so load is even in
every step. Within that, samples go where the ledger has their buffers (see `Affinity`). Other
samples follow a place in [0, 1) that each sample gets from the seed: microbatches are cut in the
order of places, and each stage divides that order. So a sample meets nearly the same replicas at
every visit even without a ledger. Otherwise, a microbatch prefers a replica that is reached without
a relay.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise, zip_longest

import numpy as np
from numpy.typing import NDArray

from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.ledger import Ledger, Side
from swarm_ft.coordinator.facts.state import PlannedStep
from swarm_ft.digest import digest_of
from swarm_ft.ids import MicrobatchIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.training_plan import step_microbatches, step_samples

# ---- estimates from a few measured times

MANY_SPREADS = 4.0
"""Median absolute deviations that count as noise; less than 1 % of normal noise exceeds them."""
LEAST_SPREAD = 0.1
"""Least spread as a part of the median, however steady the measurements were."""


def expected_s(measured: Sequence[float]) -> float:
    """Return the expected next value: the median, or the last value if it is an outlier.

    So noise changes nothing, and a real change counts at once.
    """
    usual = statistics.median(measured)
    return measured[-1] if abs(measured[-1] - usual) > _spread(measured) else usual


def longest_s(measured: Sequence[float]) -> float:
    """Return the largest next value that is still within the spread."""
    return statistics.median(measured) + _spread(measured)


def _spread(measured: Sequence[float]) -> float:
    usual = statistics.median(measured)
    deviation = statistics.median(abs(seconds - usual) for seconds in measured)
    return MANY_SPREADS * max(deviation, LEAST_SPREAD * usual)


# ---- affinity: samples with the same holders form groups, which go to these holders
#
# Affinity does not change how much a peer gets: loads are as even as without buffers, and within
# that as few samples as possible leave their holders. A buffer counts only with both of its ends:
# with one end alone, the sample starts with a key frame wherever it goes.

ANY = -1
"""Entry of a route that leaves the replica open."""
MAX_WISHES = 4
"""Routes that a microbatch tries, those of most of its samples first."""

Route = tuple[int, ...]


class Affinity:
    """Holders of one step's samples.

    Args:
        ledger: Ledger with the boundaries of these stages.
        stages: Stages of the pipeline, first to last.
        samples: Samples in the order of their places.
    """

    def __init__(
        self, ledger: Ledger, stages: Sequence[Stage], samples: Sequence[SampleId]
    ) -> None:
        self._samples = samples
        self._entry = ledger.entry
        self._rows = {sample: row for row, sample in enumerate(samples)}
        # [samples, boundaries, 2]: the replica at each end; ANY unless both are of the pipeline.
        self._ends = _held_ends(ledger, stages, samples)
        self._routes: list[Route] = [
            tuple(r) for r in _held_routes(self._ends, ledger.entry).tolist()
        ]

    def groups(self, size: int, room: Sequence[Counter[int]]) -> list[tuple[SampleId, ...]]:
        """Cut the samples into groups of `size`, the last one smaller, that are held together.

        Samples without a holder, and those whose holders have no room, fill groups up, so that each
        group belongs to one route if possible.

        Args:
            size: Samples per group.
            room: For each stage, how many groups each replica takes.
        """
        staying, fillers = self._divided(
            [Counter({r: n * size for r, n in c.items()}) for c in room]
        )
        fillers.reverse()
        ordered: list[int] = []
        for _, group in groupby(staying, key=self._routes.__getitem__):
            ordered += group
            ordered += [fillers.pop() for _ in range(min(-len(ordered) % size, len(fillers)))]
        ordered += reversed(fillers)
        return _cut([self._samples[row] for row in ordered], size)

    def _divided(self, left: list[Counter[int]]) -> tuple[list[int], list[int]]:
        """Return samples that may stay with their holders, by route, and all others, as rows."""
        rows = range(len(self._samples))
        nobody = (ANY,) * len(left)
        weights = self._weights(rows, np.array(self._routes)).tolist()
        staying: list[int] = []
        unheld: list[int] = []
        excess: list[int] = []
        for row in sorted(rows, key=lambda row: -weights[row]):
            route = self._routes[row]
            if route == nobody:
                unheld.append(row)
            elif _fits(route, left):
                _taken(route, left)
                staying.append(row)
            else:
                excess.append(row)
        staying.sort(key=lambda row: (self._routes[row], row))
        excess.sort(key=lambda row: (self._routes[row], row))
        return staying, [*unheld, *excess]

    def wishes(self, group: Sequence[SampleId]) -> list[tuple[int, Route]]:
        """Return routes that hold some of a group, with how much of it, most first."""
        rows = [self._rows[sample] for sample in group]
        counted = Counter(self._routes[row] for row in rows)
        common = (route for route, _ in counted.most_common(MAX_WISHES))
        routes = [route for route in common if route != (ANY,) * len(route)]
        weighed = [(int(self._weights(rows, np.array([r])).sum()), r) for r in routes]
        return sorted(weighed, key=lambda wish: -wish[0])

    def _weights(self, rows: Sequence[int], along: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return at how many boundaries the peers of a route hold each sample's buffers.

        Args:
            rows: Samples, as rows.
            along: Routes, one for each sample or one for all, [samples, stages].
        """
        pairs = np.stack([along[:, :-1], along[:, 1:]], axis=2)
        if self._entry:
            pairs[:, self._entry - 1, Side.UPSTREAM] = pairs[:, self._entry - 1, Side.DOWNSTREAM]
        is_there = (self._ends[rows] == pairs) & (pairs != ANY)
        weights: NDArray[np.int64] = is_there.all(axis=2).sum(axis=1)
        return weights


class Detours:
    """Chance of a relay between replicas of adjoining stages, in percent.

    Args:
        stages: Stages of the pipeline, first to last.
        ways: Connectivity of members.
    """

    def __init__(self, stages: Sequence[Stage], ways: Connectivity) -> None:
        self._percent = [
            [[ways.relayed_percent(one, other) for other in behind.peers] for one in ahead.peers]
            for ahead, behind in pairwise(stages)
        ]

    def best(self, route: Sequence[int], stage: int, open_to: Iterable[int]) -> int:
        """Return the best of some replicas of a stage for a route that is open there.

        Of two that its neighbours reach equally well, it is the one that other replicas of the
        stage before reach worse.
        """
        return min(open_to, key=lambda replica: self._rank(route, stage, replica))

    def _rank(self, route: Sequence[int], stage: int, replica: int) -> tuple[int, int, int]:
        ahead = self._percent[stage - 1] if stage else []
        behind = self._percent[stage][replica] if stage < len(self._percent) else []
        detour = ahead[route[stage - 1]][replica] if ahead else 0
        if behind and route[stage + 1] != ANY:
            detour += behind[route[stage + 1]]
        return detour, -sum(others[replica] for others in ahead), replica


def assign(
    wishes: Sequence[Sequence[tuple[int, Route]]],
    room: Sequence[Counter[int]],
    detours: Detours,
) -> list[Route]:
    """Return the route of each group.

    Groups with the most to lose choose first. A group whose route is full at some stage changes as
    few other stages as possible, since every change of peers loses buffers. A group with several
    open replicas takes the first of those that are reached best.

    Args:
        wishes: Wishes of each group, most wanted first.
        room: For each stage, how many groups each replica takes; as many as there are in all.
        detours: Chances of relays between replicas.
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
    return [_completed(routes[group], left, detours) for group in range(len(wishes))]


def _completed(route: Route, left: Sequence[Counter[int]], detours: Detours) -> Route:
    """Return the route with a replica that has room at each open stage, and reserve these."""
    chosen = list(route)
    for stage, replica in enumerate(route):
        if replica == ANY:
            open_to = (r for r, room in left[stage].items() if room > 0)
            chosen[stage] = detours.best(chosen, stage, open_to)
            left[stage][chosen[stage]] -= 1
    return tuple(chosen)


def _fits(route: Route, left: Sequence[Counter[int]]) -> bool:
    return all(r == ANY or counter[r] > 0 for r, counter in zip(route, left, strict=True))


def _taken(route: Route, left: Sequence[Counter[int]]) -> Route:
    """Return the part of the route that has room, and reserve it."""
    part = tuple(
        r if r != ANY and counter[r] > 0 else ANY for r, counter in zip(route, left, strict=True)
    )
    for replica, counter in zip(part, left, strict=True):
        if replica != ANY:
            counter[replica] -= 1
    return part


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
    if ledger.entry:
        below = ledger.entry - 1
        ends[:, :below] = ANY
        ends[:, below, Side.UPSTREAM] = ends[:, below, Side.DOWNSTREAM]
    ends[(ends == ANY).any(axis=2)] = ANY
    return ends


def _held_routes(ends: NDArray[np.int64], entry: int) -> NDArray[np.int64]:
    """Return the replica of each stage that holds a sample's buffers, [samples, stages]."""
    num_samples, num_boundaries, _ = ends.shape
    routes = np.full((num_samples, num_boundaries + 1), ANY)
    for boundary in range(num_boundaries):
        for side in Side:
            stage = boundary + side
            if stage < entry:
                continue
            is_open = routes[:, stage] == ANY
            routes[is_open, stage] = ends[is_open, boundary, side]
    return routes


Seconds = Mapping[PeerId, Sequence[float]]
"""Recent seconds per microbatch of each peer."""
NO_WAYS: Connectivity = Connectivity()
"""Connectivity of which nothing is known."""


def plan_microbatches(
    train: TrainSpec,
    step: StepNumber,
    stages: Sequence[Stage],
    seconds: Seconds,
    ledger: Ledger | None = None,
    ways: Connectivity = NO_WAYS,
) -> tuple[Microbatch, ...]:
    """Return the step's microbatches with routes; without replicas, in the order of the data."""
    if all(len(stage.peers) == 1 for stage in stages):
        return step_microbatches(train, step)
    samples = sorted(step_samples(train, step), key=lambda sample: _place(train.seed, sample))
    affinity = Affinity(ledger, stages, samples) if ledger else None
    size = train.micro_batch_size
    num_groups = -(-len(samples) // size)
    room = [Counter(_shares(num_groups, stage, seconds)) for stage in stages]
    groups = affinity.groups(size, room) if affinity else _cut(samples, size)
    wishes = [affinity.wishes(g) if affinity else [] for g in groups]
    routes = assign(wishes, room, Detours(stages, ways))
    ordered = sorted(zip(routes, range(len(groups)), groups, strict=True))
    ranks = _interleaved(len(groups), max(len(stage.peers) for stage in stages))
    return tuple(
        Microbatch(MicrobatchIndex(index), ordered[rank][2], ordered[rank][0])
        for index, rank in enumerate(ranks)
    )


def routes_of(
    microbatches: Iterable[Microbatch], stages: Sequence[Stage]
) -> dict[SampleId, tuple[PeerId, ...]]:
    """Return the peers that each sample passes, first stage to last."""
    return {
        sample: tuple(stage.peers[batch.replica_at(i)] for i, stage in enumerate(stages))
        for batch in microbatches
        for sample in batch.samples
    }


def plan_again(
    before: PlannedStep,
    stages: Sequence[Stage],
    done: Mapping[PeerId, frozenset[MicrobatchIndex]],
    seconds: Seconds,
    num_held_out: int = 0,
) -> tuple[Microbatch, ...]:
    """Return the microbatches of a step that was planned before, at the least cost now.

    At each stage a microbatch stays with a peer that is done with it. The others are divided by
    speed again; as many of them as this allows stay with their former peer.

    Args:
        before: Step as it was planned.
        stages: Present stages of the run: the same layers, other peers.
        done: Microbatches that each peer reports as done.
        seconds: Speeds of peers.
        num_held_out: Number of the step's evaluated microbatches, whose indices follow.
    """
    planned = before.microbatches
    num_microbatches = len(planned) + num_held_out
    accepted = [_accepted(stage, done, num_microbatches) for stage in stages]
    routes = [
        _kept_routes(before, index, stage, accepted[index], seconds)
        for index, stage in enumerate(stages)
    ]
    is_plain = all(len(stage.peers) == 1 for stage in stages)
    return tuple(
        Microbatch(
            batch.index,
            batch.samples,
            () if is_plain else tuple(route[batch.index] for route in routes),
            frozenset(i for i, claims in enumerate(accepted) if batch.index in claims),
        )
        for batch in planned
    )


def plan_evaluation(
    held_out: Sequence[Microbatch],
    stages: Sequence[Stage],
    done: Mapping[PeerId, frozenset[MicrobatchIndex]],
    seconds: Seconds,
    ways: Connectivity = NO_WAYS,
    ledger: Ledger | None = None,
) -> tuple[Microbatch, ...]:
    """Return microbatches that are only evaluated, with their routes.

    Only the loss of such a microbatch is kept, so it is done once the last stage is done with it;
    before that it starts again. Keepers of its samples' constants are preferred.

    Args:
        held_out: Microbatches whose indices follow all others of the step.
        stages: Stages of the run.
        done: Microbatches that each peer reports as done.
        seconds: Speeds of peers.
        ways: Connectivity of members.
        ledger: Keepers of constants, if there are any.
    """
    if not held_out:
        return ()
    accepted = _accepted(stages[-1], done, held_out[-1].index + 1)
    to_do = [batch for batch in held_out if batch.index not in accepted]
    room = [Counter(_shares(len(to_do), stage, seconds)) for stage in stages]
    wishes: list[list[tuple[int, Route]]] = [[] for _ in to_do]
    if ledger and ledger.entry:
        affinity = Affinity(ledger, stages, [s for b in to_do for s in b.samples])
        wishes = [affinity.wishes(batch.samples) for batch in to_do]
    routes = iter(assign(wishes, room, Detours(stages, ways)))
    is_plain = all(len(stage.peers) == 1 for stage in stages)
    in_front, everywhere = (0,) * (len(stages) - 1), frozenset(range(len(stages)))
    planned = []
    for batch in held_out:
        is_done = batch.index in accepted
        route = (*in_front, accepted[batch.index]) if is_done else next(routes)
        planned.append(
            replace(
                batch,
                route=() if is_plain else route,
                done=everywhere if is_done else frozenset(),
            )
        )
    return tuple(planned)


def with_entries(
    batches: Sequence[Microbatch],
    stages: Sequence[Stage],
    ledger: Ledger | None,
    only: Collection[MicrobatchIndex] | None = None,
) -> tuple[Microbatch, ...]:
    """Return the microbatches, with those that can start at the stage that keeps constants.

    Args:
        batches: Microbatches with their routes.
        stages: Stages of the run.
        ledger: Keepers of constants, if there are any.
        only: In a repeated plan, the microbatches that started there before: the stages in front
            may have computed some of the others. None: any.
    """
    if ledger is None or not ledger.entry:
        return tuple(batches)
    return tuple(
        replace(batch, entry=ledger.entry)
        if (only is None or batch.index in only) and _may_enter(batch, stages, ledger)
        else batch
        for batch in batches
    )


def _may_enter(batch: Microbatch, stages: Sequence[Stage], ledger: Ledger) -> bool:
    host = stages[ledger.entry].peers[batch.replica_at(ledger.entry)]
    return ledger.entry in batch.done or set(ledger.keepers(batch.samples)) == {host}


def _accepted(
    stage: Stage, done: Mapping[PeerId, frozenset[MicrobatchIndex]], num_microbatches: int
) -> dict[MicrobatchIndex, int]:
    """Return the microbatches that are done at a stage, each with its replica.

    Two replicas may report the same one, because one of them was thought dead for a while. Then one
    of the two starts again: a sum cannot be taken apart.
    """
    accepted: dict[MicrobatchIndex, int] = {}
    claims = [(replica, done.get(peer, frozenset())) for replica, peer in enumerate(stage.peers)]
    for replica, claimed in sorted(claims, key=lambda claim: -len(claim[1])):
        is_known = all(index < num_microbatches for index in claimed)
        if is_known and not claimed & accepted.keys():
            accepted.update(dict.fromkeys(claimed, replica))
    return accepted


def _kept_routes(
    before: PlannedStep,
    stage_index: int,
    stage: Stage,
    accepted: dict[MicrobatchIndex, int],
    seconds: Seconds,
) -> list[int]:
    """Return the replica of each microbatch at one stage."""
    routes: dict[int, int] = {int(index): replica for index, replica in accepted.items()}
    to_do = [batch for batch in before.microbatches if batch.index not in accepted]
    room = Counter(_shares(len(to_do), stage, seconds))
    for batch in to_do:
        host = before.host(batch, stage_index)
        replica = stage.peers.index(host) if host in stage.peers else None
        if replica is not None and room[replica]:
            routes[batch.index] = replica
            room[replica] -= 1
    others = room.elements()
    return [
        routes[batch.index] if batch.index in routes else next(others)
        for batch in before.microbatches
    ]


def _cut(samples: Sequence[SampleId], size: int) -> list[tuple[SampleId, ...]]:
    return [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]


def _place(seed: int, sample: SampleId) -> bytes:
    return digest_of(f"place of {sample} by {seed}".encode())


def _shares(num_microbatches: int, stage: Stage, seconds: Seconds) -> list[int]:
    """Return the replica of each microbatch, in rising order, so that all need equal time."""
    taken = _seconds_each(stage, seconds)
    counts = [0] * len(stage.peers)
    for _ in range(num_microbatches):
        soonest = min(
            range(len(counts)), key=lambda replica: (counts[replica] + 1) * taken[replica]
        )
        counts[soonest] += 1
    return [replica for replica, count in enumerate(counts) for _ in range(count)]


def _seconds_each(stage: Stage, seconds: Seconds) -> list[float]:
    """Return each replica's seconds per microbatch; a newcomer counts as fast as the others."""
    known = {peer: expected_s(seconds[peer]) for peer in stage.peers if seconds.get(peer)}
    usual = statistics.median(known.values()) if known else 1.0
    return [max(known.get(peer, usual), math.ulp(1.0)) for peer in stage.peers]


def _interleaved(count: int, lanes: int) -> list[int]:
    """Return 0 to count - 1 with neighbours from different lanes.

    So all replicas start at once.
    """
    size = -(-count // lanes)
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [rank for rank in chain.from_iterable(zip_longest(*parts)) if rank is not None]
