import pytest

from swarm_ft.errors import MalformedMessage, VersionMismatch
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import CollectedRequest
from swarm_ft.transport.methods import COLLECTED, from_bytes, to_bytes
from tests.raw_calls import RAW

REQUEST = CollectedRequest(run_id=RunId("r"))


def test_a_message_survives() -> None:
    data = to_bytes(COLLECTED.request, REQUEST, 100)
    assert from_bytes(COLLECTED.request, data, "peer:1", 100) == REQUEST


def test_a_message_over_the_bound_is_refused_with_both_sizes() -> None:
    with pytest.raises(MalformedMessage, match="a BytesValue of 103 bytes: expected 100 at most"):
        to_bytes(RAW, bytes(101), 100)


def test_foreign_bytes_are_refused_and_name_their_sender() -> None:
    with pytest.raises(MalformedMessage, match="peer:1 sent 1 bytes that are not a CollectedReq"):
        from_bytes(COLLECTED.request, b"\xff", "peer:1", 100)


def test_a_hostile_field_is_refused_and_names_its_sender() -> None:
    data = COLLECTED.request.to_bytes(CollectedRequest(run_id=RunId("../r")))
    with pytest.raises(MalformedMessage, match=r"peer:1 sent CollectedRequest\.run_id: expected"):
        from_bytes(COLLECTED.request, data, "peer:1", 100)


def test_another_version_is_said_before_anything_else_is_read() -> None:
    data = COLLECTED.request.to_bytes(CollectedRequest(run_id=RunId("../r"), protocol_version=99))
    with pytest.raises(VersionMismatch, match=r"the client has 99: update the coordinator"):
        from_bytes(COLLECTED.request, data, "peer:1", 100)
