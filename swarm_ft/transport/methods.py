"""The rpcs of the project, read off the generated proto descriptors. It opens no call."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_ft.proto import coordinator_pb2 as coordinator
from swarm_ft.proto import peer_pb2 as peer
from swarm_ft.proto import snapshot_pb2 as snapshot
from swarm_ft.proto.boundary_pb2 import BoundaryMessage
from swarm_ft.proto.reduce_pb2 import ReduceMessage
from swarm_ft.transport.base import Method


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

BOUNDARY: Method[BoundaryMessage, BoundaryMessage] = _method(_PEER, "Boundary")
ALL_REDUCE: Method[ReduceMessage, ReduceMessage] = _method(_PEER, "AllReduce")
TIED_GRADIENT: Method[peer.BlobPart, peer.BlobPart] = _method(_PEER, "TiedGradient")
WEIGHTS: Method[peer.WeightsRequest, peer.BlobPart] = _method(_PEER, "Weights")

LIST_CHUNKS: Method[snapshot.ShardName, snapshot.ChunkList] = _method(_SNAPSHOTS, "ListChunks")
FETCH_CHUNKS: Method[snapshot.FetchRequest, snapshot.ChunkPart] = _method(_SNAPSHOTS, "FetchChunks")
