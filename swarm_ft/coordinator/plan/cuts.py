"""Where to cut a model among peers in a row, so that the slowest is as fast as can be. Pure."""

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
"""Of a model that has more all ways to cut it are not looked at."""

Costs = NDArray[np.float64]
"""Of blocks i to j - 1, at [i, j]; infinite where they may not be."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A stage whose layers are yet to be chosen.

    Attributes:
        flops_per_s: of its peers together.
        memory_bytes: that each of them lends.
        inside: the layers that they may host.
        may_be_end: whether these may be the first, or the last.
    """

    flops_per_s: float
    memory_bytes: float
    inside: LayerRange
    may_be_end: bool


class Model:
    """What each range of a model's blocks computes of a microbatch, and holds.

    Args:
        spec: of the run.

    Attributes:
        flops: of each range.
        held_bytes: by its weights, gradients and optimizer.
    """

    def __init__(self, spec: RunSpec) -> None:
        blocks = range(spec.model.num_blocks)
        each = [LayerRange(block, block + 1) for block in blocks]
        whole = spec.model.layers
        self.flops = _of_ranges([stage_flops(spec, layers) for layers in each])
        held = [spec.held_bytes(layers) for layers in each]
        # What all blocks share is held once a stage, whatever it has of them.
        surplus = sum(held) - spec.held_bytes(whole)
        shared = surplus / (len(held) - 1) if len(held) > 1 else 0.0
        self.held_bytes = _of_ranges([one - shared for one in held]) + shared

    def cut(self, seats: Sequence[Seat]) -> tuple[LayerRange, ...]:
        """Layers of each seat, first to last; none if they cannot have all of them."""
        times = [self._times(seat) for seat in seats]
        slowest_s = _chosen(times, np.maximum)[0]
        if math.isinf(slowest_s):
            return ()
        # Of all cuts that are as fast, the most even one.
        even = [np.where(each <= slowest_s, each**2, np.inf) for each in times]
        edges = _chosen(even, np.add)[1]
        return tuple(LayerRange(start, stop) for start, stop in pairwise(edges))

    def _times(self, seat: Seat) -> Costs:
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
    """The least that ranges in a row cost, one of each seat, and the edges between them."""
    size = costs[0].shape[0]
    best = np.full(size, np.inf)
    best[0] = 0.0
    came: list[NDArray[np.intp]] = []
    for each in costs:
        joined = join(best[:, None], each)
        came.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    edges = [size - 1]
    for start in reversed(came):
        edges.insert(0, int(start[edges[0]]))
    return float(best[-1]), edges
