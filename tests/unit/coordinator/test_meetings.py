"""Decisions about introductions, and the abuse that they prevent."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from swarm_ft.coordinator.facts.connectivity import Connectivity, NatInfo
from swarm_ft.coordinator.meetings import (
    BUSY_MEETINGS,
    MAX_TRIALS,
    MAX_UNDER_WAY,
    MAX_WANTS,
    MAX_WAYS,
    MAX_WITH_ONE,
    MEETING_S,
    UNDER_WAY_S,
    Meetings,
)
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.errors import MalformedMessage
from swarm_ft.identity.tickets import Ticket
from swarm_ft.protocol.messages.meeting import (
    LegSeen,
    Linked,
    Meet,
    MeetingRequest,
    NoMeeting,
    Punch,
    Reachable,
    RelayDistance,
    RelayDistances,
    RelayPlace,
    Relays,
    ToMember,
    Way,
)

RELAY = RelayPlace(endpoint="192.0.2.9:7000", probe_endpoint="192.0.2.9:7001")
OWN_HOST, FAR_HOST = "192.0.2.1", "192.0.2.2"


@pytest.fixture
def meetings() -> Meetings:
    numbers = count()
    return Meetings(
        sign=lambda ticket: b"caller" if ticket.is_caller else b"callee",
        draw=lambda size: next(numbers).to_bytes(size, "big"),
        relays=lambda: (ConnectedRelay(place=RELAY),),
    )


def come(meetings: Meetings, name: str, host: str, *endpoints: str, varies: bool = False) -> None:
    reachable = Reachable(endpoints=endpoints, mapping_varies=varies)
    assert meetings.add_member(name, host, reachable) == [(name, Relays(places=(RELAY,)))]


def meet(meetings: Meetings, one: str = "a", other: str = "b") -> dict[str, Meet]:
    messages = dict(meetings.on_message(one, MeetingRequest(name=other), 0.0))
    return {name: message for name, message in messages.items() if isinstance(message, Meet)}


def refusal(messages: list[tuple[str, ToMember]]) -> str:
    ((_, message),) = messages
    assert isinstance(message, NoMeeting)
    return message.reason


def test_both_sides_are_told_and_each_of_the_other(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST, f"{OWN_HOST}:1")
    come(meetings, "b", FAR_HOST, f"{FAR_HOST}:2")
    messages = meet(meetings)
    assert messages["a"].meeting == messages["b"].meeting
    assert (messages["a"].name, messages["a"].is_caller, messages["a"].ticket) == (
        "b",
        True,
        b"caller",
    )
    assert (messages["b"].name, messages["b"].is_caller, messages["b"].ticket) == (
        "a",
        False,
        b"callee",
    )
    assert (messages["a"].endpoints, messages["b"].endpoints) == (
        (f"{FAR_HOST}:2",),
        (f"{OWN_HOST}:1",),
    )
    assert messages["a"].may_punch
    assert messages["a"].relay == RELAY.endpoint


@pytest.mark.parametrize(
    ("own_host", "far_host", "endpoint", "is_sent"),
    [
        (OWN_HOST, FAR_HOST, f"{FAR_HOST}:2", True),
        (OWN_HOST, FAR_HOST, "198.51.100.7:2", False),
        (OWN_HOST, FAR_HOST, "192.168.1.7:2000", False),
        (OWN_HOST, OWN_HOST, "198.51.100.7:2", False),
        (OWN_HOST, OWN_HOST, "127.0.0.1:2000", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:2000", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:80", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.2:2000", False),
        ("127.0.0.1", "127.0.0.1", "192.168.1.7:2000", False),
        (OWN_HOST, "127.0.0.1", "127.0.0.1:2000", False),
        ("192.168.1.7", "127.0.0.1", "127.0.0.1:2000", False),
        (OWN_HOST, "192.168.1.7", "192.168.1.7:2000", False),
        ("192.168.1.8", "192.168.1.7", "192.168.1.7:2000", True),
        ("192.168.1.8", "192.168.1.7", "192.168.1.9:2000", False),
        ("172.17.0.1", "172.17.0.1", "172.17.0.1:22", False),
        ("2001:db8::1", "2001:db8:1::1", "[2001:db8:1::1]:2", True),
        ("2001:db8::1", "2001:db8:1::1", "[2001:db8:1::2]:2", False),
    ],
)
def test_no_member_has_others_dialled(
    meetings: Meetings, own_host: str, far_host: str, endpoint: str, *, is_sent: bool
) -> None:
    come(meetings, "a", own_host)
    come(meetings, "b", far_host, endpoint)
    message = meet(meetings)["a"]
    assert (message.endpoints, message.house_endpoints) == ((endpoint,) if is_sent else (), ())


def test_private_endpoints_are_passed_on_within_one_public_address_apart(
    meetings: Meetings,
) -> None:
    private = ("192.168.1.7:80", "192.168.1.7:7000", "10.0.0.7:7000", "192.168.2.7:7000")
    come(meetings, "a", OWN_HOST)
    come(meetings, "b", OWN_HOST, f"{OWN_HOST}:2", *private, "192.168.1.1:8080")
    come(meetings, "c", FAR_HOST)
    message = meet(meetings)["a"]
    assert message.endpoints == (f"{OWN_HOST}:2",)
    assert message.house_endpoints == ("192.168.1.7:7000", "10.0.0.7:7000"), (
        "one port, two addresses"
    )
    assert meet(meetings, "c", "b")["c"].house_endpoints == ()


def test_a_router_that_varies_is_not_punched(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST)
    come(meetings, "b", FAR_HOST, varies=True)
    assert not meet(meetings)["a"].may_punch


def leg(number: bytes, address: str, *, is_caller: bool = True) -> LegSeen:
    return LegSeen(meeting=number, is_caller=is_caller, address=address)


def test_what_the_relay_sees_is_passed_on_within_the_meeting(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST)
    come(meetings, "b", FAR_HOST)
    number = meet(meetings)["a"].meeting
    first, second = leg(number, f"{OWN_HOST}:999"), leg(number, f"{FAR_HOST}:888", is_caller=False)
    assert meetings.leg_seen(RELAY.endpoint, first) == [
        ("b", Punch(meeting=number, address=f"{OWN_HOST}:999"))
    ]
    assert meetings.leg_seen(RELAY.endpoint, second) == [
        ("a", Punch(meeting=number, address=f"{FAR_HOST}:888"))
    ]
    for again in (first, second, leg(number, f"{OWN_HOST}:1000")):
        assert meetings.leg_seen(RELAY.endpoint, again) == [], "once a side"


@pytest.mark.parametrize(
    ("own_host", "far_host", "address", "is_sent"),
    [
        (OWN_HOST, FAR_HOST, "198.51.100.7:999", False),
        (OWN_HOST, FAR_HOST, "127.0.0.1:9999", False),
        (OWN_HOST, FAR_HOST, "192.168.1.7:9999", False),
        (OWN_HOST, FAR_HOST, "[::ffff:192.0.2.1]:9999", False),
        (OWN_HOST, OWN_HOST, "192.168.1.7:9999", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:9999", True),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:22", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.2:9999", False),
        ("127.0.0.1", FAR_HOST, "127.0.0.1:9999", False),
        ("192.168.1.7", FAR_HOST, "192.168.1.7:9999", False),
        # A machine takes a new IPv6 address every day; its call keeps the old one.
        ("2001:db8::1", "2001:db8:1::1", "[2001:db8::2]:999", True),
        ("2001:db8::1", "2001:db8:1::1", "[2001:db8:0:1::1]:999", False),
        ("fd00::1", "fd00::2", "[fd00::3]:9999", False),
    ],
)
def test_a_leg_counts_at_the_members_own_address_alone(
    meetings: Meetings, own_host: str, far_host: str, address: str, *, is_sent: bool
) -> None:
    come(meetings, "a", own_host)
    come(meetings, "b", far_host)
    number = meet(meetings)["a"].meeting
    assert bool(meetings.leg_seen(RELAY.endpoint, leg(number, address))) == is_sent


def test_a_leg_of_another_relay_or_no_meeting_is_passed_over(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST)
    come(meetings, "b", FAR_HOST)
    number = meet(meetings)["a"].meeting
    first = leg(number, f"{OWN_HOST}:999")
    assert meetings.leg_seen("192.0.2.8:7000", first) == []
    assert meetings.leg_seen(RELAY.endpoint, leg(bytes(16), f"{OWN_HOST}:999")) == []
    meetings.forget(MEETING_S)
    assert meetings.leg_seen(RELAY.endpoint, first) == []


def test_who_is_not_of_a_meeting_does_not_end_it(meetings: Meetings) -> None:
    for name, host in (("a", OWN_HOST), ("b", FAR_HOST), ("c", "192.0.2.3")):
        come(meetings, name, host)
    linked = Linked(meeting=meet(meetings)["a"].meeting, way=Way.PUNCHED, took_s=0.2)
    with pytest.raises(MalformedMessage, match="expected the number of its own meeting"):
        meetings.on_message("c", linked, 1.0)
    meetings.on_message("a", linked, 1.0)
    assert meetings.ways == {("a", "b"): Way.PUNCHED}
    meetings.remove_member("b")
    assert meetings.ways == {}


def test_meetings_under_way_are_counted_by_member_and_by_pair(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST)
    others = [f"b{number}" for number in range(MAX_UNDER_WAY // MAX_WITH_ONE + 1)]
    for number, other in enumerate(others):
        come(meetings, other, f"198.51.100.{number}")
    meets = [meet(meetings, "a", others[0]) for _ in range(MAX_WITH_ONE)]
    assert "open meetings" in refusal(meetings.on_message("a", MeetingRequest(name=others[0]), 0.0))
    over = Linked(meeting=meets[0]["a"].meeting, way=Way.DIRECT, took_s=0.1)
    meetings.on_message("a", over, 0.0)
    assert meet(meetings, "a", others[0])
    for now_s, other in enumerate(others[1:], start=1):
        for _ in range(MAX_WITH_ONE):
            messages = meetings.on_message("a", MeetingRequest(name=other), 4.0 * now_s)
    assert "this member has 64 open meetings" in refusal(messages)
    assert meet(meetings, others[0], "a"), "whom others call is not counted"
    assert len(meetings.on_message("a", MeetingRequest(name=others[-1]), UNDER_WAY_S)) == 2


def test_a_ticket_names_both_members_and_gives_no_name_away() -> None:
    signed: list[Ticket] = []

    def sign(ticket: Ticket) -> bytes:
        signed.append(ticket)
        return b"ticket"

    numbers = count()
    meetings = Meetings(
        sign=sign,
        draw=lambda size: next(numbers).to_bytes(size, "big"),
        relays=lambda: (ConnectedRelay(place=RELAY),),
    )
    for name in "abc":
        come(meetings, name, f"198.51.100.{ord(name)}")
    for one, other in ("ab", "ac", "ba"):
        meet(meetings, one, other)
    callers, callees = [t.caller for t in signed[::2]], [t.callee for t in signed[::2]]
    assert callers[0] == callers[1] == callees[2]
    assert callees[0] == callers[2]
    assert len({*callers, *callees}) == 3
    assert [(t.caller, t.callee) for t in signed[1::2]] == list(zip(callers, callees, strict=True))
    assert not {b"a", b"b", b"c"}.intersection(t.caller.strip(bytes(1)) for t in signed)


def test_a_meeting_gets_the_relay_that_is_near_to_both(meetings: Meetings) -> None:
    near = RelayPlace(endpoint="192.0.2.8:7000", probe_endpoint="192.0.2.8:7001")
    come(meetings, "a", OWN_HOST)
    come(meetings, "b", FAR_HOST)
    relays = [ConnectedRelay(place=RELAY), ConnectedRelay(name="near", place=near)]
    meetings.relays = lambda: tuple(relays)
    expected = Relays(places=(RELAY, near))
    assert meetings.relays_changed() == [("a", expected), ("b", expected)]
    for name, near_s in (("a", 0.01), ("b", 0.02)):
        far = RelayDistance(endpoint=RELAY.endpoint, round_trip_s=0.02)
        close = RelayDistance(endpoint=near.endpoint, round_trip_s=near_s)
        meetings.on_message(name, RelayDistances(distances=(far, close)), 0.0)
    assert {message.relay for message in meet(meetings).values()} == {near.endpoint}
    del relays[1]
    assert {message.relay for message in meet(meetings).values()} == {RELAY.endpoint}
    relays.clear()
    assert {message.relay for message in meet(meetings).values()} == {None}


def test_who_is_gone_is_not_waited_for(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST)
    come(meetings, "b", FAR_HOST)
    meet(meetings)
    ((member, message),) = meetings.remove_member("b")
    assert member == "a"
    assert isinstance(message, NoMeeting)
    assert message.name == "b"
    come(meetings, "b", FAR_HOST)
    meet(meetings)
    assert [*meetings.remove_member("a"), *meetings.remove_member("b")] == []


def test_who_is_not_there_is_not_met_and_nobody_asks_without_end(meetings: Meetings) -> None:
    come(meetings, "a", OWN_HOST)
    assert refusal(meetings.on_message("a", MeetingRequest(name="b"), 0.0)) == "it is not connected"
    assert (
        refusal(meetings.on_message("a", MeetingRequest(name="a"), 0.0))
        == "a member cannot meet itself"
    )
    for _ in range(MAX_WANTS - 2):
        meetings.on_message("a", MeetingRequest(name="b"), 0.0)
    assert "more than 4" in refusal(meetings.on_message("a", MeetingRequest(name="b"), 0.0))
    assert refusal(meetings.on_message("a", MeetingRequest(name="b"), 1.0)) == "it is not connected"


def test_who_calls_anew_has_asked_as_often_as_before(meetings: Meetings) -> None:
    for host in (OWN_HOST, FAR_HOST):  # from another address, too
        come(meetings, "a", host)
        for _ in range(MAX_WANTS // 2):
            assert (
                refusal(meetings.on_message("a", MeetingRequest(name="b"), 0.0))
                == "it is not connected"
            )
        meetings.remove_member("a")
    come(meetings, "a", OWN_HOST)
    assert "more than 4" in refusal(meetings.on_message("a", MeetingRequest(name="b"), 0.0))
    come(meetings, "another", OWN_HOST)
    assert (
        refusal(meetings.on_message("another", MeetingRequest(name="b"), 0.0))
        == "it is not connected"
    )


def test_who_comes_again_and_again_has_nobody_tried_without_end(meetings: Meetings) -> None:
    for name in "abcd":
        add_member(meetings, name)
    tried = 0
    for _ in range(MAX_WANTS):
        meetings.remove_member("d")
        meetings.forget(1e6)
        tried += len(add_member(meetings, "d"))
    assert tried <= MAX_WANTS


# ---- who reaches whom, for placement


MEASURED = RelayDistances(distances=(RelayDistance(endpoint=RELAY.endpoint, round_trip_s=0.04),))


def add_member(
    meetings: Meetings,
    name: str,
    *endpoints: str,
    host: str = "",
    varies: bool = False,
    measured: RelayDistances = MEASURED,
) -> list[str]:
    """Add a peer that reports its relays, and return the peers with which it starts trials."""
    host = host or f"198.51.100.{ord(name)}"
    reachable = Reachable(endpoints=endpoints)
    messages = meetings.add_member(name, host, reachable, is_peer=True)
    assert messages == [(name, Relays(places=(RELAY,)))]
    if varies:
        meetings.on_message(name, replace(reachable, mapping_varies=True), 0.0)
    messages = meetings.on_message(name, measured, 0.0)
    meets = [(to, message) for to, message in messages if isinstance(message, Meet)]
    tried = [message.name for to, message in meets if message.is_caller]
    assert [(to, message.name) for to, message in meets if not message.is_caller] == [
        (other, name) for other in tried
    ]
    return tried


def linked(meetings: Meetings, one: str, other: str, way: Way) -> None:
    number = meet(meetings, one, other)[one].meeting
    meetings.on_message(one, Linked(meeting=number, way=way, took_s=0.1), 0.0)


def test_a_peer_that_comes_tries_those_of_whom_only_that_tells(meetings: Meetings) -> None:
    come(meetings, "client", OWN_HOST)
    assert add_member(meetings, "a") == []
    assert add_member(meetings, "open", "198.51.100.7:1", host="198.51.100.7") == []
    assert add_member(meetings, "b") == ["a"]
    assert add_member(meetings, "v", varies=True) == []
    assert add_member(meetings, "c") == ["b", "a"]
    meetings.remove_member("a")
    assert add_member(meetings, "l", measured=RelayDistances()) == [], (
        "it has no relay to punch with"
    )
    assert add_member(meetings, "d") == ["c", "b"]
    assert meetings.on_message("d", MEASURED, 0.0) == [], "once is enough"
    meetings.add_member("e", "198.51.100.7", Reachable(), is_peer=True)
    assert add_member(meetings, "f") == ["d", "c", "b"], "e has not looked around yet"


def test_of_many_the_last_are_tried_and_it_counts_as_asking(meetings: Meetings) -> None:
    names = [chr(ord("A") + i) for i in range(MAX_TRIALS + 3)]
    tried = [add_member(meetings, name) for name in names][-1]
    assert tried == names[-2 : -2 - MAX_TRIALS : -1]
    for _ in range(MAX_WANTS - MAX_TRIALS):
        meetings.on_message(names[-1], MeetingRequest(name="nobody"), 0.0)
    assert "more than 4" in refusal(
        meetings.on_message(names[-1], MeetingRequest(name="nobody"), 0.0)
    )


def test_where_many_meet_nobody_tries_what_nobody_needs(meetings: Meetings) -> None:
    for name in "ab":
        add_member(meetings, name)
    for i in range(BUSY_MEETINGS - 2):
        messages = meetings.on_message("ab"[i % 2], MeetingRequest(name="ba"[i % 2]), 1e3 * i)
        assert len(messages) == 2
    assert add_member(meetings, "c") == ["b"], "one place is left"
    assert add_member(meetings, "d") == []
    meetings.forget(1e6)
    assert add_member(meetings, "e") == ["d", "c", "b", "a"]


def test_what_is_known_is_told_as_one_value_until_it_changes(meetings: Meetings) -> None:
    assert meetings.known() == Connectivity()
    add_member(meetings, "a", f"{OWN_HOST}:1", "192.168.1.7:1", host=OWN_HOST)
    add_member(meetings, "b", "192.168.1.7:1")
    add_member(meetings, "near", "10.0.0.7:1", host="10.0.0.7")
    linked(meetings, "b", "a", Way.RELAYED)
    known = meetings.known()
    assert known.homes == {
        "a": NatInfo(house=OWN_HOST, is_open=True, is_open_within=True),
        "b": NatInfo(house="198.51.100.98", is_open_within=True),
        "near": NatInfo(house="", is_open_within=True),
    }
    assert known.met == {("a", "b"): Way.RELAYED}
    assert meetings.known() is known
    linked(meetings, "a", "b", Way.REVERSE)
    assert meetings.known().met == {("a", "b"): Way.REVERSE}


def test_what_was_seen_is_forgotten_when_a_member_is_reached_otherwise(meetings: Meetings) -> None:
    for name in "abc":
        add_member(meetings, name)
    linked(meetings, "a", "b", Way.RELAYED)
    linked(meetings, "b", "c", Way.RELAYED)
    meetings.on_message("a", Reachable(endpoints=("198.51.100.97:7",)), 0.0)
    assert meetings.known().met == {("b", "c"): Way.RELAYED}
    assert meetings.known().homes["a"].is_open
    meetings.remove_member("c")
    assert meetings.known() == Connectivity(
        homes={
            "a": NatInfo(house="198.51.100.97", is_open=True),
            "b": NatInfo(house="198.51.100.98"),
        }
    )


def test_only_so_many_pairs_are_remembered_the_last_ones(meetings: Meetings) -> None:
    add_member(meetings, "a")
    add_member(meetings, "b")
    meetings.ways = {("x", str(i)): Way.DIRECT for i in range(MAX_WAYS)}
    linked(meetings, "a", "b", Way.RELAYED)
    assert len(meetings.ways) == MAX_WAYS
    assert ("x", "0") not in meetings.ways
    assert meetings.ways["a", "b"] is Way.RELAYED
