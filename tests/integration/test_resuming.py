"""A client that comes back with `--resume` finds its run, whose digests have another key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.job import prepare_job
from swarm_ft.client.options import JobOptions, Outputs
from swarm_ft.client.report import RunProgress
from swarm_ft.client.train import submit
from swarm_ft.errors import NotFound
from swarm_ft.ids import RunId
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainOptions
from tests.local_swarm import LocalSwarm
from tests.members import make_swarm


@pytest.fixture
def options(tmp_path: Path) -> JobOptions:
    sample = write_demo_input(
        tmp_path / "input", seed=1, num_layers=2, hidden_size=16, vocab_size=300
    )
    return JobOptions(
        model=sample.model_dir,
        dataset=sample.train_file,
        max_samples=8,
        outputs=Outputs(out=tmp_path / "out"),
        train=TrainOptions(seq_length=16),
    )


async def submitted(swarm: LocalSwarm, options: JobOptions) -> tuple[RunId, RunSpec]:
    """Submit like a client that was just started: it reads everything anew."""
    job = prepare_job(options)
    progress = RunProgress(job.spec.train, Console(quiet=True))
    run = await submit(swarm.client, job, options, progress, forecasts=False)
    assert run.spec == (await swarm.client.run(run.run_id)).spec
    return run.run_id, run.spec


@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_job_is_resumed_and_another_one_is_not(
    options: JobOptions, tmp_path: Path, has_keys: bool
) -> None:
    members = make_swarm() if has_keys else None
    async with LocalSwarm(tmp_path, (), members=members) as swarm:
        first = await submitted(swarm, options)
        second = await submitted(swarm, options)
        assert first[0] != second[0]
        assert first[1].model.block_digests != second[1].model.block_digests
        assert await submitted(swarm, replace(options, resume=True)) == second
        other = replace(options, resume=True, train=replace(options.train, seed=7))
        with pytest.raises(NotFound, match="no unfinished run of this model"):
            await submitted(swarm, other)
        name = swarm.client.name
        assert bool(name) is has_keys
        assert first[1].model.owner == name
