"""A whole swarm in this process, with real members and real links.

Coordinator, journal, peers, engines, keys and gRPC over TLS on loopback are those of any swarm.
Only the directory is a table in memory. Own processes would each import torch and transformers
first, which takes seconds of a core. This process has imported them already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm_ft.api.connections import in_background
from swarm_ft.base.clock import SystemClock
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.codec.kernels import coding_device
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.discovery.in_process import InProcessDirectory
from swarm_ft.errors import NotFound
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.keys import name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.ids import PeerId
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.stage.base import Engine
from swarm_ft.stage.device import pick_device
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.model_access import ModelAccess, named_directories
from swarm_ft.transport.base import Server
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport

MEMORY_BYTES = 1 << 40
"""Memory that each peer reports. They share this process's memory, so no peer may be refused."""
RENEW_S = 6 * 3600.0
"""Seconds between two renewals of the certificates, which are valid for a day."""


@dataclass(frozen=True, slots=True)
class _Peer:
    own_name: str
    layers: str
    server: Server
    task: asyncio.Task[None]


class InProcessMembers:
    """A coordinator and peers in this process: `open`, `host` and `close` them.

    Args:
        folder: Directory for keys, journal, snapshots and the peers' files.
        device: Device of all peers: auto, cpu, cuda, cuda:N or mps.
        threads: CPU threads of each peer.
    """

    def __init__(self, folder: Path, device: str = "auto", threads: int = 1) -> None:
        self._folder = folder
        self._threads = threads
        self._device = pick_device(device)
        self._authority = Authority.make(folder / "keys")
        self._directory = InProcessDirectory()
        self._clock = SystemClock()
        self._snapshots = str(folder / "snapshots")
        self._running = AsyncExitStack()
        self._members: list[tuple[Caller, Credentials]] = []
        self.client = SwarmClient(self._directory, *self._transport(Role.CLIENT))
        self._peers: dict[str, _Peer] = {}
        self._names = MemberNames()
        self._directories: list[str] = []
        self._access = ModelAccess()

    @property
    def peers(self) -> Mapping[str, str]:
        """The running peers: their member ids, by their names in `host`."""
        return {name: peer.own_name for name, peer in self._peers.items()}

    async def open(self) -> None:
        """Start the coordinator."""
        self._running.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(self._threads)
        journal = Journal(str(self._folder / "coordinator.db"))
        self._running.enter_context(closing(journal))
        store = SnapshotStore(self._snapshots)
        service = CoordinatorService(journal, self._clock, store, names=self._names)
        transport, _ = self._transport(Role.COORDINATOR, COORDINATOR_NAME)
        server = await transport.serve("127.0.0.1", 0, service.handlers())
        self._running.push_async_callback(server.stop)
        await self._directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
        self._coordinating = asyncio.create_task(service.run())
        self._running.push_async_callback(_cancelled, self._coordinating)
        await self._running.enter_async_context(in_background(self._renew()))

    async def host(self, layers: Mapping[str, str], model: str) -> None:
        """Start and stop peers until exactly these are running, each with its layers.

        Args:
            layers: Layers of each peer, by its name.
            model: Directory or hub id that jobs may name from now on, beside earlier directories.
        """
        self._allow(model)
        for name in [one for one, peer in self._peers.items() if layers.get(one) != peer.layers]:
            await self.kill(name)
        for name, part in layers.items():
            if name not in self._peers:
                await self._add(name, part)

    async def kill(self, name: str) -> None:
        """Kill a peer without a handover; its state is lost.

        Raises:
            NotFound: There is no such peer.
        """
        if name not in self._peers:
            known = ", ".join(self._peers) or "none"
            raise NotFound(f"peer: expected one of {known}, got {name}")
        peer = self._peers.pop(name)
        await _cancelled(peer.task)
        await peer.server.stop()
        await self._directory.withdraw(Role.PEER, peer.own_name)

    async def wait_for_failure(self) -> None:
        """Wait until a member fails.

        Raises:
            SwarmError: The member's error.
        """
        tasks = {self._coordinating, *(peer.task for peer in self._peers.values())}
        while tasks:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():  # `kill` cancels a task, which is no failure.
                    task.result()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Stop all members."""
        for name in list(self._peers):
            await self.kill(name)
        await self._running.aclose()
        await self._directory.close()

    async def _add(self, name: str, layers: str) -> None:
        transport, own_name = self._transport(Role.PEER)
        self._names.add(own_name, name)
        shard_dir = self._folder / name
        shard_dir.mkdir(exist_ok=True)
        node = PeerNode(
            PeerOptions(
                peer_id=PeerId(own_name),
                layers=parse_layers(layers),
                memory_bytes=MEMORY_BYTES,
                shard_dir=shard_dir,
                snapshots_url=self._snapshots,
                codec_device=coding_device(self._device),
            ),
            directory=self._directory,
            transport=transport,
            clock=self._clock,
            make_engine=self._engine,
        )
        server = await transport.serve("127.0.0.1", 0, node.handlers())
        await self._directory.announce(Role.PEER, own_name, server.endpoint)
        task = asyncio.create_task(node.run(server.endpoint))
        self._peers[name] = _Peer(own_name, layers, server, task)

    def _allow(self, model: str) -> None:
        is_directory = Path(model).is_dir()
        if is_directory:
            self._directories.append(model)
        directories = named_directories(self._directories)
        # This user chose the hub model, so peers open it with this user's rights.
        self._access = ModelAccess(directories=directories, own=None if is_directory else model)

    def _engine(self, spec: RunSpec, layers: LayerRange) -> Engine:
        checkpoint = self._access.open(spec)
        return StageEngine(checkpoint, spec, layers, device=self._device, dtype=torch.float32)

    def _transport(self, role: Role, name: str = "") -> tuple[GrpcTransport, str]:
        """Create a member's key, and return its transport with its name."""
        key = new_key()
        holder = Caller(role=role, name=name or name_of(key.public_key()), key=key.public_key())
        certificate = self._authority.issue(holder)
        credentials = Credentials(key, certificate, self._authority.certificate)
        self._members.append((holder, credentials))
        return GrpcTransport(GrpcOptions(credentials=credentials)), holder.name

    async def _renew(self) -> None:
        """Renew all certificates before they expire."""
        while True:
            await asyncio.sleep(RENEW_S)
            for holder, credentials in self._members:
                credentials.renew(self._authority.issue(holder))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
