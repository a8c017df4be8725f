"""Cuts of a model among peers in a row, such that the slowest is as fast as possible. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec

MAX_CUT_BLOCKS = 512
"""Most blocks of a model whose cuts are searched."""

Costs = NDArray[np.float64]
"""Costs of blocks i to j - 1, at [i, j]; infinite where they are not allowed."""


@dataclass(frozen=True, slots=True)
class StageSeat:
    """A stage whose layers are yet to be chosen.

    Attributes:
        flops_per_s: Operations per second of its peers together.
        memory_bytes: Memory that each of them lends.
        inside: Layers that they may host.
        may_be_end: Whether it may be the first or the last stage.
    """

    flops_per_s: float
    memory_bytes: float
    inside: LayerRange
    may_be_end: bool


class Model:
    """Operations and memory of each range of a model's blocks.

    Args:
        spec: RunSpec of the run.

    Attributes:
        flops: Operations of each range per microbatch.
        held_bytes: Bytes of each range's weights, gradients and optimizer state.
    """

    def __init__(self, spec: RunSpec) -> None:
        blocks = range(spec.model.num_blocks)
        each = [LayerRange(block, block + 1) for block in blocks]
        whole = spec.model.layers
        self.flops = _of_ranges([stage_flops(spec, layers) for layers in each])
        each_bytes = [spec.memory_bytes(layers) for layers in each]
        # Weights that all blocks share count once in each stage, however many blocks it has.
        surplus = sum(each_bytes) - spec.memory_bytes(whole)
        shared = surplus / (len(each_bytes) - 1) if len(each_bytes) > 1 else 0.0
        self.held_bytes = _of_ranges([one - shared for one in each_bytes]) + shared

    def cut(self, seats: Sequence[StageSeat]) -> tuple[LayerRange, ...]:
        """Return the layers of each seat, first to last; empty if no cut gives every seat some."""
        times = [self._times(seat) for seat in seats]
        slowest_s = _chosen(times, np.maximum)[0]
        if math.isinf(slowest_s):
            return ()
        # Choose the most even of all cuts that are as fast.
        even = [np.where(each <= slowest_s, each**2, np.inf) for each in times]
        edges = _chosen(even, np.add)[1]
        return tuple(LayerRange(start, stop) for start, stop in pairwise(edges))

    def _times(self, seat: StageSeat) -> Costs:
        times = np.where(self.held_bytes <= seat.memory_bytes, self.flops, np.inf)
        times = times / seat.flops_per_s
        times[: seat.inside.start] = np.inf
        times[:, seat.inside.stop + 1 :] = np.inf
        if not seat.may_be_end:
            times[0] = times[:, -1] = np.inf
        return times


def _of_ranges(each: Sequence[float]) -> Costs:
    sums = np.concatenate([[0.0], np.cumsum(each)])
    costs: Costs = sums[None, :] - sums[:, None]
    costs[np.tril_indices(len(sums))] = np.inf
    return costs


def _chosen(costs: Sequence[Costs], join: np.ufunc) -> tuple[float, list[int]]:
    """Return the least cost of adjoining ranges, one for each seat, and the edges between them."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = 0.0
    starts: list[NDArray[np.intp]] = []
    for each in costs:
        joined = join(best[:, None], each)
        starts.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    edges = [size - 1]
    for start in reversed(starts):
        edges.insert(0, int(start[edges[0]]))
    return float(best[-1]), edges
