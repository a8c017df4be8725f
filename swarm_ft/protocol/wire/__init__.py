"""Conversion of messages to protobuf and to bytes, and back; no other package knows protobuf."""

from __future__ import annotations

from swarm_ft.proto import run_pb2
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire.convert import WireType, wire_type

RUN_SPEC: WireType[RunSpec] = wire_type(RunSpec, run_pb2.RunSpec)
"""Wire type of a RunSpec, as coordinators store it."""
