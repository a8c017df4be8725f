"""Tied embeddings stay tied: first and last stage add up their gradients, each for itself.

It is an all-reduce of two members, the first stage and the last, uncompressed: both end with
first + last in float32, in that order, so both apply the same update to the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Executor

from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.peer.context import run_in
from swarm_ft.peer.reduce.all_reduce import GradientReducer
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.stage.base import Engine


def tied_pairs(first: Stage, last: Stage) -> tuple[tuple[PeerId, PeerId], ...]:
    """Who of the first stage exchanges with whom of the last; every replica is in one pair or more.

    All replicas of a stage hold the same sum by then, so whichever is asked gives the same bits.
    """
    count = max(len(first.peers), len(last.peers))
    return tuple(
        (first.peers[i % len(first.peers)], last.peers[i % len(last.peers)]) for i in range(count)
    )


async def synchronise(
    pairs: Collection[GradientReducer], step: StepNumber, engine: Engine, compute: Executor
) -> None:
    """Exchange the step's gradients of the tied embeddings; the engine then has their sum.

    Args:
        pairs: that this peer is in, at least one.
        step: its number.
        engine: of the first or of the last stage, its gradients summed over the replicas.
        compute: the thread in which it lives.

    Raises:
        ExceptionGroup: of NonFinite, if this stage's gradient is infinite, NaN or as good as that.
    """
    own = (await run_in(compute, engine.tied_gradient)).detach().cpu().float()
    async with asyncio.TaskGroup() as group:
        flat = own.reshape(-1)
        sums = [group.create_task(pair.reduce(step, flat)) for pair in pairs]
    total = sums[0].result().reshape(own.shape)  # all have the same bits
    await run_in(compute, engine.set_tied_gradient, total)
