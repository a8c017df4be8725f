"""Grants hold in a whole swarm with keys: real enrolment, TLS, peers and engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm_ft.api.documents import status_fields
from swarm_ft.base.clock import SystemClock
from swarm_ft.cli.overview import overview_lines
from swarm_ft.cli.status_text import event_line, verbose_lines
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.coordinator.enrolment import Enrolment
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import BadInvite, NotAllowed
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId
from swarm_ft.net.enrol import Membership, enrol
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.enrolment import name_lookup
from swarm_ft.protocol.messages.events import Rollback
from swarm_ft.protocol.spec.grant import PROBATION, Grant
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.protocol.spec.priority import Claim
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.transport.base import Server
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.doubles.directory import Board, StaticDirectory
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalPeer, cpu_engine

REPLICA = Grant(replica_only=True)
DEADLINE_S = 100.0
ENOUGH = 100_000
"""Steps of a run that is cancelled before they are done."""


@dataclass
class OwnedSwarm:
    """A swarm with keys, and whoever was invited, in one process."""

    folder: Path
    registry: Registry
    authority: Authority
    enrolment: Enrolment
    directory: StaticDirectory
    coordinator: Server
    journal: Journal
    peers: dict[PeerId, LocalPeer] = field(default_factory=dict)

    async def invite(self, role: Role, grant: Grant, uses: int = 1, note: str = "") -> Invite:
        until, where = datetime.now(UTC) + timedelta(days=1), (self.coordinator.endpoint,)
        place = self.authority.fingerprint, where
        made = self.registry.invite(*place, role, uses, until, grant, note)
        await self.enrolment.refresh()
        return made

    async def client(self) -> SwarmClient:
        member = await enrol(await self.invite(Role.CLIENT, Grant(), note="Anna"), new_key())
        return SwarmClient(self.directory, over(member.credentials))

    async def add_peer(self, layers: str, grant: Grant | None = None) -> PeerId:
        """A peer that was invited with this grant."""
        invite = await self.invite(Role.PEER, grant or Grant())
        return await self.start_peer(await enrol(invite, new_key()), layers)

    async def start_peer(self, member: Membership, layers: str) -> PeerId:
        name, transport = PeerId(member.name), over(member.credentials)
        shard_dir = self.folder / name
        shard_dir.mkdir()
        options = PeerOptions(
            peer_id=name, layers=parse_layers(layers), memory_bytes=1 << 33, shard_dir=shard_dir
        )
        node = PeerNode(
            options,
            directory=self.directory,
            transport=transport,
            clock=SystemClock(),
            make_engine=cpu_engine,
            validity=member.credentials.validity,
        )
        server = await transport.serve("127.0.0.1", 0, node.handlers())
        await self.directory.announce(Role.PEER, name, server.endpoint)
        task = asyncio.create_task(node.run(server.endpoint))
        self.peers[name] = LocalPeer(node, server, task)
        return name

    async def kill_peer(self, name: PeerId) -> None:
        peer = self.peers.pop(name)
        await ended(peer.task)
        await peer.server.stop()
        await self.directory.withdraw(Role.PEER, name)


def over(credentials: Credentials) -> GrpcTransport:
    return GrpcTransport(GrpcOptions(credentials=credentials))


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def owned_swarm(folder: Path) -> AsyncIterator[OwnedSwarm]:
    authority = Authority.make(folder / "keys")
    async with AsyncExitStack() as stack:
        registry = stack.enter_context(closing(Registry(folder / "keys")))
        journal = stack.enter_context(closing(Journal(str(folder / "journal.db"))))
        grants, claims, names = registry.grant_of, registry.claim_of, MemberNames()
        service = CoordinatorService(
            journal, SystemClock(), grants=grants, claims=claims, names=names
        )
        enrolment = Enrolment(authority, registry, (), "a-swarm", service.revoke, names=names)
        handlers = {**service.handlers(), **enrolment.handlers()}
        server = await over(enrolment.credentials).serve("127.0.0.1", 0, handlers)
        stack.push_async_callback(server.stop)
        directory = StaticDirectory(Board(), SystemClock())
        await directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
        stack.push_async_callback(ended, *map(asyncio.create_task, (service.run(),)))
        swarm = OwnedSwarm(folder, registry, authority, enrolment, directory, server, journal)
        async with asyncio.timeout(DEADLINE_S):
            yield swarm
        for name in list(swarm.peers):
            await swarm.kill_peer(name)


async def until_there(client: SwarmClient, *names: PeerId) -> None:
    while not {m.peer_id for m in (await client.status()).members}.issuperset(names):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


class LoneHolderDies:
    """The last peer that may carry the first stage dies; then another one comes."""

    def __init__(self, swarm: OwnedSwarm, client: SwarmClient) -> None:
        self.swarm = swarm
        self.client = client
        self.texts: list[str] = []
        self.steps: list[int] = []
        self.successor: PeerId | None = None

    async def play(self, job: Job, holder: PeerId) -> RunStatus:
        """The run as it is when it goes on."""
        run_id = (await self.client.submit(job.spec, job.samples)).run_id
        status: RunStatus | None = None
        async for event in self.client.watch(run_id, lambda _trouble: None):
            if isinstance(event, RunStatus):
                status = event
                self.texts.append(event.detail)
            elif not isinstance(event, Rollback):
                self.steps.append(event.step)
            if holder in self.swarm.peers and "has caught up" in self.texts[-1]:
                await self.swarm.kill_peer(holder)
            if self.successor is None and "their peer may come back" in self.texts[-1]:
                self.successor = await self.swarm.add_peer("0-3")
            if self.successor and self.steps[-1] == 0 and isinstance(event, StepCommitted):
                break
        await self.client.cancel(run_id)
        assert status is not None
        return status


@pytest.mark.thorough
async def test_a_run_waits_for_who_may_carry_a_stage_though_a_replica_on_probation_has_it(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=ENOUGH)
    async with owned_swarm(tmp_path) as swarm:
        client = await swarm.client()
        replica = await swarm.add_peer("0-3", REPLICA)
        holder, last = await swarm.add_peer("0-3"), await swarm.add_peer("3-6")
        await until_there(client, holder, last, replica)
        shown = {m.peer_id: m.grant for m in (await client.status()).members}
        assert shown == {replica: REPLICA, holder: Grant(), last: Grant()}
        story = LoneHolderDies(swarm, client)
        status = await story.play(job, holder)
        named = {one: default_name(one) for one in (replica, holder)}
        assert f"peer {named[replica]} (layers 0-3) has caught up at step" in "\n".join(story.texts)
        removed = (
            f"peer {named[holder]} (layers 0-3) lost its connection; {named[replica]} may not "
            "host a stage alone"
        )
        assert removed in story.texts
        *before, again = story.steps
        assert before == list(range(len(before))), "no step without a peer that may carry it"
        assert again == 0, "its state was nobody's to go on with"
        assert status.assignments[0].peer_id == story.successor


async def test_jobs_of_all_keys_of_an_invitation_have_its_claim(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=2)
    async with owned_swarm(tmp_path) as swarm:
        invites = [
            await swarm.invite(Role.CLIENT, Grant(weight=weight), uses=uses)
            for weight, uses in ((3, 2), (1, 1))
        ]
        claims = {}
        for invite in (invites[0], *invites):
            member = await enrol(invite, new_key())
            client = SwarmClient(swarm.directory, over(member.credentials))
            submitted = await client.submit(job.spec, job.samples, priority=9)
            claims[submitted.run_id] = Claim(invite.name, 3 if invite is invites[0] else 1)
        assert {run.run_id: run.claim for run in swarm.journal.load(0.0)} == claims
        assert len(claims) == 3


async def test_people_read_names_and_programs_both(make_job: MakeJob, tmp_path: Path) -> None:
    """A job on three peers: two chose one name, one chose none."""
    job = make_job(num_samples=16, batch_size=8, num_steps=2)
    async with owned_swarm(tmp_path) as swarm:
        ids = []
        for layers, name in (("0-2", "ada-3090"), ("2-4", "ADA-3O90"), ("4-6", "")):
            member = await enrol(await swarm.invite(Role.PEER, Grant()), new_key(), name)
            ids.append(await swarm.start_peer(member, layers))
        ada, eve, drawn = ids
        client = await swarm.client()
        await until_there(client, *ids)
        shown = {
            ada: f"ada-3090 ({ada[:8]})",
            eve: f"ADA-3O90 ({eve[:8]})",
            drawn: default_name(drawn),
        }
        placed = await client.place(job.spec)
        run_id = (await client.submit(job.spec, job.samples)).run_id
        status = await client.run(run_id)
        async for event in client.watch(run_id, lambda _trouble: None):
            status = event if isinstance(event, RunStatus) and event.assignments else status
        assert {one: name_lookup(status.names)(one) for one in ids} == shown
        assert {one: name_lookup(placed.names)(one) for one in ids} == shown
        await swarm.kill_peer(eve)
        events = [one async for one in client.events(0)]
        lines = "\n".join(map(event_line, events))
        for peer, name in shown.items():
            assert f"peer {name}" in lines
            assert peer not in lines
            assert peer in {one.peer_id for one in events}
        found = await client.status()
        short, verbose = overview_lines(found), "\n".join(verbose_lines(found))
        assert {line.partition("  ")[0] for line in short} >= {shown[ada], shown[drawn]}
        assert f"peer {shown[ada]}  ({ada})" in verbose
        fields = status_fields(found)
        names = {one["peer"]: one["name"] for one in (*fields["peers"], *fields["contributors"])}
        assert names == shown
        assert "Anna" not in str(found)  # clients' names are nobody's business


async def raised(running: Awaitable[None]) -> str:
    with pytest.raises(NotAllowed) as caught:
        await running
    return caught.value.message


async def test_a_peer_offers_the_layers_that_it_was_invited_for_or_learns_so(
    tmp_path: Path,
) -> None:
    async with owned_swarm(tmp_path) as swarm:
        wide = await swarm.add_peer("0-3", Grant(layers=LayerRange(2, 6)))
        assert await raised(swarm.peers[wide].task) == (
            f"peer {default_name(wide)} may host layers 2-6 only, and offers layers 0-3"
        )
        assert not (await (await swarm.client()).status()).members


async def test_anybody_is_a_replica_on_probation_where_all_are_let_in(tmp_path: Path) -> None:
    async with owned_swarm(tmp_path) as swarm:
        client, where = await swarm.client(), swarm.coordinator.endpoint
        public = await swarm.enrolment.set_admission(where, to_all=True)
        assert public is not None
        anybody = [await enrol(public, new_key()) for _ in range(2)]
        names = [await swarm.start_peer(member, "auto") for member in anybody]
        await until_there(client, *names)
        assert {m.grant for m in (await client.status()).members} == {PROBATION}
        assert await swarm.enrolment.set_admission(where, to_all=False) is None
        with pytest.raises(BadInvite, match="used up or revoked"):
            await enrol(public, new_key())


def with_private_ends(spec: RunSpec, *names: PeerId) -> RunSpec:
    return replace(spec, train=replace(spec.train, private_ends=",".join(names)))


async def test_only_peers_that_the_job_trusts_host_its_ends(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(num_samples=16, batch_size=8, num_steps=6)
    async with owned_swarm(tmp_path) as swarm:
        client = await swarm.client()
        stranger, middle = await swarm.add_peer("0-2"), await swarm.add_peer("2-4")
        trusted = await swarm.add_peer("4-6")
        invite = await swarm.invite(Role.PEER, Grant())
        awaited = await enrol(invite, new_key())
        await until_there(client, stranger, middle, trusted)
        spec = with_private_ends(job.spec, PeerId(awaited.name), trusted)
        run_id = (await client.submit(spec, job.samples)).run_id
        named = f"peer {default_name(stranger)}"
        words = f"waiting for layers 0-2: {named} is not listed in the job's --private-ends"
        hosts: set[PeerId] = set()
        async for event in client.watch(run_id, lambda _trouble: None):
            if isinstance(event, RunStatus):
                hosts |= {a.peer_id for a in event.assignments}
                if event.detail == words and PeerId(awaited.name) not in swarm.peers:
                    await swarm.start_peer(awaited, "0-2")
                if event.phase.is_over:
                    assert event.phase is RunPhase.FINISHED, event.detail
        assert hosts == {awaited.name, middle, trusted}
