"""Which microbatch passes which replica of each stage. Pure.

Each sample has a place in [0, 1) that is drawn once, from the seed. A step's samples are cut into
microbatches in the order of their places, and each stage divides that order among its replicas
by their speed. So load is even in every step, and a sample meets the same replicas, and with
them its buffers, at nearly every visit: only those near a division may change sides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest

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


def _in_order_of_places(train: TrainSpec, step: StepNumber) -> list[tuple[SampleId, ...]]:
    samples = sorted(step_samples(train, step), key=lambda sample: _place(train.seed, sample))
    size = train.micro_batch_size
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
