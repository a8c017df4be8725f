"""A client's runs and their results are its own; what a stage holds is for its replicas."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import NotAllowed, NotFound, RunMismatch
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.net.transfer import offer, serve_chunk_list
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.transport.base import MessageStream, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import LIST_CHUNKS
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
async def coordinator(swarm: Swarm, folder: Path) -> AsyncIterator[StaticDirectory]:
    journal = Journal(str(folder / "journal.db"))
    directory = StaticDirectory(Board(), SystemClock())
    service = CoordinatorService(journal, SystemClock())
    server = await over(swarm.coordinator()).serve("127.0.0.1", 0, service.handlers())
    await directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
    try:
        yield directory
    finally:
        await server.stop()
        journal.close()


async def test_a_run_is_its_clients_alone(swarm: Swarm, job: Job, tmp_path: Path) -> None:
    mine, theirs = swarm.member(Role.CLIENT), swarm.member(Role.CLIENT)
    async with coordinator(swarm, tmp_path) as directory:
        owner, other = (SwarmClient(directory, over(identity)) for identity in (mine, theirs))
        run_id = (await owner.submit(job.spec, job.samples)).run_id
        for named in (run_id, None):
            with pytest.raises(NotFound):
                await other.cancel(named)
        with pytest.raises(NotFound, match="or not yours"):
            async for _ in other.watch(run_id, lambda _trouble: None):
                pass
        assert (await owner.status()).runs[0].phase is not RunPhase.CANCELLED
        status = await other.status()
        assert [(run.run_id, run.is_own) for run in status.runs] == [(run_id, False)]
        assert all(not stage.endpoint for stage in status.runs[0].assignments)
        assert job.spec.model.reference not in repr(status)
    async with coordinator(swarm, tmp_path) as directory:  # it is so after a restart
        owner, other = (SwarmClient(directory, over(identity)) for identity in (mine, theirs))
        with pytest.raises(NotFound):
            await other.cancel(run_id)
        ended = await owner.cancel(None)
        assert (ended.phase, ended.detail) == (RunPhase.CANCELLED, "cancelled by the run's owner")


async def test_a_run_is_shown_to_whom_its_owner_names(
    swarm: Swarm, job: Job, tmp_path: Path
) -> None:
    mine, friends, theirs = (swarm.member(Role.CLIENT) for _ in range(3))
    named = key_name(friends.certificate)
    spec = replace(job.spec, train=replace(job.spec.train, share_with=named))
    async with coordinator(swarm, tmp_path) as directory:
        owner, friend, other = (SwarmClient(directory, over(w)) for w in (mine, friends, theirs))
        run_id = (await owner.submit(spec, job.samples)).run_id
        async with aclosing(friend.watch(run_id, lambda _trouble: None)) as events:
            assert isinstance(await anext(events), RunStatus)
        with pytest.raises(NotFound):
            await friend.cancel(run_id)
        await friend.acknowledge_result(run_id)
        (run,) = (await friend.status()).runs
        assert (run.is_own, run.phase) == (True, RunPhase.WAITING), "it has ended nothing"
        with pytest.raises(NotFound, match="or not yours"):
            async for _ in other.watch(run_id, lambda _trouble: None):
                pass


async def test_a_job_that_comes_again_comes_from_its_owner(
    swarm: Swarm, job: Job, tmp_path: Path
) -> None:
    mine, theirs = swarm.member(Role.CLIENT), swarm.member(Role.CLIENT)
    async with coordinator(swarm, tmp_path) as directory:
        owner, other = (SwarmClient(directory, over(identity)) for identity in (mine, theirs))
        run_id = RunId("the-same")
        await owner.submit(job.spec, job.samples, run_id=run_id)
        await owner.submit(job.spec, job.samples, run_id=run_id)
        with pytest.raises(RunMismatch, match="exists already"):
            await other.submit(job.spec, job.samples, run_id=run_id)


@pytest.mark.parametrize("is_result", [True, False])
async def test_a_file_is_given_to_those_whom_it_is_for(
    swarm: Swarm, tmp_path: Path, is_result: bool
) -> None:
    peer, taker, owner, other = (
        swarm.member(role) for role in (Role.PEER, Role.PEER, Role.CLIENT, Role.CLIENT)
    )
    path = tmp_path / "shard"
    path.write_bytes(b"weights")
    name = ShardName(
        run_id=RunId("run"), step=StepNumber(1), layers=LayerRange(0, 2), is_result=is_result
    )
    takers = () if is_result else (PeerId(key_name(taker.certificate)),)
    offered = offer(path, name, takers, (key_name(owner.certificate),) if is_result else ())

    async def lists(stream: MessageStream[object, ShardName]) -> None:
        await serve_chunk_list(stream, {name: offered})

    server = await over(peer).serve("127.0.0.1", 0, {LIST_CHUNKS: lists})
    for asking, may in ((owner, is_result), (taker, not is_result), (other, False)):
        channel = over(asking).connect(server.endpoint, key_name(peer.certificate))
        if may:
            assert await call(channel, LIST_CHUNKS, name, 5.0) == offered.chunks
        else:
            with pytest.raises(NotAllowed, match="it is not for"):
                await call(channel, LIST_CHUNKS, name, 5.0)
        await channel.close()
    await server.stop()
