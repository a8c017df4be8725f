"""Who is told of whom: decisions of introductions, and what they let nobody do."""

from __future__ import annotations

from itertools import count

import pytest

from swarm_ft.coordinator.meetings import MAX_WANTS, MEETING_S, Meetings
from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.messages.meeting import (
    Linked,
    Meet,
    NoMeeting,
    Punch,
    Reachable,
    RelayPlace,
    Relays,
    Seen,
    ToMember,
    Want,
    Way,
)

RELAY = RelayPlace(endpoint="192.0.2.9:7000", probe_endpoint="192.0.2.9:7001")
HERE, THERE = "192.0.2.1", "192.0.2.2"


@pytest.fixture
def meetings() -> Meetings:
    numbers = count()
    return Meetings(
        sign=lambda ticket: b"caller" if ticket.is_caller else b"callee",
        draw=lambda size: next(numbers).to_bytes(size, "big"),
        relays=(RELAY,),
    )


def come(meetings: Meetings, name: str, host: str, *endpoints: str, varies: bool = False) -> None:
    reachable = Reachable(endpoints=endpoints, mapping_varies=varies)
    assert meetings.came(name, host, reachable, 0.0) == [(name, Relays(places=(RELAY,)))]


def meet(meetings: Meetings, one: str = "a", other: str = "b") -> dict[str, Meet]:
    said = dict(meetings.said(one, Want(name=other), 0.0))
    return {name: message for name, message in said.items() if isinstance(message, Meet)}


def refusal(said: list[tuple[str, ToMember]]) -> str:
    ((_, message),) = said
    assert isinstance(message, NoMeeting)
    return message.reason


def test_both_sides_are_told_and_each_of_the_other(meetings: Meetings) -> None:
    come(meetings, "a", HERE, f"{HERE}:1")
    come(meetings, "b", THERE, f"{THERE}:2")
    told = meet(meetings)
    assert told["a"].meeting == told["b"].meeting
    assert (told["a"].name, told["a"].is_caller, told["a"].ticket) == ("b", True, b"caller")
    assert (told["b"].name, told["b"].is_caller, told["b"].ticket) == ("a", False, b"callee")
    assert (told["a"].endpoints, told["b"].endpoints) == ((f"{THERE}:2",), (f"{HERE}:1",))
    assert told["a"].may_punch
    assert told["a"].relay == RELAY.endpoint


@pytest.mark.parametrize(
    ("here", "there", "endpoint", "is_told"),
    [
        (HERE, THERE, f"{THERE}:2", True),
        (HERE, THERE, "198.51.100.7:2", False),
        (HERE, THERE, "192.168.1.7:2", False),
        (HERE, HERE, "192.168.1.7:2", True),
        (HERE, HERE, "198.51.100.7:2", False),
        (HERE, HERE, "127.0.0.1:2", False),
        (HERE, HERE, "[fd00::7]:2", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:2", True),
    ],
)
def test_nobody_has_others_dialled(
    meetings: Meetings, here: str, there: str, endpoint: str, *, is_told: bool
) -> None:
    come(meetings, "a", here)
    come(meetings, "b", there, endpoint)
    assert (meet(meetings)["a"].endpoints == (endpoint,)) == is_told


def test_a_router_that_varies_is_not_punched(meetings: Meetings) -> None:
    come(meetings, "a", HERE)
    come(meetings, "b", THERE, varies=True)
    assert not meet(meetings)["a"].may_punch


def test_what_the_relay_sees_is_passed_on_within_the_meeting(meetings: Meetings) -> None:
    come(meetings, "a", HERE)
    come(meetings, "b", THERE)
    come(meetings, "c", "192.0.2.3")
    number = meet(meetings)["a"].meeting
    seen = Seen(meeting=number, address=f"{HERE}:999")
    assert meetings.said("a", seen, 1.0) == [("b", Punch(meeting=number, address=f"{HERE}:999"))]
    with pytest.raises(MalformedMessage, match="not of"):
        meetings.said("c", seen, 1.0)
    meetings.said("a", Linked(meeting=number, way=Way.PUNCHED, took_s=0.2), 1.0)
    assert meetings.ways == {("a", "b"): Way.PUNCHED}
    meetings.forget(MEETING_S)
    assert meetings.said("a", seen, MEETING_S) == []
    meetings.gone("b")
    assert meetings.ways == {}


def test_who_is_gone_is_not_waited_for(meetings: Meetings) -> None:
    come(meetings, "a", HERE)
    come(meetings, "b", THERE)
    meet(meetings)
    ((told, message),) = meetings.gone("b")
    assert told == "a"
    assert isinstance(message, NoMeeting)
    assert message.name == "b"
    come(meetings, "b", THERE)
    meet(meetings)
    assert [*meetings.gone("a"), *meetings.gone("b")] == []


def test_who_is_not_there_is_not_met_and_nobody_asks_without_end(meetings: Meetings) -> None:
    come(meetings, "a", HERE)
    assert refusal(meetings.said("a", Want(name="b"), 0.0)) == "it is not there"
    assert refusal(meetings.said("a", Want(name="a"), 0.0)) == "nobody meets itself"
    for _ in range(MAX_WANTS - 2):
        meetings.said("a", Want(name="b"), 0.0)
    assert "more than 4" in refusal(meetings.said("a", Want(name="b"), 0.0))
    assert refusal(meetings.said("a", Want(name="b"), 1.0)) == "it is not there"
