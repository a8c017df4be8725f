"""The rpcs of the project, read off the generated proto descriptors. It opens no call."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import coordinator_pb2 as coordinator
from swarm_ft.proto import peer_pb2 as peer
from swarm_ft.proto import snapshot_pb2 as snapshot
from swarm_ft.proto.link_pb2 import LinkMessage
from swarm_ft.transport.base import Method

# ---- messages to bytes and back, bounded

MAX_MESSAGE_BYTES = 128 << 20
"""Largest message. Above the largest frame that a real model makes (8,192 tokens x 4,096
channels of float32), below what a hostile sender needs to exhaust a volunteer's memory."""

Some = TypeVar("Some", bound=Message)


def to_bytes(message: Message, max_bytes: int) -> bytes:
    """The message's bytes.

    Raises:
        MalformedMessage: they are more than `max_bytes`.
    """
    data = message.SerializeToString()
    if len(data) > max_bytes:
        raise MalformedMessage(
            f"a {type(message).__name__} of {len(data)} bytes: expected {max_bytes} at most"
        )
    return data


def from_bytes(kind: type[Some], data: bytes, remote: str) -> Some:
    """The message of class `kind` that `remote` wrote as `data`.

    Raises:
        MalformedMessage: the bytes are not such a message.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise MalformedMessage(
            f"{remote} sent {len(data)} bytes that are not a {kind.__name__}"
        ) from None


def _method(service: ServiceDescriptor, name: str) -> Method[Any, Any]:
    # Names and classes come from the descriptor, so they cannot differ from the proto; the
    # types written below are for readers and the type checker, and a test compares them.
    rpc = service.methods_by_name[name]
    return Method(
        service=service.full_name,
        name=rpc.name,
        request=GetMessageClass(rpc.input_type),
        reply=GetMessageClass(rpc.output_type),
        client_streaming=rpc.client_streaming,
        server_streaming=rpc.server_streaming,
    )


_COORDINATOR: ServiceDescriptor = coordinator.DESCRIPTOR.services_by_name["Coordinator"]
_PEER: ServiceDescriptor = peer.DESCRIPTOR.services_by_name["Peer"]
_SNAPSHOTS: ServiceDescriptor = snapshot.DESCRIPTOR.services_by_name["Snapshots"]

JOIN: Method[coordinator.FromPeer, coordinator.ToPeer] = _method(_COORDINATOR, "Join")
SUBMIT: Method[coordinator.SubmitPart, coordinator.RunStatus] = _method(_COORDINATOR, "Submit")
WATCH: Method[coordinator.WatchRequest, coordinator.RunEvent] = _method(_COORDINATOR, "Watch")
CANCEL: Method[coordinator.CancelRequest, coordinator.RunStatus] = _method(_COORDINATOR, "Cancel")
COLLECTED: Method[coordinator.CollectedRequest, coordinator.RunStatus] = _method(
    _COORDINATOR, "Collected"
)
STATUS: Method[coordinator.StatusRequest, coordinator.SwarmStatus] = _method(_COORDINATOR, "Status")

LINK: Method[LinkMessage, LinkMessage] = _method(_PEER, "Link")

LIST_CHUNKS: Method[snapshot.ShardName, snapshot.ChunkList] = _method(_SNAPSHOTS, "ListChunks")
FETCH_CHUNKS: Method[snapshot.FetchRequest, snapshot.ChunkPart] = _method(_SNAPSHOTS, "FetchChunks")
