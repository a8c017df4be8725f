"""What the parts of one run's stage share at a peer: its name, its threads, its ways to others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeAlias, TypeVar

import torch

from swarm_ft.clock import Clock
from swarm_ft.codec.base import CPU
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import OutOfMemory
from swarm_ft.ids import PeerId
from swarm_ft.peer.compute import Seat
from swarm_ft.peer.links import Links
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import FromPeer
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.transfer import OfferedShard
from swarm_ft.transport.base import Transport

P = ParamSpec("P")
R = TypeVar("R")

Pool: TypeAlias = Executor | Seat


async def run_in(pool: Pool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What the function returns, called in one of the pool's threads.

    Raises:
        OutOfMemory: it asked a GPU for more than there is, or than is lent.
    """
    work = partial(function, *args, **kwargs)
    try:
        if isinstance(pool, Seat):
            return await pool.run(work)
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    except torch.cuda.OutOfMemoryError as error:
        said = str(error).partition(". ")[0]
        raise OutOfMemory(
            f"{said}; this peer holds fewer microbatches from now on, and if that is not enough, "
            "lend less --memory than is free, or host fewer --layers"
        ) from error


async def to_its_end(task: asyncio.Task[R]) -> R:
    """What comes of the task; cancelled, this waits for its end all the same."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _at_once() -> None:
    """Nothing is in the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerContext:
    """See the module's docstring.

    Attributes:
        links: to other peers; they outlive attempts and runs.
        compute: one thread, in which the engine lives, and perhaps those of other runs.
        codecs: threads that encode and decode.
        codes_on: what they do it on.
        say: gives a message to the coordinator's stream.
        timeline: of what this peer does when.
        memory_bytes: that this peer lends to stages and the microbatches they hold.
        beside_bytes: of these, what stages of other runs are to have now.
        room_made: waits until they hold no more than that; what they have begun they end first.
        offers: shards that others may have from here; who puts one in takes it out again.
    """

    peer_id: PeerId
    directory: Directory
    transport: Transport
    clock: Clock
    links: Links
    compute: Pool
    codecs: Executor
    say: Callable[[FromPeer], None]
    timeline: Timeline
    memory_bytes: int
    beside_bytes: Callable[[], int] = lambda: 0
    room_made: Callable[[], Awaitable[None]] = _at_once
    offers: dict[ShardName, OfferedShard] = field(default_factory=dict)
    codes_on: torch.device = CPU

    @property
    def filling(self) -> Pool:
        """As `compute`, for what nobody waits for yet."""
        return self.compute.filling if isinstance(self.compute, Seat) else self.compute

    @property
    def waited_s(self) -> float:
        """Seconds that tasks waited so far while the thread was at others."""
        return self.compute.waited_s if isinstance(self.compute, Seat) else 0.0

    def room_bytes(self, state_bytes: int) -> int:
        """What is left of the memory beside a stage's own state, and what others are to have."""
        return self.memory_bytes - self.beside_bytes() - state_bytes
