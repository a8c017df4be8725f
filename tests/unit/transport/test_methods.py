import typing

import pytest

from swarm_ft.proto import coordinator_pb2, peer_pb2, snapshot_pb2
from swarm_ft.transport import methods
from swarm_ft.transport.base import Method

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


def test_a_method_shows_as_service_and_name() -> None:
    assert str(methods.JOIN) == "Coordinator.Join"
    assert methods.JOIN.path == "/swarm_ft.v1.Coordinator/Join"
