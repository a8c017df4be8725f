"""Forecasts of jobs before they are submitted."""

from __future__ import annotations

import asyncio

from swarm_ft.client.forecast import Forecast, placed_forecast
from swarm_ft.client.options import PlanOptions
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import Unavailable
from swarm_ft.protocol.messages.capacity import Placed
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.adapters import with_adapters
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.rehearsal import rehearse_stage
from swarm_ft.stage.routers import check_routers


def read_model(options: PlanOptions) -> tuple[Checkpoint, RunSpec]:
    """Open a job's model and build the spec of its run, without any connection.

    Raises:
        BadInput: The model or an option is not usable.
    """
    train = options.train_spec()
    checkpoint = open_checkpoint(options.model, train)
    check_routers(checkpoint.config, train)
    spec = RunSpec(model=checkpoint.describe(), train=train)
    return checkpoint, with_adapters(checkpoint, spec)


async def forecast_in(
    swarm: SwarmClient, checkpoint: Checkpoint, spec: RunSpec
) -> tuple[Forecast, Placed]:
    """Forecast a run on the swarm's present peers.

    Returns:
        The forecast, and its placement.

    Raises:
        Unavailable: No peers can host the run now, or the coordinator does not answer.
    """
    placed = await swarm.place(spec)
    if not placed.peers:
        raise Unavailable(f"no peers can host this job now: {placed.reason}")
    layers = {peer.layers for peer in placed.peers}
    stages = [asyncio.to_thread(rehearse_stage, checkpoint, spec, one) for one in layers]
    memory = {one: await stage for one, stage in zip(layers, stages, strict=True)}
    return placed_forecast(spec, placed, memory), placed
