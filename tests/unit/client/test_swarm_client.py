"""A client calls a real coordinator over connections that a script breaks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm_ft.client.demo_input import DemoInput
from swarm_ft.client.job import Job, prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs
from swarm_ft.client.swarm import MAX_RESUBMITS, SwarmClient
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import Busy, NotFound, RunMismatch, Unavailable
from swarm_ft.identity.roles import Role
from swarm_ft.ids import RunId
from swarm_ft.protocol.spec.run_spec import LrSchedule, TrainOptions
from swarm_ft.transport.base import Method
from swarm_ft.transport.methods import SUBMIT
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.faults import FaultyTransport
from tests.doubles.memory_transport import MemoryTransport


@pytest.fixture(scope="module")
def job(sample: DemoInput, tmp_path_factory: pytest.TempPathFactory) -> Job:
    train = TrainOptions(
        batch_size=4,
        seq_length=64,
        learning_rate=1e-3,
        lr_schedule=LrSchedule.CONSTANT,
        seed=0,
        forward_codec="none",
        backward_codec="none",
        key_codec="fp16",
    )
    options = JobOptions(
        model=sample.model_dir,
        dataset=sample.eval_file,
        evaluation=EvalOptions(max_eval_samples=1),
        steps=2,
        train=train,
        outputs=Outputs(out=tmp_path_factory.mktemp("out") / "tuned"),
    )
    return prepare_job(options)


@asynccontextmanager
async def swarm(**cuts: Any) -> AsyncIterator[tuple[SwarmClient, FaultyTransport]]:
    """A coordinator, a client, and the script of their connections."""
    clock, journal = ManualClock(), Journal(":memory:")
    transport = FaultyTransport(MemoryTransport(), **cuts)
    service = CoordinatorService(journal, clock)
    server = await transport.serve("coordinator", 0, service.handlers())
    directory = StaticDirectory(Board(), clock)
    await directory.announce(Role.COORDINATOR, "coordinator", server.endpoint)
    try:
        yield SwarmClient(directory, transport), transport
    finally:
        await server.stop()
        journal.close()


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.client.swarm.RETRY_S", 0.0)
    monkeypatch.setattr("swarm_ft.client.swarm.PART_BYTES", 1)  # a sample a message


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param({"cut_receives": {SUBMIT: [1]}}, id="the answer is lost"),
        pytest.param({"cut_sends": {SUBMIT: [1]}}, id="the header is lost"),
        pytest.param({"cut_sends": {SUBMIT: [3]}}, id="half of the data is lost"),
        pytest.param({"cut_receives": {SUBMIT: [1, 2]}}, id="two answers are lost"),
    ],
)
async def test_a_job_whose_connection_breaks_becomes_one_run(
    job: Job, cuts: dict[str, dict[Method[Any, Any], list[int]]]
) -> None:
    troubles: list[str] = []
    async with swarm(**cuts) as (client, transport):
        status = await client.submit(job.spec, job.samples, on_trouble=troubles.append)
        (run,) = (await client.status()).runs
    assert run.run_id == status.run_id
    assert transport.num_cuts > 0
    assert len(troubles) == 1
    assert troubles[0].startswith("submitting the job again: ")


async def test_an_answer_that_never_comes_is_asked_for_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.client.swarm.ANSWER_TIMEOUT_S", 0.05)
    gave_up = asyncio.Event()  # no answer comes before

    troubles: list[str] = []

    def on_trouble(trouble: str) -> None:
        troubles.append(trouble)
        monkeypatch.setattr("swarm_ft.client.swarm.ANSWER_TIMEOUT_S", 60.0)
        gave_up.set()

    async with swarm(waits={SUBMIT: gave_up.wait}) as (client, _):
        await client.submit(job.spec, job.samples, on_trouble=on_trouble)
        assert len((await client.status()).runs) == 1
    (trouble,) = troubles
    assert "did not answer the submission within 0.05 s" in trouble


async def test_two_jobs_are_two_runs(job: Job) -> None:
    async with swarm() as (client, _):
        first = await client.submit(job.spec, job.samples)
        second = await client.submit(job.spec, job.samples)
        assert [run.run_id for run in (await client.status()).runs] == [
            first.run_id,
            second.run_id,
        ]


async def test_all_pages_of_the_status_are_asked_for(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.watching.MAX_PAGE_RUNS", 1)
    async with swarm() as (client, _):
        submitted = [(await client.submit(job.spec, job.samples)).run_id for _ in range(3)]
        assert [run.run_id for run in (await client.status()).runs] == submitted


async def test_a_run_is_told_as_it_is_now(job: Job) -> None:
    async with swarm() as (client, _):
        only = await client.submit(job.spec, job.samples)
        assert (await client.run(only.run_id)).spec == job.spec
        assert (await client.run(None)).run_id == only.run_id
        with pytest.raises(NotFound, match="none is not known here, or not yours"):
            await client.run(RunId("none"))


async def test_a_name_that_another_job_has_is_refused(job: Job) -> None:
    async with swarm() as (client, _):
        await client.submit(job.spec, job.samples, run_id=RunId("mine"))
        with pytest.raises(RunMismatch):
            await client.submit(job.spec, job.samples[::-1], run_id=RunId("mine"))


async def test_a_connection_that_breaks_every_time_is_given_up(job: Job) -> None:
    always = range(1, MAX_RESUBMITS + 2)
    async with swarm(cut_sends={SUBMIT: always}) as (client, transport):
        with pytest.raises(Unavailable):
            await client.submit(job.spec, job.samples)
    assert transport.num_cuts == MAX_RESUBMITS + 1


async def test_a_busy_coordinator_is_asked_again_until_it_has_room(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy coordinator gets more tries than a lost connection: submissions take minutes."""
    monkeypatch.setattr("swarm_ft.coordinator.submission.MAX_SUBMISSIONS", 0)
    troubles: list[str] = []
    async with swarm() as (client, _):
        submitting = asyncio.create_task(
            client.submit(job.spec, job.samples, run_id=RunId("mine"), on_trouble=troubles.append)
        )
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not submitting.done()
        monkeypatch.setattr("swarm_ft.coordinator.submission.MAX_SUBMISSIONS", 1)
        assert (await submitting).run_id == "mine"
    assert troubles == [
        "submitting the job again: 0 jobs are being submitted just now; try again later"
    ]


async def test_a_coordinator_that_is_busy_for_too_long_is_given_up(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.submission.MAX_SUBMISSIONS", 0)
    monkeypatch.setattr("swarm_ft.client.swarm.RETRY_S", 1e-3)
    monkeypatch.setattr("swarm_ft.client.swarm.MAX_BUSY_REST_S", 1e-3)
    monkeypatch.setattr("swarm_ft.client.swarm.BUSY_TIMEOUT_S", 0.02)
    async with swarm() as (client, _):
        with pytest.raises(Busy):
            await client.submit(job.spec, job.samples)
