"""The swarm that is attacked: keys, invitations, TLS, journal, real gRPC, in one process.

Stages 0-2, 2-4 (twice) and 4-6. Peers' names sort as their stages do, so that it is known who calls
whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator.enrolment import Enrolment
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import RunFailed
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.certificates import Certificate
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import PrivateKey, name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.ids import PeerId
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.peer.state.stage_state import EngineMaker
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.transport.base import Server, Transport
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.doubles.directory import Board, StaticDirectory
from tests.hostile.attacker import Identity, Target, coordinator_at, enrol, low_key, newcomer
from tests.local_swarm import cpu_engine

STAGES = ("0-2", "2-4", "2-4", "4-6")
REFRESH_S = 0.1
ALL = Grant()
Wrap = Callable[[Transport], Transport]


@dataclass(frozen=True, slots=True)
class VictimPeer:
    """A peer of the swarm; its keys are at hand, for whoever stole them."""

    target: Target
    identity: Identity
    node: PeerNode
    server: Server
    task: asyncio.Task[None]


class Victim:
    """Use it in an `async with`."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self.directory = StaticDirectory(Board(), SystemClock())
        self.peers: list[VictimPeer] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.authority = Authority.make(self.work_dir / "keys")
        self.registry = Registry(self.work_dir / "keys")
        self._stack.callback(self.registry.close)
        self.tokens = self.work_dir / "journal.db.tokens"
        journal = Journal(str(self.work_dir / "journal.db"))
        self._stack.callback(journal.close)
        self._service = CoordinatorService(journal, SystemClock(), grants=self.registry.grant_of)
        self._enrolment = Enrolment(
            self.authority, self.registry, (), "a-swarm", self._service.revoke
        )
        options = GrpcOptions(credentials=self._enrolment.credentials)
        key = new_key()
        introductions = Introductions(lambda: key, SystemClock())
        handlers = {
            **self._service.handlers(),
            **self._enrolment.handlers(),
            **introductions.handlers(),
        }
        server = await GrpcTransport(options).serve("127.0.0.1", 0, handlers)
        self._stack.push_async_callback(server.stop)
        await self.directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
        self.coordinator = coordinator_at(server.endpoint)
        self.running = asyncio.create_task(self._service.run())
        self._stack.push_async_callback(_ended, self.running)
        self._heeding = asyncio.create_task(self._heed())
        self._stack.push_async_callback(_ended, self._heeding)
        keys = sorted((new_key() for _ in STAGES), key=lambda key: name_of(key.public_key()))
        for key, layers in zip(keys, STAGES, strict=True):
            self.peers.append(await self.add_peer(layers, key=key))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for peer in self.peers:
            await self.stop(peer)
        await self._stack.aclose()
        await self.directory.close()

    async def _heed(self) -> None:
        # Sooner than a coordinator by itself does: nobody is to wait for a second all the time.
        while True:
            await self._enrolment.refresh()
            await asyncio.sleep(REFRESH_S)

    @property
    def certificate(self) -> Certificate:
        """The authority's, which everybody sees who connects."""
        return self.authority.certificate

    # ---- who comes in

    async def invite(self, role: Role, grant: Grant = ALL) -> Invite:
        """Make an invitation, as the swarm's owner does."""
        until = datetime.now(UTC) + timedelta(days=1)
        addresses, fingerprint = (self.coordinator.endpoint,), self.authority.fingerprint
        invite = self.registry.invite(fingerprint, addresses, role, 1, until, grant)
        await self._enrolment.refresh()
        return invite

    async def member(
        self, role: Role, key: PrivateKey | None = None, grant: Grant = ALL
    ) -> Identity:
        """Somebody who was invited, and came in as everybody does; it calls all peers."""
        below = self.peers[0].target.name if self.peers else "~"
        invite = await self.invite(role, grant)
        newcomer_identity = newcomer(invite, key or low_key(below), self.certificate)
        while True:
            answer, identity = await enrol(self.coordinator, newcomer_identity)
            if identity is not None:
                return identity
            if answer.code != "busy":  # a limit for all callers from this host
                raise RunFailed(f"a {role} that was invited was not let in: {answer}")
            await asyncio.sleep(REFRESH_S)

    def certified(self, role: Role, *, age: timedelta = timedelta()) -> Identity:
        """Somebody whose key the authority certified so long ago, whatever the role."""
        key = low_key(self.peers[0].target.name)
        public = key.public_key()
        name = COORDINATOR_NAME if role is Role.COORDINATOR else name_of(public)
        then = Authority.open(self.work_dir / "keys", lambda: datetime.now(UTC) - age)
        issued = then.issue(Caller(role=role, name=name, key=public))
        return Identity(key, issued, self.certificate)

    def revoke(self, name: str) -> None:
        """Revoke a key, as the swarm's owner does; it takes effect soon."""
        self.registry.revoke(name)

    # ---- honest peers, and those of their owners' own making

    async def add_peer(
        self,
        layers: str,
        *,
        key: PrivateKey | None = None,
        make_engine: EngineMaker = cpu_engine,
        wrap: Wrap = lambda transport: transport,
    ) -> VictimPeer:
        """Start a peer; `wrap` comes between it and the coordinator."""
        identity = await self.member(Role.PEER, key or new_key())
        name = PeerId(identity.name)
        own = Credentials(identity.key, identity.certificate, identity.authority)
        transport = GrpcTransport(GrpcOptions(credentials=own))
        shard_dir = self.work_dir / name
        shard_dir.mkdir(mode=0o700, exist_ok=True)
        options = PeerOptions(
            peer_id=name, layers=parse_layers(layers), memory_bytes=1 << 33, shard_dir=shard_dir
        )
        node = PeerNode(
            options,
            directory=self.directory,
            transport=transport,
            control_transport=wrap(transport),
            clock=SystemClock(),
            make_engine=make_engine,
            validity=own.validity,
        )
        server = await transport.serve("127.0.0.1", 0, node.handlers())
        await self.directory.announce(Role.PEER, name, server.endpoint)
        task = asyncio.create_task(node.run(server.endpoint))
        return VictimPeer(Target(server.endpoint, name), identity, node, server, task)

    async def stop(self, peer: VictimPeer) -> None:
        """End a peer without a word to anybody."""
        await _ended(peer.task)
        await peer.server.stop()
        await self.directory.withdraw(Role.PEER, peer.target.name)

    def check_alive(self) -> None:
        """Refuse to go on with a swarm of which a part has ended.

        Raises:
            RunFailed: the text names it.
        """
        tasks: Sequence[tuple[str, asyncio.Task[None]]] = [
            ("the coordinator", self.running),
            ("the registry's reader", self._heeding),
            *((f"peer {peer.target.name}", peer.task) for peer in self.peers),
        ]
        for what, task in tasks:
            if task.done():
                raise RunFailed(f"{what} has ended: {task.exception()!r}")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
