"""Many simulations, side by side in several processes, and what they showed together."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from tests.simulation.scenario import draw
from tests.simulation.simulate import Outcome, simulate


@dataclass(slots=True)
class Summary:
    """The sums over all seeds."""

    seeds: int = 0
    virtual_hours: float = 0.0
    events: int = 0
    commits: int = 0
    rollbacks: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    failed_seeds: list[int] = field(default_factory=list)

    def add(self, seed: int, outcome: Outcome) -> None:
        """One more seed."""
        self.seeds += 1
        self.virtual_hours += outcome.virtual_s / 3600
        self.events += outcome.num_events
        self.commits += outcome.num_commits
        self.rollbacks += outcome.num_rollbacks
        self.faults += outcome.faults
        if outcome.failures:
            self.failed_seeds.append(seed)


def outcomes(seeds: Sequence[int], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Every seed's outcome, as they come."""
    if jobs == 1:
        yield from map(_one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, settle) as pool:
        yield from pool.imap_unordered(_one, seeds, chunksize=5)


def settle() -> None:
    """Once a process: what is loaded now stays, and need not be looked through again."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def _one(seed: int) -> tuple[int, Outcome]:
    return seed, simulate(draw(seed))
