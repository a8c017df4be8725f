"""A whole swarm in one process, for tests.

Real coordinator, journal, peers, engines and, by default, real gRPC on loopback. Only
the directory is a fake, and the process is one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from swarm_ft.base.clock import Clock, SystemClock
from swarm_ft.buffers import BufferLimits
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.missing_snapshots import forget_missing_snapshots
from swarm_ft.coordinator.recording.files import RecordingFiles, folder_of
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.identity.certificates import key_name
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer.buffer_storage import BufferStorage
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.peer.snapshot_keeper import KeeperStorage
from swarm_ft.peer.state.stage_state import EngineMaker
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import RunSpec, TaskKind, TrainOptions
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.stage.base import Engine
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.transport.base import Server, Transport
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.doubles.directory import Board, StaticDirectory
from tests.members import Swarm as Members


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A peer of a local swarm."""

    node: PeerNode
    server: Server
    task: asyncio.Task[None]


POLL_S = 0.02


class LocalSwarm:
    """Use it in an `async with`.

    Args:
        work_dir: for the journal and the peers' shards.
        layers: what each peer offers, as `--layers` takes it; peers are `peer-0`, `peer-1`, ...
        transport: what peers and clients use; gRPC by default.
        memory_bytes: what each peer lends.
        buffer_limits: of each peer's buffers, which are then on disk too, below `work_dir`, and
            there when a peer of the same name comes again; None keeps them in memory.
        encrypts: whether peers encrypt what they write down.
        journal_key: with which the coordinator does; None does not.
        num_keepers: how many peers keep each stage of a snapshot; 0: all put them in one place.
        max_beside: stages of other runs that each peer hosts beside its first.
        members: links are encrypted between members of this swarm; peers then have their keys'
            names.

    Attributes:
        service: the coordinator's, the newest.
    """

    service: CoordinatorService

    def __init__(
        self,
        work_dir: Path,
        layers: Sequence[str],
        *,
        transport: Transport | None = None,
        memory_bytes: int = 1 << 33,
        buffer_limits: BufferLimits | None = None,
        encrypts: bool = False,
        journal_key: bytes | None = None,
        num_keepers: int = 0,
        members: Members | None = None,
        max_beside: int = 0,
    ) -> None:
        self._work_dir = work_dir
        self._layers = layers
        self._transport = transport or GrpcTransport()
        self._members = members
        self._memory_bytes = memory_bytes
        self._buffer_limits = buffer_limits
        self._encrypts, self._journal_key = encrypts, journal_key
        self._num_keepers = num_keepers
        self._max_beside = max_beside
        self._snapshots_url = "" if num_keepers else str(work_dir / "snapshots")
        self._clock = SystemClock()
        self.directory = StaticDirectory(Board(), self._clock)
        self._coordinator: tuple[Journal, RecordingFiles, Server, asyncio.Task[None]] | None = None
        self.peers: dict[PeerId, LocalPeer] = {}
        own = members.member(Role.CLIENT) if members else None
        name = key_name(own.certificate) if own else ""
        self.client = SwarmClient(self.directory, self._transport_of(own), name)

    async def __aenter__(self) -> Self:
        await self.start_coordinator()
        for index, layers in enumerate(self._layers):
            await self.add_peer(PeerId(f"peer-{index}"), layers)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in list(self.peers):
            await self.kill_peer(name)
        await self.kill_coordinator()
        await self.directory.close()

    def _transport_of(self, credentials: Credentials | None) -> Transport:
        if credentials is None:
            return self._transport
        return GrpcTransport(GrpcOptions(credentials=credentials))

    # ---- the coordinator

    @property
    def journal(self) -> Path:
        """Its file."""
        return self._work_dir / "journal.db"

    async def start_coordinator(self) -> None:
        """Start it, or start it again from its journal."""
        journal = Journal(str(self.journal), self._journal_key)
        recording = RecordingFiles(folder_of(self.journal), self._journal_key)
        store = SnapshotStore(self._snapshots_url) if self._snapshots_url else None
        forget_missing_snapshots(journal, store)
        service = CoordinatorService(
            journal, self._clock, store, num_keepers=self._num_keepers, recording=recording
        )
        transport = self._transport_of(self._members.coordinator() if self._members else None)
        server = await transport.serve("127.0.0.1", 0, service.handlers())
        await self.directory.announce(Role.COORDINATOR, COORDINATOR_NAME, server.endpoint)
        self.service = service
        self._coordinator = journal, recording, server, asyncio.create_task(service.run())

    async def kill_coordinator(self) -> None:
        """End it without a word to anybody."""
        if self._coordinator is None:
            return
        journal, recording, server, task = self._coordinator
        self._coordinator = None
        await self.directory.withdraw(Role.COORDINATOR, COORDINATOR_NAME)
        await server.stop()
        await _cancelled(task)
        journal.close()
        recording.close()

    # ---- peers

    async def add_peer(
        self,
        name: PeerId,
        layers: str,
        clock: Clock | None = None,
        make_engine: EngineMaker | None = None,
        memory_bytes: int | None = None,
        sent_bytes: Callable[[], int] = lambda: 0,
        machine: Machine | None = None,
    ) -> LocalPeer:
        """Start another peer; with a clock of its own, as another machine has one.

        `sent_bytes` is its count of everything that it sent. With a machine, the peer reports it
        and its load.

        Where links are encrypted, `name` has no effect: a peer has its key's.
        """
        own = self._members.member() if self._members else None
        name, transport = (
            PeerId(key_name(own.certificate)) if own else name,
            self._transport_of(own),
        )
        shard_dir = self._work_dir / name
        shard_dir.mkdir(exist_ok=True)
        options = PeerOptions(
            peer_id=name,
            layers=parse_layers(layers),
            memory_bytes=memory_bytes or self._memory_bytes,
            shard_dir=shard_dir,
            buffers=self._buffer_place(name),
            snapshots_url=self._snapshots_url,
            keeper_storage=KeeperStorage(
                directory=self._work_dir / f"{name}-kept", max_bytes=1 << 30
            ),
            encrypts=self._encrypts,
            max_extra_stages=self._max_beside,
            machine=machine,
        )
        node = PeerNode(
            options,
            directory=self.directory,
            transport=transport,
            clock=clock or self._clock,
            make_engine=make_engine or cpu_engine,
            sent_bytes=sent_bytes,
        )
        server = await transport.serve("127.0.0.1", 0, node.handlers())
        await self.directory.announce(Role.PEER, name, server.endpoint)
        peer = LocalPeer(node, server, asyncio.create_task(node.run(server.endpoint)))
        self.peers[name] = peer
        return peer

    def _buffer_place(self, name: PeerId) -> BufferStorage:
        if self._buffer_limits is None:
            return BufferStorage()
        directory = self._work_dir / f"{name}-buffers"
        return BufferStorage(limits=self._buffer_limits, directory=directory)

    async def kill_peer(self, name: PeerId) -> None:
        """End a peer without a word to anybody; its weights are gone."""
        peer = self.peers.pop(name)
        await _cancelled(peer.task)
        await peer.server.stop()
        await self.directory.withdraw(Role.PEER, name)

    # ---- runs

    async def snapshot_of(self, run_id: RunId, spec: RunSpec, *, step: int) -> None:
        """Wait until there is a snapshot of so many steps, or of more."""
        store = SnapshotStore(self._snapshots_url)
        snapshots = partial(store.list_snapshots, run_id, spec.digest())
        while not any(found.step >= step for found in snapshots()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def can_go_back(self, run_id: RunId, *, step: int) -> None:
        """Wait until the coordinator knows that a snapshot of so many steps, or of more, is whole.

        Its manifest is there a moment before.
        """
        while max(await self._snapshots_of(run_id), default=0) < step:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _snapshots_of(self, run_id: RunId) -> Sequence[int]:
        runs = (await self.client.status()).runs
        return next((run.snapshots for run in runs if run.run_id == run_id), ())

    async def all_joined(self) -> None:
        """Wait until all peers are members."""
        while len((await self.client.status()).members) < len(self.peers):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def train(self, spec: RunSpec, samples: Sequence[bytes]) -> list[RunEvent]:
        """Submit a run once all peers are there and watch it to its end; all its events."""
        await self.all_joined()
        status = await self.client.submit(spec, samples)
        return await self.watch(status.run_id)

    async def watch(self, run_id: RunId | None = None) -> list[RunEvent]:
        """All events of a run (the newest, if None), until it is over."""
        watching = asyncio.ensure_future(self._watch(run_id))
        peers = [peer.task for peer in self.peers.values()]
        await asyncio.wait((watching, *peers), return_when=asyncio.FIRST_COMPLETED)
        for task in peers:
            if task.done() and not task.cancelled() and task.exception() is not None:
                watching.cancel()
                task.result()
        return await watching

    async def watch_and(
        self, run_id: RunId, after: int, then: Callable[[], Awaitable[None]]
    ) -> list[RunEvent]:
        """All events of a run; something happens to it once, when a step has been committed."""
        events: list[RunEvent] = []
        has_happened = False
        async for event in self.client.watch(run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == after and not has_happened:
                has_happened = True
                await then()
        assert has_happened
        return events

    async def _watch(self, run_id: RunId | None) -> list[RunEvent]:
        return [event async for event in self.client.watch(run_id, lambda _trouble: None)]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def cpu_engine(spec: RunSpec, layers: LayerRange) -> Engine:
    """Make the engine that peers compute with."""
    checkpoint = opened(spec)
    return StageEngine(checkpoint, spec, layers, device=torch.device("cpu"), dtype=torch.float32)


def opened(spec: RunSpec) -> Checkpoint:
    """A checkpoint as a peer opens it, once for all runs that begin with it.

    To look through a model takes longer than a few steps of a small one. Weights are read, and
    checked, by each stage anew.
    """
    train: TrainOptions = spec.train
    if train.task_kind is TaskKind.CAUSAL_LM:
        train = TrainOptions(seed=train.seed)
    with _OPENING:
        return _opened(spec.model.reference, train)


def forget_opened() -> None:
    """Open checkpoints anew, for tests whose models have the same relative path."""
    _opened.cache_clear()


_OPENING = threading.Lock()
_opened = lru_cache(maxsize=8)(open_checkpoint)
