import pytest

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto.snapshot_pb2 import ChunkPart
from swarm_ft.transport.methods import from_bytes, to_bytes


def test_a_message_survives():
    message = ChunkPart(data=b"x")
    assert from_bytes(ChunkPart, to_bytes(message, 100), "peer:1") == message


def test_a_message_over_the_bound_is_refused_with_both_sizes():
    with pytest.raises(MalformedMessage, match=r"a ChunkPart of 103 bytes: expected 100 at most"):
        to_bytes(ChunkPart(data=bytes(101)), 100)


def test_foreign_bytes_are_refused_and_name_their_sender():
    with pytest.raises(MalformedMessage, match=r"peer:1 sent 1 bytes that are not a ChunkPart"):
        from_bytes(ChunkPart, b"\xff", "peer:1")
