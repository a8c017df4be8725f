"""`swarm-ft top` beside a living swarm: the curve of its run, and the work of each peer."""

import asyncio
from io import StringIO
from pathlib import Path

from rich.console import Console

from swarm_ft.cli.top import TopData
from swarm_ft.cli.top_screen import View
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from swarm_ft.protocol.messages.events import EventKind
from tests.integration.conftest import MakeJob
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]


async def test_it_follows_a_run_and_draws_it(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_samples=8, num_steps=6)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        watched = TopData(swarm.client, View())
        await watched.fetch_status()
        async with watched.following():
            events = await swarm.train(job.spec, job.samples)
            while not _knows_all(watched):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        picture = watched.picture()
        (curve,) = picture.losses.values()
        assert curve == losses_in(events)

        late = TopData(swarm.client, View())
        await late.fetch_status()
        await late.fetch_history()
        assert list(late.picture().losses.values()) == [curve]
        console = Console(file=StringIO(), width=80, color_system=None)
        console.print(late.picture())
        drawn = console.file.getvalue() if isinstance(console.file, StringIO) else ""
        assert "step 6/6  100%" in drawn
        assert "peer-1" in drawn
        assert "all peers are ready, the run trains" in drawn


def _knows_all(watched: TopData) -> bool:
    picture = watched.picture()
    is_over = any(event.kind is EventKind.RUN_FINISHED for event in picture.events)
    return is_over and any(len(curve) == 6 for curve in picture.losses.values())


def losses_in(events: list[RunEvent]) -> list[float]:
    return [event.loss for event in events if isinstance(event, StepCommitted)]
