"""Shards' names and chunks to and from protobuf, checked."""

from __future__ import annotations

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import StepNumber
from swarm_ft.proto import snapshot_pb2 as pb
from swarm_ft.protocol.messages.shard import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    ChunkList,
    ShardFile,
    ShardName,
    num_chunks,
)
from swarm_ft.protocol.spec.checks import bounded, checked_digest, checked_run_id
from swarm_ft.protocol.spec.digest import DIGEST_BYTES
from swarm_ft.protocol.spec.run_spec import MAX_STEPS
from swarm_ft.protocol.wire.run_wire import layers_from_wire, layers_to_wire


def shard_to_wire(name: ShardName) -> pb.ShardName:
    """A shard's name as protobuf."""
    return pb.ShardName(
        run_id=name.run_id,
        step=name.step,
        layers=layers_to_wire(name.layers),
        is_result=name.is_result,
    )


def shard_from_wire(name: pb.ShardName) -> ShardName:
    """A shard's name from protobuf.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    return ShardName(
        run_id=checked_run_id(name.run_id),
        step=StepNumber(bounded("step", name.step, 0, MAX_STEPS)),
        layers=layers_from_wire(name.layers),
        is_result=name.is_result,
    )


def file_to_wire(file: ShardFile) -> pb.ShardFile:
    """What a shard must be, as protobuf."""
    return pb.ShardFile(digest=file.digest, total_bytes=file.total_bytes)


def file_from_wire(file: pb.ShardFile) -> ShardFile:
    """What a shard must be, from protobuf.

    Raises:
        MalformedMessage: it has no digest, or would be too large.
    """
    return ShardFile(
        digest=checked_digest("digest of a shard", file.digest),
        total_bytes=bounded("shard", file.total_bytes, 0, CHUNK_BYTES * MAX_CHUNKS),
    )


def chunks_to_wire(chunks: ChunkList) -> pb.ChunkList:
    """A list of chunks as protobuf."""
    return pb.ChunkList(total_bytes=chunks.total_bytes, digests=b"".join(chunks.digests))


def chunks_from_wire(chunks: pb.ChunkList) -> ChunkList:
    """A list of chunks from protobuf.

    Raises:
        MalformedMessage: the file would be too large, or it has more or fewer digests than chunks.
    """
    total_bytes = bounded("shard", chunks.total_bytes, 0, CHUNK_BYTES * MAX_CHUNKS)
    count = num_chunks(total_bytes)
    if len(chunks.digests) != count * DIGEST_BYTES:
        raise MalformedMessage(
            f"chunks: expected {count} digests for {total_bytes} bytes, got "
            f"{len(chunks.digests)} bytes of digests"
        )
    starts = range(0, len(chunks.digests), DIGEST_BYTES)
    digests = tuple(chunks.digests[i : i + DIGEST_BYTES] for i in starts)
    return ChunkList(total_bytes=total_bytes, digests=digests)


def fetch_to_wire(name: ShardName, wanted: range) -> pb.FetchRequest:
    """A request for chunks, by their numbers, as protobuf."""
    return pb.FetchRequest(
        name=shard_to_wire(name), first_chunk=wanted.start, num_chunks=len(wanted)
    )


def fetch_from_wire(request: pb.FetchRequest) -> tuple[ShardName, range]:
    """A request for chunks from protobuf; whether the shard has them is not checked here.

    Raises:
        MalformedMessage: any field is out of its bounds.
    """
    first = bounded("first chunk", request.first_chunk, 0, MAX_CHUNKS)
    count = bounded("number of chunks", request.num_chunks, 1, MAX_CHUNKS)
    return shard_from_wire(request.name), range(first, first + count)
