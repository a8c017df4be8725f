"""The context that the parts of one run's stage share: identity, threads, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeAlias, TypeVar

import torch

from swarm_ft.base.clock import Clock
from swarm_ft.codec.base import CPU
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import OutOfMemory
from swarm_ft.ids import PeerId
from swarm_ft.net.transfer import OfferedShard
from swarm_ft.peer.compute import ComputeHandle
from swarm_ft.peer.links import Links
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import FromPeer
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.transport.base import Transport

P = ParamSpec("P")
R = TypeVar("R")

Pool: TypeAlias = Executor | ComputeHandle


async def run_in(pool: Pool, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in one of the pool's threads and return its result.

    Raises:
        OutOfMemory: The function allocated more GPU memory than the device has, or than is lent.
    """
    work = partial(function, *args, **kwargs)
    try:
        if isinstance(pool, ComputeHandle):
            return await pool.run(work)
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    except torch.cuda.OutOfMemoryError as error:
        summary = str(error).partition(". ")[0]
        raise OutOfMemory(
            f"{summary}; this peer holds fewer microbatches from now on; if that is not enough, "
            "lend less --memory than is free, or host fewer --layers"
        ) from error


async def run_uncancellable(task: asyncio.Task[R]) -> R:
    """Return the task's result; a cancelled caller still waits until the task ends."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _no_wait() -> None:
    """Return at once: no other run needs to free memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerContext:
    """Parts of a peer that a run's stage uses.

    Attributes:
        peer_id: Id of this peer.
        directory: Directory in which members are found.
        transport: Transport to other peers.
        clock: Clock of the peer.
        links: Links to other peers; they outlive attempts and runs.
        compute: Pool of the one thread in which this run's engine, and those of other runs, live.
        codecs: Threads that encode and decode.
        send_to_coordinator: Sends a message to the coordinator.
        timeline: Recorder of spans.
        memory_bytes: Bytes that this peer lends to stages and their microbatches.
        reserved_bytes: Returns the bytes that are reserved for stages of other runs.
        wait_for_room: Waits until other runs hold no more; they first finish what they began.
        offers: Shards that other members may fetch here. Each entry is removed by its owner.
        codec_device: Device of the codec threads.
    """

    peer_id: PeerId
    directory: Directory
    transport: Transport
    clock: Clock
    links: Links
    compute: Pool
    codecs: Executor
    send_to_coordinator: Callable[[FromPeer], None]
    timeline: Timeline
    memory_bytes: int
    reserved_bytes: Callable[[], int] = lambda: 0
    wait_for_room: Callable[[], Awaitable[None]] = _no_wait
    offers: dict[ShardName, OfferedShard] = field(default_factory=dict)
    codec_device: torch.device = CPU

    @property
    def background(self) -> Pool:
        """Pool for background work, which nobody waits for yet."""
        return self.compute.background if isinstance(self.compute, ComputeHandle) else self.compute

    @property
    def waited_s(self) -> float:
        """Seconds that this run's tasks have waited for tasks of other runs."""
        return self.compute.waited_s if isinstance(self.compute, ComputeHandle) else 0.0

    def room_bytes(self, state_bytes: int) -> int:
        """Return the bytes left for microbatches, beside the stage's own state and other runs."""
        return self.memory_bytes - self.reserved_bytes() - state_bytes
