import typing
from typing import Any

import pytest

from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId
from swarm_ft.proto import coordinator_pb2, peer_pb2, snapshot_pb2
from swarm_ft.protocol.messages.client import (
    MAX_PAGE_MEMBERS,
    MAX_PAGE_RUNS,
    MemberStatus,
    RunPhase,
    RunSummary,
    SampleTokens,
    SubmitHeader,
    SwarmStatus,
)
from swarm_ft.protocol.messages.control import StageAssignment, StageReady
from swarm_ft.protocol.messages.reports import HeldBuffers, SampleSet
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, MAX_CHUNKS, ChunkList
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.spec.run_spec import MAX_BATCH_SIZE, MAX_SAMPLES, MAX_SEQ_LENGTH
from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.transport import methods
from swarm_ft.transport.base import Method
from tests.specs import run_spec

METHODS = {name: value for name, value in vars(methods).items() if isinstance(value, Method)}


def test_every_rpc_of_the_protos_has_a_constant() -> None:
    services = {
        **coordinator_pb2.DESCRIPTOR.services_by_name,
        **peer_pb2.DESCRIPTOR.services_by_name,
        **snapshot_pb2.DESCRIPTOR.services_by_name,
    }
    rpcs = {
        f"/{service.full_name}/{rpc.name}"
        for service in services.values()
        for rpc in service.methods
    }
    assert {method.path for method in METHODS.values()} == rpcs


@pytest.mark.parametrize("name", METHODS)
def test_the_types_written_down_are_those_that_are_converted(name: str) -> None:
    written = typing.get_args(typing.get_type_hints(methods)[name])
    assert written == (METHODS[name].request.kind, METHODS[name].reply.kind)


def largest(wire: WireType[Any], message: Any) -> int:
    return len(wire.to_bytes(message))


def test_the_largest_honest_messages_are_within_their_methods_bounds() -> None:
    everything = SampleSet(bytes(MAX_SAMPLES // 8 - 1) + b"\x80")
    inventories = tuple(HeldBuffers(boundary=BlockIndex(b), samples=everything) for b in (1, 2))
    ready = StageReady(
        run_id=RunId("r" * 64),
        attempt=Attempt(1 << 31),
        done=frozenset(map(MicrobatchIndex, range(MAX_BATCH_SIZE))),
        buffers=inventories,
    )
    assert largest(methods.JOIN.request, ready) <= methods.JOIN.request_bytes
    sample = SampleTokens(sample=SampleId(1), token_ids=bytes(4 * MAX_SEQ_LENGTH))
    assert largest(methods.SUBMIT.request, sample) <= methods.SUBMIT.request_bytes
    spec = run_spec(num_blocks=MAX_BLOCKS)
    header = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId("r" * 64))
    assert largest(methods.SUBMIT.request, header) <= methods.SUBMIT.request_bytes
    chunks = ChunkList(total_bytes=CHUNK_BYTES * MAX_CHUNKS, digests=(bytes(16),) * MAX_CHUNKS)
    assert largest(methods.LIST_CHUNKS.reply, chunks) <= methods.LIST_CHUNKS.reply_bytes
    run = RunSummary(
        run_id=RunId("r" * 64),
        phase=RunPhase.TRAINING,
        detail="x" * 1000,
        committed_steps=1,
        num_steps=1,
        spec_digest=bytes(16),
        assignments=(
            StageAssignment(
                peer_id=PeerId("p" * 64), layers=LayerRange(1, 2), endpoint=f"{'h' * 64}:65535"
            ),
        )
        * 1000,
    )
    member = MemberStatus(peer_id=PeerId("p" * 64), layers=None, idle="x" * 1000)
    page = SwarmStatus(members=(member,) * MAX_PAGE_MEMBERS, runs=(run,) * MAX_PAGE_RUNS)
    assert largest(methods.STATUS.reply, page) <= methods.STATUS.reply_bytes


def test_only_links_and_plans_carry_large_messages() -> None:
    """Other messages than the coordinator's must not fill a process' memory."""
    for method in METHODS.values():
        if method is not methods.LINK:
            assert method.request_bytes <= methods.MAX_CONTROL_BYTES
        if method not in (methods.LINK, methods.JOIN):
            assert method.reply_bytes <= methods.MAX_STATUS_BYTES


def test_a_method_shows_as_service_and_name() -> None:
    assert str(methods.JOIN) == "Coordinator.Join"
    assert methods.JOIN.path == "/swarm_ft.v1.Coordinator/Join"
