"""Chunks of a file, their digests, and both over the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm_ft.digest import digest_of
from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.shard import (
    CHUNK_BYTES,
    ChunkList,
    ShardName,
    list_chunks,
    num_chunks,
    proof_by,
)
from swarm_ft.protocol.spec.layers import LayerRange

NAME = ShardName(run_id=RunId("run-1"), step=StepNumber(42), layers=LayerRange(12, 24))


def cut(data: bytes) -> list[bytes]:
    return [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]


@pytest.mark.parametrize(
    ("total_bytes", "count"),
    [(0, 0), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (3 * CHUNK_BYTES, 3)],
)
def test_a_list_says_how_a_file_is_cut(total_bytes: int, count: int) -> None:
    data = bytes(total_bytes)
    chunks = list_chunks(cut(data))
    assert (len(chunks), num_chunks(total_bytes)) == (count, count)
    assert chunks.total_bytes == total_bytes == sum(map(chunks.size_of, range(count)))
    assert all(chunks.holds(i, chunk) for i, chunk in enumerate(cut(data)))


def test_a_chunk_is_held_to_its_length_and_its_digest() -> None:
    chunks = list_chunks([bytes(CHUNK_BYTES), b"the rest"])
    assert chunks.holds(1, b"the rest")
    for wrong in (b"the rest!", b"the res", b"", b"the rust", bytes(CHUNK_BYTES)):
        assert not chunks.holds(1, wrong)
    assert not chunks.holds(0, b"the rest")


def test_the_digest_is_of_length_and_chunks_alone() -> None:
    one = list_chunks([bytes(CHUNK_BYTES), b"the rest"])
    size = (CHUNK_BYTES + 8).to_bytes(8, "little")
    assert one.digest() == digest_of(size, digest_of(bytes(CHUNK_BYTES)), digest_of(b"the rest"))
    others = [
        ChunkList(total_bytes=one.total_bytes - 1, digests=one.digests),
        ChunkList(total_bytes=one.total_bytes, digests=one.digests[::-1]),
        ChunkList(total_bytes=CHUNK_BYTES, digests=one.digests[:1]),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 4


def test_a_proof_is_of_all_bytes_the_shard_and_the_peer() -> None:
    name = ShardName(run_id=RunId("run-1"), step=StepNumber(2), layers=LayerRange(0, 3))

    def proof(peer: str, name: ShardName, data: bytes) -> bytes:
        made = proof_by(PeerId(peer), name)
        list_chunks(cut(data), made)
        return made.digest()

    own = proof("a", name, b"the state")
    assert own == proof("a", name, b"the state")
    others = {
        proof("b", name, b"the state"),
        proof("a", replace(name, step=StepNumber(3)), b"the state"),
        proof("a", name, b"the stat"),
        proof("a", name, b""),
        list_chunks([b"the state"]).digest(),
        digest_of(b"the state"),
    }
    assert len(others) == 6
    assert own not in others


LIES = {
    "a digest too few": (CHUNK_BYTES + 1, 1),
    "a digest too many": (1, 2),
    "digests of nothing": (0, 1),
}


@pytest.mark.parametrize(("total_bytes", "count"), LIES.values(), ids=LIES)
def test_a_list_that_fits_no_file_is_refused(total_bytes: int, count: int) -> None:
    with pytest.raises(MalformedMessage, match=f"digests of chunks .*, got {count}"):
        ChunkList(total_bytes=total_bytes, digests=(bytes(16),) * count)
