"""The rpcs of the project, read off the generated proto descriptors. It opens no call."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import coordinator_pb2 as coordinator
from swarm_ft.proto import peer_pb2 as peer
from swarm_ft.proto import snapshot_pb2 as snapshot
from swarm_ft.protocol.messages.client import (
    CancelRequest,
    CollectedRequest,
    RunEvent,
    RunStatus,
    StatusRequest,
    SubmitPart,
    SwarmStatus,
    WatchRequest,
)
from swarm_ft.protocol.messages.control import FromPeer, ToPeer
from swarm_ft.protocol.messages.enrolment import Enrolled, EnrolRequest
from swarm_ft.protocol.messages.link import LinkMessage
from swarm_ft.protocol.messages.meeting import FromMember, ToMember
from swarm_ft.protocol.messages.shard import ChunkList, ChunkPart, FetchRequest, ShardName
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.wire.convert import WireType, wire_type
from swarm_ft.protocol.wire.frames import LINK_MESSAGE
from swarm_ft.transport.base import Method

# ---- messages to bytes and back, bounded

MAX_MESSAGE_BYTES = 128 << 20
"""Largest message. Above the largest frame that a real model makes (8,192 tokens x 4,096
channels of float32), below what a hostile sender needs to exhaust a volunteer's memory."""

Some = TypeVar("Some")


def to_bytes(kind: WireType[Some], message: Some, max_bytes: int) -> bytes:
    """The message's bytes.

    Raises:
        MalformedMessage: they are more than `max_bytes`.
    """
    data = kind.to_bytes(message)
    if len(data) > max_bytes:
        raise MalformedMessage(f"a {kind.name} of {len(data)} bytes: expected {max_bytes} at most")
    return data


def from_bytes(kind: WireType[Some], data: bytes, remote: str) -> Some:
    """The message that `remote` wrote as `data`.

    Raises:
        MalformedMessage: the bytes are not such a message, or it has a field out of its bounds.
        VersionMismatch: it is in another version of the protocol.
    """
    try:
        return kind.from_bytes(data)
    except MalformedMessage as error:
        raise MalformedMessage(f"{remote} sent {error.message}") from error


def _method(
    service: ServiceDescriptor, name: str, request: object, reply: object
) -> Method[Any, Any]:
    # Names come from the descriptor, so they cannot differ from the proto; that the types have the
    # fields of its messages is seen to as they are put together.
    rpc = service.methods_by_name[name]
    return Method(
        service=service.full_name,
        name=rpc.name,
        request=_wire(request, rpc.input_type),
        reply=_wire(reply, rpc.output_type),
    )


def _wire(kind: object, descriptor: Descriptor) -> WireType[Any]:
    if kind is LinkMessage:
        return LINK_MESSAGE
    return wire_type(kind, GetMessageClass(descriptor))


_COORDINATOR: ServiceDescriptor = coordinator.DESCRIPTOR.services_by_name["Coordinator"]
_PEER: ServiceDescriptor = peer.DESCRIPTOR.services_by_name["Peer"]
_SNAPSHOTS: ServiceDescriptor = snapshot.DESCRIPTOR.services_by_name["Snapshots"]

JOIN: Method[FromPeer, ToPeer] = _method(_COORDINATOR, "Join", FromPeer, ToPeer)
SUBMIT: Method[SubmitPart, RunStatus] = _method(_COORDINATOR, "Submit", SubmitPart, RunStatus)
WATCH: Method[WatchRequest, RunEvent | PeerTimeline] = _method(
    _COORDINATOR, "Watch", WatchRequest, RunEvent | PeerTimeline
)
CANCEL: Method[CancelRequest, RunStatus] = _method(_COORDINATOR, "Cancel", CancelRequest, RunStatus)
COLLECTED: Method[CollectedRequest, RunStatus] = _method(
    _COORDINATOR, "Collected", CollectedRequest, RunStatus
)
STATUS: Method[StatusRequest, SwarmStatus] = _method(
    _COORDINATOR, "Status", StatusRequest, SwarmStatus
)
ENROL: Method[EnrolRequest, Enrolled] = _method(_COORDINATOR, "Enrol", EnrolRequest, Enrolled)
INTRODUCE: Method[FromMember, ToMember] = _method(_COORDINATOR, "Introduce", FromMember, ToMember)

LINK: Method[LinkMessage, LinkMessage] = _method(_PEER, "Link", LinkMessage, LinkMessage)

LIST_CHUNKS: Method[ShardName, ChunkList] = _method(_SNAPSHOTS, "ListChunks", ShardName, ChunkList)
FETCH_CHUNKS: Method[FetchRequest, ChunkPart] = _method(
    _SNAPSHOTS, "FetchChunks", FetchRequest, ChunkPart
)
