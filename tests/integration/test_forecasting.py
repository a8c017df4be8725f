"""A run is forecast by what its peers measured, and again by who comes back to it."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

from rich.console import Console

from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.job import prepare_job
from swarm_ft.client.options import JobOptions, Outputs
from swarm_ft.client.report import RunProgress
from swarm_ft.client.train import WatchedRun, attach_to, submit
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.spec.run_spec import TrainOptions
from tests.local_swarm import LocalSwarm

THIS_MACHINE = Machine(
    flops_per_s=1e10, up_bytes_per_s=1e9, down_bytes_per_s=1e9, cores=2.0, host="this machine"
)
LAYERS = {"a": "0-1", "b": "1-2"}


def options_for(folder: Path) -> JobOptions:
    sample = write_demo_input(
        folder / "input", seed=1, num_layers=2, hidden_size=16, vocab_size=300
    )
    return JobOptions(
        model=sample.model_dir,
        dataset=sample.train_file,
        max_samples=8,
        steps=2000,
        outputs=Outputs(out=folder / "out"),
        train=TrainOptions(seq_length=16, batch_size=4),
    )


async def test_a_run_that_is_found_again_has_a_forecast_that_its_steps_narrowed(
    tmp_path: Path,
) -> None:
    async with LocalSwarm(tmp_path, ()) as swarm:
        for name, layers in LAYERS.items():
            await swarm.add_peer(PeerId(name), layers, machine=THIS_MACHINE)
        await swarm.all_joined()
        run = await _submitted(swarm, options_for(tmp_path))
        first = run.forecast
        assert first is not None
        await _steps_made(swarm, run, 5)
        found = (await attach_to(swarm.client, run.run_id, None)).forecast
        assert found is not None
        assert (first.num_learned, found.num_learned) == (0, 1)
        assert found.seconds_range.width < first.seconds_range.width
        assert [stage.peers for stage in found.stages] == [("a",), ("b",)]
        together = "a and b share one machine, which computes for 2 of them at once"
        assert first.shared == (together,)
        assert found.shared == (together,), "a run is not beside itself"
        another = await swarm.client.place(run.spec)
        assert [one.num_runs for one in another.peers] == [0, 0], "they lend one stage each"
        assert another.starts_after_s > 0


async def _submitted(swarm: LocalSwarm, options: JobOptions) -> WatchedRun:
    job = prepare_job(options)
    return await submit(
        swarm.client, job, options, RunProgress(job.spec.train, Console(quiet=True))
    )


async def _steps_made(swarm: LocalSwarm, run: WatchedRun, count: int) -> None:
    async with aclosing(swarm.client.watch(run.run_id, lambda _trouble: None)) as events:
        async for event in events:
            if isinstance(event, StepCommitted) and event.step + 1 >= count:
                return
