"""A coordinator's limits, over real gRPC and TLS, and the refusals beyond them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import PEER_BURST, CoordinatorService
from swarm_ft.errors import Busy, OutOfTurn, OverQuota, Unavailable
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.protocol.messages.client import SampleTokens, SubmitHeader
from swarm_ft.protocol.messages.control import PeerHello
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import JOIN, SUBMIT
from tests.doubles.directory import Board, StaticDirectory
from tests.integration.conftest import Job, MakeJob
from tests.members import Swarm, make_swarm


@pytest.fixture
def swarm() -> Swarm:
    return make_swarm()


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job()


def over(credentials: Credentials) -> GrpcTransport:
    return GrpcTransport(GrpcOptions(credentials=credentials))


@asynccontextmanager
async def coordinator(
    swarm: Swarm, folder: Path, quotas: Quotas | None = None
) -> AsyncIterator[StaticDirectory]:
    journal = Journal(str(folder / "journal.db"))
    directory = StaticDirectory(Board(), SystemClock())
    service = CoordinatorService(journal, SystemClock(), quotas=quotas or Quotas())
    server = await over(swarm.coordinator()).serve("127.0.0.1", 0, service.handlers())
    await directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
    try:
        yield directory
    finally:
        await server.stop()
        journal.close()


async def address(directory: StaticDirectory) -> str:
    return (await directory.find(Role.COORDINATOR))[COORDINATOR_NAME]


async def test_a_client_has_so_many_jobs_in_the_queue_and_takes_none_from_another(
    swarm: Swarm, job: Job, tmp_path: Path
) -> None:
    async with coordinator(swarm, tmp_path) as directory:
        mine, theirs = (SwarmClient(directory, over(swarm.member(Role.CLIENT))) for _ in range(2))
        first, *_ = [(await mine.submit(job.spec, job.samples)).run_id for _ in range(4)]
        with pytest.raises(OverQuota, match=r"4 jobs of client .* are queued, 4 are allowed"):
            await mine.submit(job.spec, job.samples)
        again = await mine.submit(job.spec, job.samples, run_id=first)
        assert again.run_id == first  # which is no second run
        await theirs.submit(job.spec, job.samples)
        await mine.cancel(first)
        await mine.submit(job.spec, job.samples)


async def test_a_client_keeps_so_many_tokens_at_the_coordinator(
    swarm: Swarm, job: Job, tmp_path: Path
) -> None:
    quotas = Quotas(client_bytes=2 * job.spec.train.data_bytes)
    async with coordinator(swarm, tmp_path, quotas) as directory:
        client = SwarmClient(directory, over(swarm.member(Role.CLIENT)))
        for _ in range(2):
            await client.submit(job.spec, job.samples)
        with pytest.raises(OverQuota, match="fetch or cancel one"):
            await client.submit(job.spec, job.samples)


async def test_an_upload_that_trickles_makes_room(
    swarm: Swarm, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.submission.PART_TIMEOUT_S", 2.0)
    async with coordinator(swarm, tmp_path, Quotas(bytes_per_s=1e9)) as directory:
        transport = over(swarm.member(Role.CLIENT))
        channel = transport.connect(await address(directory), COORDINATOR_NAME)
        stream = channel.open(SUBMIT)
        spec = job.spec
        await stream.send(SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId("r")))
        await stream.send(SampleTokens(sample=SampleId(0), token_ids=job.samples[0]))
        with pytest.raises(Unavailable, match=r"is 2 s behind the 1e\+09 bytes a second"):
            await stream.receive()
        await channel.close()


JOINED_TOO_OFTEN = r"joins too often: expected at most 8 at once and 4 a second; try again in \d"


async def first_refusal(joins: Iterable[asyncio.Task[None]]) -> None:
    """Raise the first end of a join that is not for another one's sake."""
    for ended in asyncio.as_completed(joins):
        with suppress(OutOfTurn):
            await ended


async def test_a_key_joins_so_often_and_is_told_when_to_try_again(
    swarm: Swarm, tmp_path: Path
) -> None:
    async with coordinator(swarm, tmp_path) as directory:
        credentials = swarm.member(Role.PEER)
        hello = PeerHello(
            peer_id=PeerId(key_name(credentials.certificate)),
            layers=None,
            memory_bytes=1,
            endpoint="127.0.0.1:1",
        )
        channel = over(credentials).connect(await address(directory), COORDINATOR_NAME)

        async def join() -> None:
            stream = channel.open(JOIN)
            await stream.send(hello)
            while await stream.receive() is not None:
                pass

        # All but the last to come in are replaced, or refused since they come too often.
        joins = [asyncio.create_task(join()) for _ in range(7 * PEER_BURST)]
        with pytest.raises(Busy, match=JOINED_TOO_OFTEN):
            await first_refusal(joins)
        for task in joins:
            task.cancel()
        await channel.close()


async def test_uploads_of_one_client_leave_room_for_others(
    swarm: Swarm, job: Job, tmp_path: Path
) -> None:
    async with coordinator(swarm, tmp_path) as directory:
        mine, theirs = swarm.member(Role.CLIENT), swarm.member(Role.CLIENT)
        channel = over(mine).connect(await address(directory), COORDINATOR_NAME)
        header = SubmitHeader(spec=job.spec, spec_digest=job.spec.digest(), run_id=RunId("half"))
        streams = [channel.open(SUBMIT) for _ in range(3)]
        for number, stream in enumerate(streams):
            await stream.send(replace(header, run_id=RunId(f"half-{number}")))
        first = [asyncio.create_task(stream.receive()) for stream in streams]
        done, rest = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        assert len(rest) == 2
        with pytest.raises(Busy, match="2 jobs are being submitted just now"):
            await done.pop()
        await SwarmClient(directory, over(theirs)).submit(job.spec, job.samples)
        for task in rest:
            task.cancel()
        await channel.close()
