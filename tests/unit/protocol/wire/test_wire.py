"""Every message survives the wire, and no bytes make a reader raise another error.

The cases are drawn from the messages' own types and bounds, see `wire_values`: a new message or
field brings its own tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
from google.protobuf.message import Message
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from swarm_ft.build import described_version
from swarm_ft.errors import MalformedMessage, VersionMismatch
from swarm_ft.ids import Attempt, RunId
from swarm_ft.proto import coordinator_pb2
from swarm_ft.protocol.messages.control import PeerGoodbye, StageFailed
from swarm_ft.protocol.spec.bounds import MAX_TEXT_BYTES
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.convert import WireType, wire_type
from swarm_ft.transport.methods import COLLECTED, JOIN, LINK
from tests.draws import draws
from tests.unit.protocol.wire.wire_values import WIRES, kinds_of, out_of_bounds, values_of

KINDS = [
    pytest.param(wire, values_of(*kind), id=f"{wire.name}.{place}".rstrip("."))
    for wire in WIRES.values()
    for place, kind in kinds_of(wire).items()
]
every_kind = pytest.mark.parametrize(("wire", "values"), KINDS)
every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
BY_HAND = (LINK.request,)
few = settings(phases=[Phase.generate], derandomize=True, deadline=None, max_examples=draws(15))


@every_kind
@given(data=st.data())
@few
def test_every_message_round_trips(
    wire: WireType[Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    arrived = wire.from_bytes(wire.to_bytes(value))
    assert arrived == value
    assert type(arrived) is type(value)


@given(spec=values_of(*kinds_of(RUN_SPEC)[""]))
@few
def test_a_spec_keeps_its_digest_over_the_wire(spec: Any) -> None:
    assert RUN_SPEC.from_bytes(RUN_SPEC.to_bytes(spec)).digest() == spec.digest()


# ---- one field out of its bounds


@pytest.mark.parametrize(("peer_id", "num_bytes"), [("a/b", 16), ("", 16), ("a", 15), ("a", 17)])
def test_a_state_is_offered_to_names_with_proofs_as_long_as_a_digest(
    peer_id: str, num_bytes: int
) -> None:
    entry = coordinator_pb2.StateProof(peer_id=peer_id, proof=bytes(num_bytes))
    offered = coordinator_pb2.StageOffered(run_id="run", digest=bytes(16), proofs=[entry])
    with pytest.raises(MalformedMessage, match="proofs"):
        JOIN.request.from_bytes(coordinator_pb2.FromPeer(offered=offered).SerializeToString())


def put(message: Any, way: tuple[str, ...], value: Any) -> None:
    """Put a value at a path, into the first entry of repeated fields."""
    *owners, last = way
    for name in owners:
        inner = getattr(message, name)
        message = inner if isinstance(inner, Message) else (inner or [inner.add()])[0]
    if isinstance(value, list):
        message.ClearField(last)
        getattr(message, last).extend(value)
    else:
        setattr(message, last, value)


def hostile() -> Iterator[Any]:
    tried: set[Any] = set()
    for wire in WIRES.values():
        for place, kind in kinds_of(wire).items():
            if wire in BY_HAND and not place.endswith("hello"):
                continue  # see test_frames
            cases = [((place, *way) if place else way, v) for way, v in out_of_bounds(*kind, tried)]
            if cases:
                yield pytest.param(wire, values_of(*kind), cases, id=f"{wire.name}.{place}")


@pytest.mark.parametrize(("wire", "values", "cases"), list(hostile()))
@given(data=st.data())
@settings(derandomize=True, deadline=None, max_examples=2)
def test_a_field_out_of_its_bounds_is_refused_by_name(
    wire: WireType[Any],
    values: st.SearchStrategy[Any],
    cases: list[tuple[tuple[str, ...], Any]],
    data: st.DataObject,
) -> None:
    good = wire.to_wire(data.draw(values))
    for way, value in cases:
        message = wire.message()
        message.CopyFrom(good)
        put(message, way, value)
        words = refusal(wire, message.SerializeToString())
        assert "expected" in words, (way, value)
        assert any(name in words for name in way), (way, words)
        assert is_fit_for_logs(words)


# ---- several, anyhow


def fields_of(message: Message) -> Iterator[tuple[Message, Any]]:
    """Return every (message, field) that is set, at any depth."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for child in value if field.is_repeated else (value,):
                yield from fields_of(child)


BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(
        ["", "\x1b[2J", "\0", "x" * 2000, "../../etc", "aq99", "q4+ef", "q\u0664"]
    ),
    "bytes": st.binary(max_size=18),
    "double": st.sampled_from([float("nan"), float("inf"), -1.0, -0.0, 1.8e308, 5e-324]),
    "whole": st.sampled_from(
        [0, 1, 2, 3, 7, 255, 2**16, 2**17 + 1, 2**31 - 1, 2**31, 2**32, 2**64 - 1, -1]
    ),
}
KIND_OF_TYPE = {9: "string", 12: "bytes", 1: "double"}


