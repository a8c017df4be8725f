"""The matrix: one swarm, one quiet run, then cell after cell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from swarm_ft.client.job import Job
from swarm_ft.protocol.messages.client import RunEvent
from swarm_ft.protocol.spec.run_spec import Adapter
from tests.fault_matrix.cells import Cell, Role
from tests.fault_matrix.homes import AWAY_S, Homes
from tests.fault_matrix.job import Material, make_job, make_material
from tests.fault_matrix.swarm import TWO_OF_EACH, Swarm
from tests.fault_matrix.timeline import Timeline
from tests.fault_matrix.trial import STEPS_WITH_NEWCOMER, Outcome, Trial, spec_of, watch
from tests.fault_matrix.verdict import losses_of

QUIET_TIMEOUT_S = 300.0


async def run_matrix(
    cells: Sequence[Cell],
    work_dir: Path,
    away_s: float = AWAY_S,
    adapter: Adapter = Adapter.NONE,
) -> AsyncGenerator[Outcome, None]:
    """Outcomes, one after the other, in the order of the cells; those of homes are the last.

    A trial that did not come out well leaves its swarm; the next one gets a new one.
    """
    material = make_material(work_dir, adapter)
    others = [cell for cell in cells if cell.role is not Role.HOME]
    async for outcome in _of_processes(others, work_dir, material):
        yield outcome
    homes = Homes(work_dir / "homes", away_s)
    for cell in (cell for cell in cells if cell.role is Role.HOME):
        yield await asyncio.to_thread(homes.outcome, cell)


async def _of_processes(
    remaining: list[Cell], work_dir: Path, material: Material
) -> AsyncGenerator[Outcome, None]:
    job, quiet, number = make_job(material, work_dir), list[float](), 0
    while remaining:
        swarm = Swarm(work_dir / f"swarm-{number}", material)
        number += 1
        try:
            await swarm.open()
            quiet = quiet or await quiet_losses(swarm, job)
            while remaining:
                outcome = await Trial(swarm, job, remaining.pop(0), quiet).outcome()
                yield outcome
                if outcome.problem:
                    break
        finally:
            await swarm.close()


async def quiet_losses(swarm: Swarm, job: Job) -> list[float]:
    """Return the losses of the longest run of any trial, without faults."""
    async with asyncio.timeout(QUIET_TIMEOUT_S):
        await swarm.refill(TWO_OF_EACH)
        await swarm.all_joined()
        status = await swarm.client.submit(spec_of(job, STEPS_WITH_NEWCOMER), job.samples)
        events: Timeline[RunEvent] = Timeline()
        await watch(swarm, status.run_id, events)
        await swarm.client.acknowledge_result(status.run_id)
    return list(losses_of(entry.item for entry in events.entries))
