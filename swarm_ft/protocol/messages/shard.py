"""A shard: one stage's state or result as a file, its name and its chunks. No I/O, no torch.

Whoever knows a shard's digest (16 bytes) can take its list of chunks from a stranger, and with the
list each chunk from another one: the list is checked against the digest, a chunk against the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.spec.bounds import Digest, Length, Range
from swarm_ft.protocol.spec.digest import BytesLike, KeyedDigest, digest_of
from swarm_ft.protocol.spec.layers import LayerRange

CHUNK_BYTES = 4 << 20
"""What is checked, and asked for again, at once; a second or so of a home uplink."""
MAX_CHUNKS = 1 << 18
"""A shard of 1 TiB; its list of digests has 4 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardName:
    """Which state it is.

    Attributes:
        step: how many steps are in it; the first step that it lacks has this number.
        layers: the stage's blocks.
        is_result: the trained weights as a client gets them, instead of all to go on from.
        is_saved: the file that a snapshot has of the stage, as it lies there.
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
    """What a shard must be, whoever gives it; see `ChunkList.digest`."""

    digest: Digest
    total_bytes: Annotated[int, Range(0, CHUNK_BYTES * MAX_CHUNKS)]

    def __str__(self) -> str:
        return f"{self.total_bytes} bytes with digest {self.digest.hex()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptShard:
    """A stage of a snapshot that a peer keeps, and which of the files of that name."""

    name: ShardName
    digest: Digest


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkList:
    """A file as chunks of CHUNK_BYTES, the last one as long as it happens to be.

    Attributes:
        total_bytes: of the whole file.
        digests: of the chunks.
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
        """The whole file's digest: of its length and its chunks' digests."""
        return digest_of(self.total_bytes.to_bytes(8, "little"), *self.digests)

    @property
    def file(self) -> ShardFile:
        """What the whole file is checked against."""
        return ShardFile(digest=self.digest(), total_bytes=self.total_bytes)

    def size_of(self, index: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK_BYTES, self.total_bytes - index * CHUNK_BYTES)

    def holds(self, index: int, chunk: BytesLike) -> bool:
        """Whether these are the bytes of that chunk."""
        return len(chunk) == self.size_of(index) and digest_of(chunk) == self.digests[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRequest:
    """Some chunks of a shard, asked for; whether the shard has them is not checked here."""

    name: ShardName
    first_chunk: Annotated[int, Range(0, MAX_CHUNKS)]
    num_chunks: Annotated[int, Range(1, MAX_CHUNKS)]

    @property
    def chunks(self) -> range:
        """Their numbers."""
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPart:
    """A part of a chunk: the bytes that follow those of the part before."""

    chunk: int
    data: bytes


def num_chunks(total_bytes: int) -> int:
    """Chunks of a file of so many bytes."""
    return -(-total_bytes // CHUNK_BYTES)


def proof_by(peer_id: PeerId, name: ShardName) -> KeyedDigest:
    """What shows that a peer has a shard, once it was given all of its bytes.

    The shard's digest shows nothing, since who fetches it is told that beforehand; so is no other
    peer's proof. It has no attempt in it: an offer outlives attempts.
    """
    return KeyedDigest(b"proof", peer_id.encode(), str(name).encode())


def list_chunks(chunks: Iterable[BytesLike], *digests_too: KeyedDigest) -> ChunkList:
    """The list of a file that is given chunk after chunk, each of CHUNK_BYTES but the last.

    Args:
        chunks: of the file.
        digests_too: are given its bytes in the same pass.
    """
    total_bytes, digests = 0, []
    for chunk in chunks:
        for digest in digests_too:
            digest.update(chunk)
        total_bytes += len(chunk)
        digests.append(digest_of(chunk))
    return ChunkList(total_bytes=total_bytes, digests=tuple(digests))
