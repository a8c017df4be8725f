"""The machines of a simulated swarm: real roles in processes that start, end and start again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from swarm_ft.base.clock import Clock
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import SwarmError, Unavailable
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.peer.snapshot_keeper import KeeperStorage
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import Codecs, RunSpec
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.transport.base import Method
from swarm_ft.transport.methods import FETCH_CHUNKS
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.faults import FaultyTransport, Wait
from tests.simulation.disk import Disk, DiskJournal
from tests.simulation.engine import TinyEngine
from tests.simulation.invariants import Invariants
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, SimTransport
from tests.simulation.replaying import Replaying
from tests.simulation.trace import Trace

RECORD_LIFETIME_S = 60.0
"""How long a killed process's record stays in the directory."""
NUM_KEEPERS = 2
LOOK_S = 0.1
RESTART_S = 2.0
"""After which whoever watches a process starts it again when it ended by itself."""


@dataclass(kw_only=True, slots=True)
class World:
    """The state that all machines share.

    Attributes:
        rng: draws how long the directory takes to answer.
        snapshots_url: a folder that everybody reaches; empty: peers keep snapshots.
        handover_s: that each message of a state takes longer on its way to a newcomer.
        max_beside: stages of other runs that a peer hosts beside its first.
        computes_by_block: whether what takes a peer one time takes it that time for each block.
        isolated: machines that do not reach the directory now.
        codecs: what owners want runs to go by, and after how many steps, by their specs' digests.
    """

    loop: VirtualLoop
    network: Network
    trace: Trace
    invariants: Invariants
    rng: Random
    snapshots_url: str
    handover_s: float = 0.0
    max_beside: int = 0
    computes_by_block: bool = False
    board: Board = field(default_factory=Board)
    isolated: set[str] = field(default_factory=set)
    codecs: Mapping[bytes, tuple[int, Codecs]] = field(default_factory=dict)


class Machine:
    """A machine and the one process that runs on it now, if any.

    Args:
        main: what the process does; its end is the process's.
        root: folder of its disk.
    """

    def __init__(
        self,
        world: World,
        name: str,
        main: Callable[[Machine], Coroutine[Any, Any, None]],
        root: Path,
    ) -> None:
        root.mkdir()
        self.world = world
        self.name = name
        self.disk = Disk(root)
        self.process: Process | None = None
        self.clock = MachineClock(world.loop)
        self.starts = 0
        self.identity = name
        self.is_over = False
        """Whether its work is done; it is not started again."""
        self.comes_back = False
        """Whether it starts again, as another, once it has left."""
        self.directory: MachineDirectory = MachineDirectory(self)
        self._main = main

    @property
    def transport(self) -> SimTransport:
        """Return the transport of the present process."""
        if self.process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self.world.network.transport(self.process)

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.process is not None or self.is_over:
            return
        self.starts += 1
        self.disk.reopen()
        process = self.process = Process(self.world.loop, self.name)
        self.world.trace.say(f"{self.name}: starts as {self.identity}")
        task = process.spawn(self._main(self))
        task.add_done_callback(lambda done: self._ended(process, done), context=Context())

    def kill(self, *, silently: bool = False) -> None:
        """End the process at once; without a word on the wire if `silently`."""
        if self.process is None:
            return
        process, self.process = self.process, None
        process.kill()
        self.world.network.killed(process, silently=silently)
        self.directory.let_expire()

    def come_back(self) -> None:
        """Start as somebody else, as soon as the present process has ended."""
        self.comes_back = self.process is not None
        if self.process is None:
            self.identity = f"{self.name}.{self.starts}"
            self.start()

    def _ended(self, process: Process, done: asyncio.Task[None]) -> None:
        if not process.alive or done.cancelled():
            return
        error = done.exception()
        self.world.trace.say(f"{self.name}: ended: {error!r}")
        if error is not None and not isinstance(error, SwarmError):
            self.world.invariants.bug(f"{self.name} ended with {error!r}", error)
        self.kill()
        if error is not None:
            self.world.network.wires.at(self.world.loop.time() + RESTART_S, self.start)
        elif self.comes_back:
            self.come_back()


