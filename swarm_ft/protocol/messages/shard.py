"""Shard: one stage's state or result as a file, with its name and its chunks. No I/O, no torch.

A receiver that knows a shard's digest (16 bytes) can fetch its list of chunks from a stranger, and
each chunk from another one: the digest checks the list, and the list checks the chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from swarm_ft.digest import BytesLike, KeyedDigest, digest_of
from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.spec.bounds import Digest, Length, Range
from swarm_ft.protocol.spec.layers import LayerRange

CHUNK_BYTES = 4 << 20
"""Bytes of a chunk, which is checked and fetched as a whole: a second or so of a home uplink."""
MAX_CHUNKS = 1 << 18
"""Chunks of a shard of 1 TiB; its list of digests has 4 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardName:
    """Name of a stage's state.

    Attributes:
        step: Steps in the state; the first step that it lacks has this number.
        layers: Blocks of the stage.
        is_result: Whether it has the trained weights for a client alone, and no optimizer.
        is_saved: Whether it is a snapshot's file of the stage, byte for byte.
    """

    run_id: RunId
    step: StepNumber
    layers: LayerRange
    is_result: bool = False
    is_saved: bool = False

    def __str__(self) -> str:
        what = "result of " if self.is_result else "snapshot of " if self.is_saved else ""
        return f"{what}run {self.run_id}, step {self.step}, layers {self.layers}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """Digest and length that any source's file has to match; see `ChunkList.digest`."""

    digest: Digest
    total_bytes: Annotated[int, Range(0, CHUNK_BYTES * MAX_CHUNKS)]

    def __str__(self) -> str:
        return f"{self.total_bytes} bytes with digest {self.digest.hex()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptShard:
    """A stage of a snapshot at a keeper, with the digest of its file."""

    name: ShardName
    digest: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkList:
    """A file as chunks of CHUNK_BYTES; the last one may be shorter.

    Attributes:
        total_bytes: Bytes of the whole file.
        digests: Digests of the chunks.
    """

    total_bytes: Annotated[int, Range(0, CHUNK_BYTES * MAX_CHUNKS)]
    digests: Annotated[tuple[Digest, ...], Length(MAX_CHUNKS)]

    def __post_init__(self) -> None:
        if len(self.digests) != num_chunks(self.total_bytes):
            raise MalformedMessage(
                f"expected {num_chunks(self.total_bytes)} digests of chunks for "
                f"{self.total_bytes} bytes, got {len(self.digests)}"
            )

    def __len__(self) -> int:
        return len(self.digests)

    def digest(self) -> bytes:
        """Return the whole file's digest: of its length and its chunks' digests."""
        return digest_of(self.total_bytes.to_bytes(8, "little"), *self.digests)

    @property
    def file(self) -> ShardFile:
        """Digest and length of the whole file."""
        return ShardFile(digest=self.digest(), total_bytes=self.total_bytes)

    def size_of(self, index: int) -> int:
        """Return the bytes of a chunk."""
        return min(CHUNK_BYTES, self.total_bytes - index * CHUNK_BYTES)

    def holds(self, index: int, chunk: BytesLike) -> bool:
        """Whether these are the bytes of that chunk."""
        return len(chunk) == self.size_of(index) and digest_of(chunk) == self.digests[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    """Member to source: a request for chunks of a shard, which the source has to check."""

    name: ShardName
    first_chunk: Annotated[int, Range(0, MAX_CHUNKS)]
    num_chunks: Annotated[int, Range(1, MAX_CHUNKS)]

    @property
    def chunks(self) -> range:
        """Numbers of the chunks."""
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPart:
    """Source to member: the next bytes of a chunk."""

    chunk: int
    data: bytes


def num_chunks(total_bytes: int) -> int:
    """Return the number of chunks of a file."""
    return -(-total_bytes // CHUNK_BYTES)


def proof_by(peer_id: PeerId, name: ShardName) -> KeyedDigest:
    """Return the digest that proves, after all bytes of a shard, that a peer has it.

    The shard's digest proves nothing, since its receiver learns it beforehand; nor does another
    peer's proof. The proof has no attempt in it: an offer outlives attempts.
    """
    return KeyedDigest(b"proof", peer_id.encode(), str(name).encode())


def list_chunks(chunks: Iterable[BytesLike], *digests_too: KeyedDigest) -> ChunkList:
    """Return the list of a file's chunks, each of CHUNK_BYTES but the last.

    Args:
        chunks: Chunks of the file.
        digests_too: Digests that receive the bytes in the same pass.
    """
    total_bytes, digests = 0, []
    for chunk in chunks:
        for digest in digests_too:
            digest.update(chunk)
        total_bytes += len(chunk)
        digests.append(digest_of(chunk))
    return ChunkList(total_bytes=total_bytes, digests=tuple(digests))
