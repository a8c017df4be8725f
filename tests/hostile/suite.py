"""Cell after cell, on one swarm as long as that stands; what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from random import Random

from tests.hostile import attacks, table
from tests.hostile.cells import Outcome
from tests.hostile.scene import Scene, opened

CELL_S = 150.0
"""How long a cell may take, on a machine that others keep busy too."""
HONEST_RUNS = "runs-beside-as-the-quiet-one"
"""The cell of all honest runs together."""

Change = Callable[[], AbstractContextManager[object]]


def names() -> tuple[str, ...]:
    """All cells that need no processes of their own, in their order."""
    return (*table.names(), *attacks.ATTACKS)


async def one(scene: Scene, name: str) -> Outcome:
    """Run a cell and return its outcome."""
    began_s = time.monotonic()
    problem = ""
    try:
        async with asyncio.timeout(CELL_S):
            if name in attacks.ATTACKS:
                await attacks.run_attack(scene, name)
            else:
                await table.attack(scene, name)
        scene.check_whole()
    except TimeoutError:
        problem = f"not over after {CELL_S:.0f} s"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's
        problem = f"{type(error).__name__}: {error}"
    return Outcome(cell=name, problem=problem, seconds=time.monotonic() - began_s)


async def run_cells(cells: Sequence[str], work_dir: Path) -> AsyncGenerator[Outcome, None]:
    """Outcomes in the order of the cells, then that of the runs beside them.

    A cell that breaks its swarm leaves it; the next one gets a new one.
    """
    remaining, number, began_s = list(cells), 0, time.monotonic()
    num_runs, problem = 0, ""
    while remaining:
        async with scene_in(work_dir / f"scene-{number}") as scene:
            number += 1
            while remaining and scene.is_whole:
                yield await one(scene, remaining.pop(0))
            if scene.is_whole:
                try:
                    num_runs += await scene.honest_client.concluded()
                except Exception as error:  # noqa: BLE001 - it is the runs' outcome
                    problem = f"{type(error).__name__}: {error}"
            else:
                problem = problem or "a swarm broke, see above"
    if not problem and num_runs < 2:
        problem = "no run ended beside the attacks"
    seconds = time.monotonic() - began_s
    yield Outcome(cell=HONEST_RUNS, problem=problem, seconds=seconds)


@asynccontextmanager
async def scene_in(work_dir: Path) -> AsyncIterator[Scene]:
    """A swarm with files of its own."""
    async with opened(work_dir) as scene:
        yield scene


async def attack_for(
    minutes: float, cells: Sequence[str], work_dir: Path, seed: int = 0
) -> AsyncGenerator[Outcome, None]:
    """All kinds of attacks in drawn order, again and again, beside honest runs; then these."""
    rng, until_s = Random(seed), time.monotonic() + 60 * minutes
    num_cells = 0

    def drawn() -> list[str]:
        return rng.sample(cells, len(cells))

    async with scene_in(work_dir / "scene") as scene:
        began_s, remaining, problem = time.monotonic(), drawn(), ""
        while time.monotonic() < until_s and scene.is_whole:
            remaining = remaining or drawn()
            yield await one(scene, remaining.pop())
            num_cells += 1
        try:
            await scene.honest_client.concluded()
        except Exception as error:  # noqa: BLE001 - it is the runs' outcome
            problem = f"{type(error).__name__}: {error}"
        yield Outcome(cell=HONEST_RUNS, problem=problem, seconds=time.monotonic() - began_s)


async def first_red(scene: Scene, cells: Sequence[str], change: Change = nullcontext) -> str:
    """The first cell that goes red under a change of the swarm; empty if none does."""
    with change():
        for name in cells:
            outcome = await one(scene, name)
            if outcome.problem:
                return name
    return ""
