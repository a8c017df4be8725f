"""Which microbatch passes which replica of each stage. Pure.

Each sample has a place in [0, 1) that is drawn once, from the seed. A step's samples are cut into
microbatches in the order of their places, and each stage divides that order among its replicas
by their speed. So load is even in every step, and a sample meets the same replicas, and with
them its buffers, at nearly every visit: only those near a division may change sides.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

from swarm_ft.coordinator.state import OpenStep
from swarm_ft.ids import MicrobatchIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.coordinator_messages import Stage
from swarm_ft.protocol.digest import digest_of
from swarm_ft.protocol.run_spec import TrainSpec
from swarm_ft.protocol.training_plan import Microbatch, step_microbatches, step_samples

MANY_SPREADS = 4.0
"""Median absolute deviations; of normal noise, less than one in a hundred lies so far out."""
LEAST_SPREAD = 0.1
"""Of the median: a peer that was steady so far is not held to less."""

Seconds = Mapping[PeerId, Sequence[float]]
"""Of peers, how long a microbatch took to compute, lately."""


def plan_microbatches(
    train: TrainSpec, step: StepNumber, stages: Sequence[Stage], seconds: Seconds
) -> tuple[Microbatch, ...]:
    """The step's microbatches with their routes; without replicas, in the order of the data."""
    if all(len(stage.peers) == 1 for stage in stages):
        return step_microbatches(train, step)
    groups = _in_order_of_places(train, step)
    shares = [_shares(len(groups), stage, seconds) for stage in stages]
    ranks = _interleaved(len(groups), max(len(stage.peers) for stage in stages))
    return tuple(
        Microbatch(
            MicrobatchIndex(index), groups[rank], tuple(replicas[rank] for replicas in shares)
        )
        for index, rank in enumerate(ranks)
    )


def plan_again(
    before: OpenStep,
    stages: Sequence[Stage],
    done: Mapping[PeerId, frozenset[MicrobatchIndex]],
    seconds: Seconds,
) -> tuple[Microbatch, ...]:
    """The microbatches of a step that was planned before, on the way that costs the least now.

    At each stage a microbatch stays with the peer that is done with it, or else with the one it
    was to pass; those whose peer is gone go to whoever has the least to do.

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
    hosts = [before.host(batch, stage_index) for batch in before.microbatches]
    kept: dict[int, int] = {
        index: stage.peers.index(host) for index, host in enumerate(hosts) if host in stage.peers
    }
    kept.update((int(index), replica) for index, replica in accepted.items())
    to_do = Counter(replica for index, replica in kept.items() if index not in accepted)
    taken = _seconds_each(stage, seconds)
    for index in range(len(hosts)):
        if index not in kept:
            kept[index] = _soonest(to_do, taken)
            to_do[kept[index]] += 1
    return [kept[index] for index in range(len(hosts))]


def _soonest(to_do: Mapping[int, int], taken: Sequence[float]) -> int:
    """The replica that would be done first with one microbatch more."""
    return min(range(len(taken)), key=lambda replica: (to_do[replica] + 1) * taken[replica])


def _in_order_of_places(train: TrainSpec, step: StepNumber) -> list[tuple[SampleId, ...]]:
    samples = sorted(step_samples(train, step), key=lambda sample: _place(train.seed, sample))
    size = train.micro_batch_size
    return [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]


def _place(seed: int, sample: SampleId) -> bytes:
    return digest_of(f"place of {sample} by {seed}".encode())


def _shares(num_microbatches: int, stage: Stage, seconds: Seconds) -> list[int]:
    """The replica of each microbatch, replicas rising: each has what it computes in equal time."""
    taken = _seconds_each(stage, seconds)
    counts: Counter[int] = Counter()
    for _ in range(num_microbatches):
        counts[_soonest(counts, taken)] += 1
    return [replica for replica in range(len(taken)) for _ in range(counts[replica])]


def _seconds_each(stage: Stage, seconds: Seconds) -> list[float]:
    """Seconds a microbatch of each replica; a newcomer counts as fast as the others."""
    known = {peer: _expected(seconds[peer]) for peer in stage.peers if seconds.get(peer)}
    usual = statistics.median(known.values()) if known else 1.0
    return [max(known.get(peer, usual), math.ulp(1.0)) for peer in stage.peers]


def _expected(measured: Sequence[float]) -> float:
    """What the next microbatch will take: the median, or the last one if it is out of all bounds.

    So noise does not move microbatches about, and a peer that slows down is relieved at once.
    """
    usual = statistics.median(measured)
    spread = statistics.median(abs(seconds - usual) for seconds in measured)
    bound = MANY_SPREADS * max(spread, LEAST_SPREAD * usual)
    return measured[-1] if abs(measured[-1] - usual) > bound else usual


def _interleaved(count: int, lanes: int) -> list[int]:
    """0 to count - 1 so that neighbours are of different lanes, and all replicas start at once."""
    size = -(-count // lanes)
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [rank for rank in chain.from_iterable(zip_longest(*parts)) if rank is not None]