class MachineClock:
    """A machine's monotonic clock, which may jump ahead."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def now_s(self) -> float:
        """See `Clock`."""
        return self._loop.time() + self.ahead_s


class MachineDirectory:
    """See `Directory`: a board that everybody reaches who is not isolated, in a drawn time."""

    def __init__(self, machine: Machine) -> None:
        world = machine.world
        self._machine = machine
        self._inner = StaticDirectory(world.board, cast(Clock, MachineClock(world.loop)))
        self._mine: dict[tuple[Role, str], str] = {}

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`."""
        self._mine[role, name] = endpoint
        await self._inner.announce(role, name, endpoint)

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`."""
        self._mine.pop((role, name), None)
        await self._inner.withdraw(role, name)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`."""
        world = self._machine.world
        await asyncio.sleep(world.rng.expovariate(50.0))
        if self._machine.name in world.isolated:
            await asyncio.sleep(3.0)
            raise Unavailable("the directory does not answer")
        return await self._inner.find(role)

    async def close(self) -> None:
        """See `Directory`."""
        await self._inner.close()

    def let_expire(self) -> None:
        """Nobody refreshes the records any more."""
        world, records = self._machine.world, self._machine.world.board.records

        def expire(mine: dict[tuple[Role, str], str]) -> None:
            for key, endpoint in mine.items():
                if key in records and records[key].endpoint == endpoint:
                    del records[key]

        mine, self._mine = self._mine, {}
        world.network.wires.at(world.loop.time() + RECORD_LIFETIME_S, lambda: expire(mine))


# ---- roles, put together as their commands do


async def coordinate(machine: Machine) -> None:
    """`swarm-ft coordinator`."""
    journal = DiskJournal(machine.disk, machine.world.invariants.written)
    try:
        url = machine.world.snapshots_url
        service = CoordinatorService(
            journal,
            machine.clock,
            SnapshotStore(url) if url else None,
            num_keepers=NUM_KEEPERS,
            recording=Replaying(
                machine.world.invariants.fail,
                lambda: service._state,  # noqa: SLF001 - to compare with
            ),
        )
        server = await machine.transport.serve(machine.name, 0, service.handlers())
        try:
            await machine.directory.announce(Role.COORDINATOR, "coordinator", server.endpoint)
            owners = asyncio.create_task(_wish(service, machine.world.codecs))
            try:
                await service.run()
            finally:
                owners.cancel()
        finally:
            await server.stop()
            await machine.directory.withdraw(Role.COORDINATOR, "coordinator")
    finally:
        journal.close()


async def _wish(service: CoordinatorService, codecs: Mapping[bytes, tuple[int, Codecs]]) -> None:
    """Owners look at the page now and then, and change what they want to."""
    wishes = dict(codecs)
    while wishes:
        await asyncio.sleep(LOOK_S)
        for run in service.status().runs:
            step, wanted = wishes.get(run.spec_digest, (math.inf, None))
            if wanted is not None and run.committed_steps >= step and not run.phase.is_over:
                del wishes[run.spec_digest]
                with suppress(SwarmError):  # the coordinator ends, and is started again
                    service.change_codecs(run.run_id, wanted.forward, wanted.backward)


class PeerRole:
    """`swarm-ft serve-stage --layers LAYERS`."""

    def __init__(self, layers: str) -> None:
        self.layers = layers
        self.node: PeerNode | None = None

    async def __call__(self, machine: Machine) -> None:
        """Serve until the peer leaves."""
        name = PeerId(machine.identity)
        watcher = machine.world.invariants.watcher(machine.name)

        def make_engine(spec: RunSpec, layers: LayerRange) -> TinyEngine:
            if machine.process is not None and machine.world.computes_by_block:
                machine.process.work = len(layers)
            return TinyEngine(spec, layers, watcher=watcher, check_disk=machine.disk.check)

        node = self.node = PeerNode(
            PeerOptions(
                peer_id=name,
                layers=parse_layers(self.layers),
                memory_bytes=1 << 30,
                max_extra_stages=machine.world.max_beside,
                shard_dir=machine.disk.root,
                snapshots_url=machine.world.snapshots_url,
                keeper_storage=KeeperStorage(
                    directory=machine.disk.root / "kept", max_bytes=1 << 30
                ),
            ),
            directory=machine.directory,
            transport=FaultyTransport(machine.transport, waits=_waits(machine.world)),
            clock=machine.clock,
            make_engine=make_engine,
            rng=Random(machine.world.rng.getrandbits(64)),
        )
        watcher.node = node
        server = await machine.transport.serve(machine.name, 0, node.handlers())
        try:
            await machine.directory.announce(Role.PEER, name, server.endpoint)
            await node.run(server.endpoint)
        finally:
            await server.stop()
            await machine.directory.withdraw(Role.PEER, name)


def _waits(world: World) -> Mapping[Method[Any, Any], Wait]:
    """A newcomer's calls to sources, if states are long on their way."""
    return {FETCH_CHUNKS: partial(asyncio.sleep, world.handover_s)} if world.handover_s else {}
