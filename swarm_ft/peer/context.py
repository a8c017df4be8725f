"""What the parts of one peer share: its name, its threads, its ways to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from swarm_ft.clock import Clock
from swarm_ft.discovery.directory import Directory
from swarm_ft.ids import PeerId
from swarm_ft.peer.links import Links
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import FromPeer
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.transfer import OfferedShard
from swarm_ft.transport.base import Transport

P = ParamSpec("P")
R = TypeVar("R")


async def run_in(pool: Executor, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What the function returns, called in one of the pool's threads."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, partial(function, *args, **kwargs))


async def to_its_end(task: asyncio.Task[R]) -> R:
    """What comes of the task; cancelled, this waits for its end all the same."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerContext:
    """See the module's docstring.

    Attributes:
        links: to other peers; they outlive attempts and runs.
        compute: one thread, in which the engine lives.
        codecs: threads that encode and decode.
        say: gives a message to the coordinator's stream.
        timeline: of what this peer does when.
        memory_bytes: that this peer lends to a stage and the microbatches it holds.
        offers: shards that others may have from here; who puts one in takes it out again.
    """

    peer_id: PeerId
    directory: Directory
    transport: Transport
    clock: Clock
    links: Links
    compute: Executor
    codecs: Executor
    say: Callable[[FromPeer], None]
    timeline: Timeline
    memory_bytes: int
    offers: dict[ShardName, OfferedShard] = field(default_factory=dict)
