"""Gives the shards that this peer offers to whoever asks. Knows files and calls; no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm_ft import failpoints
from swarm_ft.errors import MalformedMessage, NotFound, Unavailable
from swarm_ft.protocol.messages.shard import (
    CHUNK_BYTES,
    ChunkList,
    ChunkPart,
    FetchRequest,
    ShardName,
)
from swarm_ft.snapshots.files import chunks_of
from swarm_ft.transport.base import MessageStream

PART_BYTES = 256 << 10
"""Small enough that a link of 1 Mbps brings one every other second: silence tells soon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedShard:
    """A file that others may have; it does not change while it is offered.

    Attributes:
        chunks: of the file; the list's digest is what the coordinator is told.
    """

    path: Path
    chunks: ChunkList


Offers = Mapping[ShardName, OfferedShard]
"""What a peer offers, by name; it changes meanwhile."""


def offer(path: Path) -> OfferedShard:
    """Read a shard once, to offer it. Blocks.

    Raises:
        Unavailable: it cannot be read (now).
    """
    try:
        return OfferedShard(path=path, chunks=chunks_of(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error


async def serve_chunk_list(stream: MessageStream[ChunkList, ShardName], offers: Offers) -> None:
    """Somebody asks for a shard's list of chunks.

    Raises:
        NotFound: no such shard is offered here.
        MalformedMessage: it asks for nothing that could be one.
    """
    name = await stream.receive()
    if name is None:
        raise MalformedMessage(f"{stream.remote}: expected the name of a shard")
    await stream.send(_found(offers, name).chunks)


async def serve_chunks(stream: MessageStream[ChunkPart, FetchRequest], offers: Offers) -> None:
    """Somebody fetches some chunks of a shard.

    Raises:
        NotFound: no such shard is offered here.
        MalformedMessage: it asks for chunks that the shard does not have.
        Unavailable: the shard cannot be read (now).
    """
    request = await stream.receive()
    if request is None:
        raise MalformedMessage(f"{stream.remote}: expected a request for chunks")
    name, wanted = request.name, request.chunks
    offered = _found(offers, name)
    if wanted.stop > len(offered.chunks):
        raise MalformedMessage(
            f"{stream.remote}: expected chunks below {len(offered.chunks)} of {name}, got "
            f"{wanted.start} to {wanted.stop - 1}"
        )
    for index in wanted:
        chunk = await asyncio.to_thread(_read, offered.path, index)
        for start in range(0, len(chunk), PART_BYTES):
            failpoints.reached("handing-over")
            await stream.send(ChunkPart(chunk=index, data=chunk[start : start + PART_BYTES]))


def _found(offers: Offers, name: ShardName) -> OfferedShard:
    offered = offers.get(name)
    if offered is None:
        raise NotFound(f"{name}: this peer does not offer it (any more)")
    return offered


def _read(path: Path, index: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(index * CHUNK_BYTES)
            return file.read(CHUNK_BYTES)
    except OSError as error:
        raise Unavailable(f"the shard cannot be read: {error.strerror}") from error
