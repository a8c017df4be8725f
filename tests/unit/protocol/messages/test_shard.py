"""Chunks of a file, their digests, and both over the wire."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import RunId, StepNumber
from swarm_ft.proto import snapshot_pb2 as pb
from swarm_ft.protocol.messages.shard import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    ChunkList,
    ShardName,
    list_chunks,
    num_chunks,
)
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.wire.shard_wire import (
    chunks_from_wire,
    chunks_to_wire,
    fetch_from_wire,
    fetch_to_wire,
    shard_from_wire,
    shard_to_wire,
)

NAME = ShardName(run_id=RunId("run-1"), step=StepNumber(42), layers=LayerRange(12, 24))


def cut(data):
    return [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]


@pytest.mark.parametrize(
    ("total_bytes", "count"),
    [(0, 0), (1, 1), (CHUNK_BYTES, 1), (CHUNK_BYTES + 1, 2), (3 * CHUNK_BYTES, 3)],
)
def test_a_list_says_how_a_file_is_cut(total_bytes, count):
    data = bytes(total_bytes)
    chunks = list_chunks(cut(data))
    assert (len(chunks), num_chunks(total_bytes)) == (count, count)
    assert chunks.total_bytes == total_bytes == sum(map(chunks.size_of, range(count)))
    assert all(chunks.holds(i, chunk) for i, chunk in enumerate(cut(data)))


def test_a_chunk_is_held_to_its_length_and_its_digest():
    chunks = list_chunks([bytes(CHUNK_BYTES), b"the rest"])
    assert chunks.holds(1, b"the rest")
    for wrong in (b"the rest!", b"the res", b"", b"the rust", bytes(CHUNK_BYTES)):
        assert not chunks.holds(1, wrong)
    assert not chunks.holds(0, b"the rest")


def test_the_digest_is_of_length_and_chunks_alone():
    one = list_chunks([bytes(CHUNK_BYTES), b"the rest"])
    size = (CHUNK_BYTES + 8).to_bytes(8, "little")
    assert one.digest() == digest_of(size, digest_of(bytes(CHUNK_BYTES)), digest_of(b"the rest"))
    others = [
        ChunkList(total_bytes=one.total_bytes - 1, digests=one.digests),
        ChunkList(total_bytes=one.total_bytes, digests=one.digests[::-1]),
        ChunkList(total_bytes=one.total_bytes, digests=one.digests[:1]),
    ]
    assert len({one.digest(), *(other.digest() for other in others)}) == 4


names = st.builds(
    ShardName,
    run_id=st.text("abc-09 é", min_size=1, max_size=64).map(RunId),
    step=st.integers(0, 1 << 31).map(StepNumber),
    layers=st.integers(0, 4095).flatmap(
        lambda start: st.integers(start + 1, 4096).map(lambda stop: LayerRange(start, stop))
    ),
)


@settings(derandomize=True, deadline=None)
@given(name=names, first=st.integers(0, MAX_CHUNKS - 1), count=st.integers(1, MAX_CHUNKS))
def test_names_and_requests_survive_the_wire(name, first, count):
    data = shard_to_wire(name).SerializeToString()
    assert shard_from_wire(pb.ShardName.FromString(data)) == name
    wanted = range(first, first + count)
    data = fetch_to_wire(name, wanted).SerializeToString()
    assert fetch_from_wire(pb.FetchRequest.FromString(data)) == (name, wanted)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_lists_survive_the_wire(count):
    digests = tuple(bytes([i]) * 16 for i in range(count))
    chunks = ChunkList(total_bytes=max(0, CHUNK_BYTES * count - 7), digests=digests)
    data = chunks_to_wire(chunks).SerializeToString()
    assert chunks_from_wire(pb.ChunkList.FromString(data)) == chunks


LIES = {
    "a digest too few": pb.ChunkList(total_bytes=CHUNK_BYTES + 1, digests=bytes(16)),
    "a digest too many": pb.ChunkList(total_bytes=1, digests=bytes(32)),
    "half a digest": pb.ChunkList(total_bytes=1, digests=bytes(8)),
    "digests of nothing": pb.ChunkList(total_bytes=0, digests=bytes(16)),
    "more than there is": pb.ChunkList(total_bytes=CHUNK_BYTES * MAX_CHUNKS + 1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_list_that_fits_no_file_is_refused(lie):
    with pytest.raises(MalformedMessage):
        chunks_from_wire(lie)


BAD_NAMES = {
    "no run": {"run_id": ""},
    "a path": {"run_id": "a/b"},
    "an endless run": {"run_id": "r" * 65},
    "an endless step": {"step": (1 << 31) + 1},
    "no layers": {"layers": None},
}


@pytest.mark.parametrize("changes", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_name_out_of_bounds_is_refused(changes):
    wire = shard_to_wire(NAME)
    fields = {"run_id": wire.run_id, "step": wire.step, "layers": wire.layers}
    bad = pb.ShardName(**{**fields, **changes})
    for read in (
        lambda: shard_from_wire(bad),
        lambda: fetch_from_wire(pb.FetchRequest(name=bad, num_chunks=1)),
    ):
        with pytest.raises(MalformedMessage):
            read()
