"""A result whose peers die before a client has it is made again, and the client gets it."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.job import Job
from swarm_ft.client.options import Outputs
from swarm_ft.client.report import RunProgress
from swarm_ft.client.train import WatchedRun
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.integration.conftest import MakeJob
from tests.local_swarm import LocalSwarm


class RecordedProgress(RunProgress):
    """Progress that records its lines and can be awaited."""

    def __init__(self, train: TrainSpec) -> None:
        super().__init__(train)
        self.lines: list[str] = []
        self.is_reported = asyncio.Event()

    def message(self, text: str) -> None:
        self.lines.append(text)
        self.is_reported.set()

    async def until(self, words: str) -> None:
        while not any(words in line for line in self.lines):
            self.is_reported.clear()
            await self.is_reported.wait()


@pytest.fixture
def job(make_job: MakeJob, tmp_path: Path) -> Job:
    """A run of a model that has a tokenizer, as a client's result has one."""
    made = write_demo_input(
        tmp_path / "input", seed=0, num_layers=2, hidden_size=32, vocab_size=300
    )
    checkpoint = open_checkpoint(made.model_dir)
    plain = make_job(num_samples=4, num_steps=3, save_steps=2)
    spec = RunSpec(model=checkpoint.describe(), train=plain.spec.train)
    return Job(spec=spec, checkpoint=checkpoint, samples=plain.samples)


def watched(swarm: LocalSwarm, run: RunStatus, job: Job, progress: RunProgress) -> WatchedRun:
    return WatchedRun(
        client=swarm.client,
        run_id=run.run_id,
        checkpoint=job.checkpoint,
        progress=progress,
        spec=job.spec,
    )


def weights_in(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


async def test_a_coordinator_that_was_restarted_hears_again_who_gives_the_result(
    job: Job, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, ["0-1", "1-2", "1-2"]) as swarm:
        first = (await swarm.train(job.spec, job.samples))[-1]
        assert isinstance(first, RunStatus)
        assert {result.peer_id for result in first.results} == {"peer-0", "peer-1", "peer-2"}
        assert len({result.file for result in first.results}) == 2, "replicas have the same bytes"
        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        await swarm.kill_peer(PeerId("peer-2"))
        progress, out = RecordedProgress(job.spec.train), tmp_path / "out"
        await watched(swarm, first, job, progress).fetch(Outputs(out=out))
        (run,) = (await swarm.client.status()).runs
    assert run.phase is RunPhase.COLLECTED
    assert len(weights_in(out.glob("*.safetensors"))) > 0


async def test_a_client_whose_result_was_taken_along_gets_it_when_it_is_made_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalSwarm(tmp_path, ["0-1", "1-2"]) as swarm:
        first = (await swarm.train(job.spec, job.samples))[-1]
        assert isinstance(first, RunStatus)
        (tmp_path / "first").mkdir()
        expected = weights_in(await swarm.client.fetch_shards(first, tmp_path / "first"))
        await swarm.kill_peer(PeerId("peer-1"))
        progress, out = RecordedProgress(job.spec.train), tmp_path / "out"
        fetching = asyncio.create_task(watched(swarm, first, job, progress).fetch(Outputs(out=out)))
        await progress.until("layers 1-2 of the result: peer peer-1 does not answer")
        monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
        await progress.until("waiting: layers 1-2")
        await swarm.add_peer(PeerId("newcomer"), "1-2")
        await fetching
        (run,) = (await swarm.client.status()).runs
    assert run.phase is RunPhase.COLLECTED
    assert [known.step for known in progress.state.totals] == [0, 1, 2]
    made = weights_in(out.glob("*.safetensors"))
    assert made.keys() == expected.keys()
    assert all((made[name] == weight).all() for name, weight in expected.items())
