"""Which microbatch passes which replica of each stage. Pure.

Every stage divides a step's microbatches among its replicas by their speed, so load is even in
every step. Within that, samples go where the ledger has their buffers (see `affinity`). Those that
nobody holds go by a place in [0, 1) that each sample has, drawn once, from the seed: microbatches
are cut in the order of places, and each stage divides that order. So a sample meets nearly the same
replicas at every visit even where there is no ledger.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, zip_longest

from swarm_ft.coordinator.affinity import Affinity, assign
from swarm_ft.coordinator.ledger import Ledger
from swarm_ft.coordinator.speeds import expected_s
from swarm_ft.coordinator.state import OpenStep
from swarm_ft.ids import MicrobatchIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.coordinator_messages import Stage
from swarm_ft.protocol.digest import digest_of
from swarm_ft.protocol.run_spec import TrainSpec
from swarm_ft.protocol.training_plan import Microbatch, step_microbatches, step_samples

Seconds = Mapping[PeerId, Sequence[float]]
"""Of peers, how long a microbatch took to compute, lately."""


def plan_microbatches(
    train: TrainSpec,
    step: StepNumber,
    stages: Sequence[Stage],
    seconds: Seconds,
    ledger: Ledger | None = None,
) -> tuple[Microbatch, ...]:
    """The step's microbatches with their routes; without replicas, in the order of the data."""
    if all(len(stage.peers) == 1 for stage in stages):
        return step_microbatches(train, step)
    samples = sorted(step_samples(train, step), key=lambda sample: _place(train.seed, sample))
    affinity = Affinity(ledger, stages, samples) if ledger else None
    size = train.micro_batch_size
    room = _room(-(-len(samples) // size), stages, seconds)
    groups = affinity.groups(size, room) if affinity else _cut(samples, size)
    routes = assign([affinity.wishes(g) if affinity else [] for g in groups], room)
    ordered = sorted(zip(routes, range(len(groups)), groups, strict=True))
    ranks = _interleaved(len(groups), max(len(stage.peers) for stage in stages))
    return tuple(
        Microbatch(MicrobatchIndex(index), ordered[rank][2], ordered[rank][0])
        for index, rank in enumerate(ranks)
    )


def routes_of(
    microbatches: Iterable[Microbatch], stages: Sequence[Stage]
) -> dict[SampleId, tuple[PeerId, ...]]:
    """The peers that each sample passes, first stage to last."""
    return {
        sample: tuple(stage.peers[batch.replica_at(i)] for i, stage in enumerate(stages))
        for batch in microbatches
        for sample in batch.samples
    }


def plan_again(
    before: OpenStep,
    stages: Sequence[Stage],
    done: Mapping[PeerId, frozenset[MicrobatchIndex]],
    seconds: Seconds,
) -> tuple[Microbatch, ...]:
    """The microbatches of a step that was planned before, on the way that costs the least now.

    At each stage a microbatch stays with the peer that is done with it. The others are divided by
    speed again; as many of them as this allows stay with the peer they were to pass.

    Args:
        before: the step as it was planned.
        stages: the pipeline by now; the same stages, other peers.
        done: what peers say they are done with.
        seconds: how fast peers are.
    """
    planned = before.microbatches
    accepted = [_accepted(stage, done, len(planned)) for stage in stages]
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


def _accepted(
    stage: Stage, done: Mapping[PeerId, frozenset[MicrobatchIndex]], num_microbatches: int
) -> dict[MicrobatchIndex, int]:
    """Microbatches that are done at a stage, and at which replica of it.

    Where two say so of one, because one of them was thought dead for a while, one of the two has
    to begin anew: a sum cannot be taken apart.
    """
    accepted: dict[MicrobatchIndex, int] = {}
    claims = [(replica, done.get(peer, frozenset())) for replica, peer in enumerate(stage.peers)]
    for replica, claimed in sorted(claims, key=lambda claim: -len(claim[1])):
        is_known = all(index < num_microbatches for index in claimed)
        if is_known and not claimed & accepted.keys():
            accepted.update(dict.fromkeys(claimed, replica))
    return accepted


def _kept_routes(
    before: OpenStep,
    stage_index: int,
    stage: Stage,
    accepted: dict[MicrobatchIndex, int],
    seconds: Seconds,
) -> list[int]:
    """The replica of each microbatch at one stage."""
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


def _room(count: int, stages: Sequence[Stage], seconds: Seconds) -> list[Counter[int]]:
    return [Counter(_shares(count, stage, seconds)) for stage in stages]


def _cut(samples: Sequence[SampleId], size: int) -> list[tuple[SampleId, ...]]:
    return [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]


def _place(seed: int, sample: SampleId) -> bytes:
    return digest_of(f"place of {sample} by {seed}".encode())


def _shares(num_microbatches: int, stage: Stage, seconds: Seconds) -> list[int]:
    """The replica of each microbatch, replicas rising: each has what it computes in equal time."""
    taken = _seconds_each(stage, seconds)
    counts = [0] * len(stage.peers)
    for _ in range(num_microbatches):
        soonest = min(
            range(len(counts)), key=lambda replica: (counts[replica] + 1) * taken[replica]
        )
        counts[soonest] += 1
    return [replica for replica, count in enumerate(counts) for _ in range(count)]


def _seconds_each(stage: Stage, seconds: Seconds) -> list[float]:
    """Seconds a microbatch of each replica; a newcomer counts as fast as the others."""
    known = {peer: expected_s(seconds[peer]) for peer in stage.peers if seconds.get(peer)}
    usual = statistics.median(known.values()) if known else 1.0
    return [max(known.get(peer, usual), math.ulp(1.0)) for peer in stage.peers]


def _interleaved(count: int, lanes: int) -> list[int]:
    """0 to count - 1 so that neighbours are of different lanes, and all replicas start at once."""
    size = -(-count // lanes)
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [rank for rank in chain.from_iterable(zip_longest(*parts)) if rank is not None]