def spoil(data: st.DataObject, message: Message) -> None:
    """Set one field that the message has to something hostile, or clear it."""
    found = list(fields_of(message))
    if not found:
        return
    owner, field = data.draw(st.sampled_from(found))
    if field.message_type is not None or data.draw(st.integers(0, 4)) == 0:
        owner.ClearField(field.name)
        return
    value = data.draw(BY_TYPE[KIND_OF_TYPE.get(field.type, "whole")])
    try:
        if field.is_repeated:
            getattr(owner, field.name).append(value)
        else:
            setattr(owner, field.name, value)
    except (ValueError, OverflowError):
        owner.ClearField(field.name)  # the value does not fit the field's type


def is_fit_for_logs(text: str) -> bool:
    return text.isprintable() and len(text) < 600


def refusal(wire: WireType[Any], data: bytes) -> str:
    """Return the reason of a refusal, or nothing; another error fails the test."""
    try:
        wire.from_bytes(data)
    except (MalformedMessage, VersionMismatch) as error:
        return error.message
    return ""


def read_or_refused(wire: WireType[Any], data: bytes) -> None:
    """Return the message that was read, which our own side could send."""
    words = refusal(wire, data)
    assert is_fit_for_logs(words)
    if not words:
        value = wire.from_bytes(data)
        assert wire.from_bytes(wire.to_bytes(value)) == value


@every_kind
@given(data=st.data())
@few
def test_a_spoilt_message_is_read_or_refused(
    wire: WireType[Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    message = wire.to_wire(data.draw(values))
    for _ in range(data.draw(st.integers(1, 3))):
        spoil(data, message)
    read_or_refused(wire, message.SerializeToString())


@every_wire
@given(raw=st.binary(max_size=60))
@few
def test_random_bytes_are_read_or_refused(wire: WireType[Any], raw: bytes) -> None:
    read_or_refused(wire, raw)


@every_kind
@given(data=st.data())
@few
def test_altered_bytes_are_read_or_refused(
    wire: WireType[Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    raw = bytearray(wire.to_bytes(data.draw(values)))
    for _ in range(data.draw(st.integers(1, 4)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    read_or_refused(wire, bytes(raw))


# ---- texts, versions, bodies


def test_texts_for_people_are_cut_and_freed_of_control_characters_both_ways() -> None:
    hostile = "\x1b[2J" + "x" * 2000 + "\udcff"
    failed = StageFailed(run_id=RunId("r"), attempt=Attempt(1), code="internal", message=hostile)
    cleaned = " [2J" + "x" * (MAX_TEXT_BYTES - 4)
    sent: Any = JOIN.request.to_wire(failed)
    assert sent.failed.message == cleaned
    wire: Any = JOIN.request.to_wire(replace(failed, message=""))
    wire.failed.message = hostile[:-1]
    assert JOIN.request.from_wire(wire) == replace(failed, message=cleaned)


@pytest.mark.parametrize("wire", [WIRES["FromPeer"], WIRES["ToPeer"], WIRES["LinkMessage"]])
def test_a_message_without_a_body_is_refused(wire: WireType[Any]) -> None:
    with pytest.raises(MalformedMessage, match="expected"):
        wire.from_bytes(b"")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (0, "peer alice has an older one: update peer alice (pip install -U swarm-ft, or"),
        (PROTOCOL_VERSION - 1, f"peer alice has {PROTOCOL_VERSION - 1}: update peer alice"),
        (PROTOCOL_VERSION + 1, f"alice has {PROTOCOL_VERSION + 1}: update the coordinator"),
    ],
)
def test_another_version_is_told_with_who_is_to_be_updated(version: int, words: str) -> None:
    with pytest.raises(VersionMismatch) as caught:
        VersionField("peer", "coordinator").check(version, "alice")
    us = f"the coordinator (swarm-ft {described_version()}) has protocol version "
    assert caught.value.message.startswith(f"{us}{PROTOCOL_VERSION}, ")
    assert words in caught.value.message


OPENERS = {
    *("PeerHello", "LinkHello", "SubmitHeader", "WatchRequest"),
    *("CancelRequest", "CollectedRequest", "StatusRequest", "EnrolRequest", "Reachable"),
    *("PlaceRequest", "LinkSample", "BeginText", "EventsRequest"),
    "RelayHello",
}


@every_wire
def test_what_opens_a_conversation_and_nothing_else_says_its_version(wire: WireType[Any]) -> None:
    for place, (kind, descriptor) in kinds_of(wire).items():
        field = descriptor.fields_by_number.get(15)
        assert (field is not None) == (kind.__name__ in OPENERS), kind
        if field is not None:
            assert field.name == "protocol_version"
            message: Any = wire.message()
            if place:
                getattr(message, place).SetInParent()
            with pytest.raises(VersionMismatch):  # though all other fields are wrong too
                wire.from_wire(message)


# ---- what is no message


@dataclass(frozen=True)
class Other:
    """A class without the fields of its message."""

    run: str = ""


@dataclass(frozen=True)
class CollectedRequest:
    """A class with the fields of its message, of a type that cannot travel."""

    run_id: Annotated[complex, "no way"]
    protocol_version: int


@pytest.mark.parametrize("kind", [Other, CollectedRequest, Other | PeerGoodbye])
def test_a_type_that_is_not_its_messages_is_our_own_mistake(kind: Any) -> None:
    message = COLLECTED.request.message
    if kind not in (Other, CollectedRequest):
        message = coordinator_pb2.SubmitPart
    with pytest.raises(TypeError):
        wire_type(kind, message)
