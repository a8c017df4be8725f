"""Rpcs of the project, from the generated proto descriptors. The module opens no call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import coordinator_pb2 as coordinator
from swarm_ft.proto import peer_pb2 as peer
from swarm_ft.proto import snapshot_pb2 as snapshot
from swarm_ft.protocol.messages.capacity import LinkEcho, LinkSample, Placed, PlaceRequest
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
from swarm_ft.protocol.messages.events import EventsRequest, SwarmEvents
from swarm_ft.protocol.messages.generation import MAX_VALUES_BYTES, FromStage, ToStage
from swarm_ft.protocol.messages.link import LinkMessage
from swarm_ft.protocol.messages.meeting import FromMember, FromRelay, RelayWelcome, ToMember
from swarm_ft.protocol.messages.shard import ChunkList, ChunkPart, FetchRequest, ShardName
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.wire.convert import WireType, wire_type
from swarm_ft.protocol.wire.frames import LINK_MESSAGE
from swarm_ft.transport.base import Method

# ---- messages to bytes and back, bounded

SMALL = 64 << 10
"""Bytes of a request that names something, or of a frame without its tensor."""
MAX_MESSAGE_BYTES = 8192 * 4096 * 4 + SMALL
"""Bytes of the largest message: a frame of 8,192 tokens x 4,096 channels of float32.

Real models make less, and a hostile sender needs more to exhaust a volunteer's memory.
"""
MAX_CONTROL_BYTES = 5 << 20
"""Bytes of a message from a peer to the coordinator.

It has at most two bitmaps of 2 MiB, of the peer's buffers, and the numbers of a step's
microbatches.
"""
MAX_PART_BYTES = 1 << 20
"""Bytes of a part of a job: its header with a digest for each block, or samples of 512 KiB each."""
MAX_STATUS_BYTES = 8 << 20
"""Bytes of a run's options and peers, or of a page of the swarm's."""
MAX_LIST_BYTES = 6 << 20
"""Bytes of the digests of all chunks of the largest stage: 2^18 of them."""
MAX_CHUNK_PART_BYTES = 1 << 20
"""Bytes of a part of a stage's state."""

BYTES = {
    "Join": (MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES),
    "Submit": (MAX_PART_BYTES, MAX_STATUS_BYTES),
    "Watch": (SMALL, MAX_STATUS_BYTES),
    "Cancel": (SMALL, MAX_STATUS_BYTES),
    "Collected": (SMALL, MAX_STATUS_BYTES),
    "Status": (SMALL, MAX_STATUS_BYTES),
    "Events": (SMALL, MAX_PART_BYTES),
    "Enrol": (SMALL, SMALL),
    "Introduce": (SMALL, SMALL),
    "Place": (MAX_PART_BYTES, MAX_PART_BYTES),
    "MeasureLink": (SMALL, SMALL),
    "Relay": (SMALL, SMALL),
    "Link": (MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES),
    "Generate": (MAX_VALUES_BYTES + SMALL, MAX_VALUES_BYTES + SMALL),
    "ListChunks": (SMALL, MAX_LIST_BYTES),
    "FetchChunks": (SMALL, MAX_CHUNK_PART_BYTES),
}
"""Bytes of the largest message to each method's server, and to its client.

A larger one is refused unread, because messages of many small fields take twenty times their size
in memory. gRPC itself refuses messages above the largest of all methods that a server serves.
"""

Some = TypeVar("Some")


class Encoded(NamedTuple):
    """A message as bytes, for handlers that send one to many receivers."""

    data: bytes


def to_bytes(kind: WireType[Some], message: Some | Encoded, max_bytes: int) -> bytes:
    """Return the message's bytes.

    Raises:
        MalformedMessage: They are more than `max_bytes`.
    """
    data = message.data if isinstance(message, Encoded) else kind.to_bytes(message)
    if len(data) > max_bytes:
        raise MalformedMessage(f"a {kind.name} of {len(data)} bytes: expected {max_bytes} at most")
    return data


def from_bytes(kind: WireType[Some], data: bytes, remote: str, max_bytes: int) -> Some:
    """Return the message that `remote` wrote as `data`.

    Raises:
        MalformedMessage: It is larger than `max_bytes`, the bytes are not such a message, or it
            has a field out of its bounds.
        VersionMismatch: It is in another version of the protocol.
    """
    if len(data) > max_bytes:
        raise MalformedMessage(
            f"{remote} sent a {kind.name} of {len(data)} bytes: expected {max_bytes} at most"
        )
    try:
        return kind.from_bytes(data)
    except MalformedMessage as error:
        raise MalformedMessage(f"{remote} sent {error.message}") from error


def _method(
    service: ServiceDescriptor, name: str, request: object, reply: object
) -> Method[Any, Any]:
    # Names come from the descriptor, so they cannot differ from the proto. The tests build all
    # methods, and so check that the types have the fields of the proto's messages.
    rpc = service.methods_by_name[name]
    request_bytes, reply_bytes = BYTES[name]
    return Method(
        service=service.full_name,
        name=rpc.name,
        request=_wire(request, rpc.input_type),
        reply=_wire(reply, rpc.output_type),
        request_bytes=request_bytes,
        reply_bytes=reply_bytes,
    )


def _wire(kind: object, descriptor: Descriptor) -> WireType[Any]:
    if kind is LinkMessage:
        return LINK_MESSAGE
    message = GetMessageClass(descriptor)

    @functools.cache
    def made() -> WireType[Any]:
        return wire_type(kind, message)

    # Built at the first use: a command with one request need not wait for all.
    return WireType(kind, message, lambda v: made().to_wire(v), lambda m: made().from_wire(m))


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
EVENTS: Method[EventsRequest, SwarmEvents] = _method(
    _COORDINATOR, "Events", EventsRequest, SwarmEvents
)
ENROL: Method[EnrolRequest, Enrolled] = _method(_COORDINATOR, "Enrol", EnrolRequest, Enrolled)
INTRODUCE: Method[FromMember, ToMember] = _method(_COORDINATOR, "Introduce", FromMember, ToMember)
PLACE: Method[PlaceRequest, Placed] = _method(_COORDINATOR, "Place", PlaceRequest, Placed)
MEASURE_LINK: Method[LinkSample, LinkEcho] = _method(
    _COORDINATOR, "MeasureLink", LinkSample, LinkEcho
)
RELAY: Method[FromRelay, RelayWelcome] = _method(_COORDINATOR, "Relay", FromRelay, RelayWelcome)

LINK: Method[LinkMessage, LinkMessage] = _method(_PEER, "Link", LinkMessage, LinkMessage)
GENERATE: Method[ToStage, FromStage] = _method(_PEER, "Generate", ToStage, FromStage)

LIST_CHUNKS: Method[ShardName, ChunkList] = _method(_SNAPSHOTS, "ListChunks", ShardName, ChunkList)
FETCH_CHUNKS: Method[FetchRequest, ChunkPart] = _method(
    _SNAPSHOTS, "FetchChunks", FetchRequest, ChunkPart
)
