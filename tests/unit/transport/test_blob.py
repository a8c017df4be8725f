"""Blobs arrive whole and are what their digest says, or they are an error."""

from contextlib import asynccontextmanager

import pytest

from swarm_ft.errors import BadFrame, MalformedMessage, OutOfTurn
from swarm_ft.proto.peer_pb2 import BlobHeader, BlobPart
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.transport.blob import (
    PART_BYTES,
    BlobName,
    receive_bytes,
    receive_file,
    receive_header,
    send_bytes,
    send_file,
)
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.memory import MemoryTransport
from swarm_ft.transport.methods import TIED_GRADIENT

NAME = BlobName(run_id="run", attempt=3, step=7)
SIZES = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES]
LIMIT = 4 * PART_BYTES


@pytest.fixture(params=["memory", "grpc"])
def transport(request):
    return MemoryTransport() if request.param == "memory" else GrpcTransport()


@asynccontextmanager
async def a_call(transport, handler):
    """A client's stream to a server that does what `handler` does."""
    server = await transport.serve("127.0.0.1", 0, {TIED_GRADIENT: handler})
    channel = transport.connect(server.endpoint)
    try:
        yield channel.open(TIED_GRADIENT)
    finally:
        await channel.close()
        await server.stop()


def content(size):
    return bytes(i * 7 % 251 for i in range(min(size, 1000))) * (size // 1000 + 1)


def saying(*parts):
    async def handle(stream):
        for part in parts:
            await stream.send(part)

    return handle


def header(size, digest, **changes):
    fields = {"run_id": "run", "attempt": 3, "step": 7, "total_bytes": size, "digest": digest}
    return BlobPart(header=BlobHeader(**fields | changes))


def honest_header(data):
    return header(len(data), digest_of(data))


@pytest.mark.parametrize("size", SIZES)
async def test_bytes_arrive_as_they_were_sent(transport, size):
    data = content(size)[:size]

    async def handle(stream):
        await send_bytes(stream, NAME, data)

    async with a_call(transport, handle) as stream:
        blob = await receive_header(stream, max_bytes=LIMIT)
        assert (blob.name, blob.total_bytes, blob.digest) == (NAME, size, digest_of(data))
        assert await receive_bytes(stream, blob) == data
        assert await stream.receive() is None


@pytest.mark.parametrize("size", SIZES)
async def test_a_file_arrives_as_it_was_and_tells_its_progress(transport, tmp_path, size):
    data = content(size)[:size]
    (tmp_path / "sent").write_bytes(data)

    async def handle(stream):
        await send_file(stream, NAME, tmp_path / "sent")

    progress = []
    async with a_call(transport, handle) as stream:
        blob = await receive_header(stream, max_bytes=LIMIT)
        await receive_file(stream, blob, tmp_path / "received", progress.append)
    assert (tmp_path / "received").read_bytes() == data
    assert sum(progress) == size
    assert all(0 < part <= PART_BYTES for part in progress)


async def test_a_file_and_its_bytes_are_the_same_blob(transport, tmp_path):
    (tmp_path / "sent").write_bytes(b"some weights")
    heard = []

    async def handle(stream):
        await send_file(stream, NAME, tmp_path / "sent")
        await send_bytes(stream, NAME, b"some weights")

    async with a_call(transport, handle) as stream:
        while (part := await stream.receive()) is not None:
            heard.append(part)
    assert heard[:2] == heard[2:]


DATA = b"0123456789"
TORN = {
    "ended at once": [],
    "ended midway": [BlobPart(data=DATA[:9])],
    "another header midway": [BlobPart(data=DATA[:9]), honest_header(DATA)],
    "an empty part": [BlobPart(data=DATA[:9]), BlobPart(data=b""), BlobPart(data=DATA[9:])],
    "too long a part": [BlobPart(data=DATA + b"!")],
    "too long by its last part": [BlobPart(data=DATA[:9]), BlobPart(data=DATA[9:] + b"!")],
}


@pytest.mark.parametrize("parts", TORN.values(), ids=TORN)
async def test_a_torn_or_overlong_blob_is_broken(transport, tmp_path, parts):
    for receive in (receive_bytes, lambda *args: receive_file(*args, tmp_path / "partial")):
        async with a_call(transport, saying(honest_header(DATA), *parts)) as stream:
            blob = await receive_header(stream, max_bytes=LIMIT)
            with pytest.raises(BadFrame, match="blob of 10 bytes broke off"):
                await receive(stream, blob)


@pytest.mark.parametrize("data", [b"", DATA], ids=["empty", "full"])
async def test_other_bytes_than_the_digests_are_broken(transport, data):
    parts = [BlobPart(data=data)] if data else []
    async with a_call(transport, saying(header(len(data), bytes(16)), *parts)) as stream:
        blob = await receive_header(stream, max_bytes=LIMIT)
        with pytest.raises(BadFrame, match="not those of its digest"):
            await receive_bytes(stream, blob)


async def test_a_failed_file_holds_nothing_that_was_not_sent(transport, tmp_path):
    lie = honest_header(DATA), BlobPart(data=DATA[:4])
    async with a_call(transport, saying(*lie)) as stream:
        blob = await receive_header(stream, max_bytes=LIMIT)
        with pytest.raises(BadFrame):
            await receive_file(stream, blob, tmp_path / "partial")
    assert (tmp_path / "partial").read_bytes() == DATA[:4]


BAD_HEADERS = {
    "too large": (header(LIMIT + 1, bytes(16)), MalformedMessage, f"0 to {LIMIT}, got {LIMIT + 1}"),
    "absurdly large": (header((1 << 64) - 1, bytes(16)), MalformedMessage, "blob: expected"),
    "no digest": (header(1, b""), MalformedMessage, "digest: expected 16 bytes, got 0"),
    "a long digest": (header(1, bytes(17)), MalformedMessage, "got 17"),
    "no run": (header(1, bytes(16), run_id=""), MalformedMessage, "run id"),
    "an endless run id": (header(1, bytes(16), run_id="r" * 65), MalformedMessage, "run id"),
    "a run id with a line break": (
        header(1, bytes(16), run_id="r\nforged"),
        MalformedMessage,
        "run id",
    ),
    "data first": (BlobPart(data=b"x"), OutOfTurn, "expected a blob's header"),
    "an empty message": (BlobPart(), OutOfTurn, "expected a blob's header"),
}


@pytest.mark.parametrize(("first", "error", "match"), BAD_HEADERS.values(), ids=BAD_HEADERS)
async def test_a_bad_header_is_refused_before_any_data(transport, first, error, match):
    async with a_call(transport, saying(first)) as stream:
        with pytest.raises(error, match=match):
            await receive_header(stream, max_bytes=LIMIT)


async def test_a_stream_without_a_blob_is_out_of_turn(transport):
    async with a_call(transport, saying()) as stream:
        with pytest.raises(OutOfTurn, match="expected a blob's header"):
            await receive_header(stream, max_bytes=LIMIT)
