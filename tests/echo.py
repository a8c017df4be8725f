"""A call for tests of what carries calls: parts of bytes stream both ways."""

from swarm_ft.proto.snapshot_pb2 import ChunkPart
from swarm_ft.transport.base import Method

ECHO: Method[ChunkPart, ChunkPart] = Method(
    service="swarm_ft.v1.Test",
    name="Echo",
    request=ChunkPart,
    reply=ChunkPart,
    client_streaming=True,
    server_streaming=True,
)
