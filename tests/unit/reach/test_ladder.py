"""Ladder on a stopped clock: whatever arrives in any order, it uses one stream."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.messages.meeting import Meet, Punch, Way
from swarm_ft.reach.ladder import (
    DIAL_PATIENCE_S,
    GIVE_UP_S,
    HOUSE_AFTER_S,
    LEGLESS_S,
    MIN_PATIENCE_S,
    PATIENCE_ROUND_TRIPS,
    Connect,
    Dial,
    GiveUp,
    Ladder,
    OpenLeg,
    Take,
)

MEETING = bytes(range(16))
NOW_S = 100.0


def meet(**changes: Any) -> Meet:
    fields: dict[str, Any] = {
        "meeting": MEETING,
        "name": "other",
        "is_caller": True,
        "endpoints": ("192.0.2.7:4000",),
        "may_punch": True,
        "relay": "192.0.2.9:7000",
        "ticket": b"ticket",
        **changes,
    }
    return Meet(**fields)


def test_all_ways_are_tried_at_once() -> None:
    leg = OpenLeg("192.0.2.9:7000", b"ticket")
    assert Ladder(meet(), NOW_S).begin() == [Dial("192.0.2.7:4000", Way.DIRECT), leg]
    callee = Ladder(meet(is_caller=False), NOW_S)
    assert callee.begin() == [Dial("192.0.2.7:4000", Way.REVERSE), leg]
    assert Ladder(meet(endpoints=(), relay=None), NOW_S).begin() == []


@pytest.mark.parametrize("way", [Way.DIRECT, Way.REVERSE, Way.PUNCHED])
def test_a_caller_takes_the_first_stream_that_needs_no_relay(way: Way) -> None:
    ladder = Ladder(meet(), NOW_S)
    assert ladder.on_open(1, Way.RELAYED, NOW_S + 0.1) == []
    assert ladder.on_open(2, way, NOW_S + 0.2) == [Take(2, way)]
    assert ladder.is_over
    assert ladder.on_open(3, Way.DIRECT, NOW_S + 0.3) == []


def test_a_relayed_stream_waits_for_a_punched_one_and_no_longer() -> None:
    ladder = Ladder(meet(), NOW_S)
    ladder.on_leg_reported(0.3)
    assert ladder.on_open(1, Way.RELAYED, NOW_S + 0.5) == []
    assert ladder.due_s == NOW_S + PATIENCE_ROUND_TRIPS * 0.3
    assert ladder.tick(ladder.due_s - 0.01) == []
    assert ladder.tick(ladder.due_s) == [Take(1, Way.RELAYED)]


def test_nobody_waits_for_what_cannot_be() -> None:
    blind = Ladder(meet(may_punch=False, endpoints=()), NOW_S)
    assert blind.on_open(1, Way.RELAYED, NOW_S) == [Take(1, Way.RELAYED)]
    dialling = Ladder(meet(may_punch=False), NOW_S)
    assert dialling.on_open(1, Way.RELAYED, NOW_S) == []
    assert dialling.due_s == NOW_S + DIAL_PATIENCE_S < NOW_S + MIN_PATIENCE_S
    known = Ladder(meet(endpoints=()), NOW_S, hopeless=frozenset({Way.PUNCHED}))
    assert known.on_leg_reported(0.1) == []
    assert known.on_open(1, Way.RELAYED, NOW_S) == [Take(1, Way.RELAYED)]


def test_a_punch_leaves_from_a_port_that_the_relay_knows() -> None:
    early = Ladder(meet(), NOW_S)
    assert early.on_punch(Punch(meeting=MEETING, address="192.0.2.2:888")) == []
    assert early.on_leg_reported(0.1) == [Connect("192.0.2.2:888")]
    late = Ladder(meet(), NOW_S)
    assert late.on_leg_reported(0.1) == []
    assert late.on_punch(Punch(meeting=MEETING, address="192.0.2.2:888")) == [
        Connect("192.0.2.2:888")
    ]


def test_one_punch_is_made_whatever_is_sent() -> None:
    ladder = Ladder(meet(), NOW_S)
    punches = [Punch(meeting=MEETING, address=f"192.0.2.2:{port}") for port in (888, 889, 888)]
    ladder.on_leg_reported(0.1)
    effects = [effect for punch in punches for effect in ladder.on_punch(punch)]
    assert effects == [Connect("192.0.2.2:888")]
    assert ladder.on_leg_reported(0.1) == []


def test_private_endpoints_are_dialled_last() -> None:
    house = ("192.168.1.7:7000", "192.168.1.8:7000")
    ladder = Ladder(meet(house_endpoints=house, may_punch=False), NOW_S)
    assert Dial(house[0], Way.DIRECT) not in ladder.begin()
    assert ladder.on_open(1, Way.RELAYED, NOW_S) == []
    assert ladder.due_s == NOW_S + HOUSE_AFTER_S
    assert ladder.tick(ladder.due_s - 0.01) == []
    assert ladder.tick(ladder.due_s) == [Dial(one, Way.DIRECT) for one in house]
    assert ladder.due_s == NOW_S + HOUSE_AFTER_S + DIAL_PATIENCE_S, "the relay waits for them"
    assert ladder.tick(ladder.due_s) == [Take(1, Way.RELAYED)]
    quick = Ladder(meet(house_endpoints=house), NOW_S)
    assert quick.on_open(1, Way.DIRECT, NOW_S) == [Take(1, Way.DIRECT)]
    assert quick.tick(NOW_S + HOUSE_AFTER_S) == []


def test_who_was_called_takes_what_the_caller_chose() -> None:
    ladder = Ladder(meet(is_caller=False), NOW_S)
    assert ladder.on_open(1, Way.PUNCHED, NOW_S) == []
    assert ladder.on_open(2, Way.RELAYED, NOW_S) == []
    assert ladder.tick(NOW_S + GIVE_UP_S - 1) == []
    assert ladder.on_chosen(2, Way.RELAYED) == [Take(2, Way.RELAYED)]


def test_without_its_relay_it_gives_up_sooner() -> None:
    ladder = Ladder(meet(), NOW_S)
    ladder.lost_leg()
    assert ladder.due_s == NOW_S + LEGLESS_S
    assert ladder.tick(NOW_S + LEGLESS_S - 0.1) == []
    assert ladder.on_open(1, Way.DIRECT, NOW_S + LEGLESS_S - 0.1) == [Take(1, Way.DIRECT)]
    other = Ladder(meet(), NOW_S)
    other.lost_leg()
    (over,) = other.tick(NOW_S + LEGLESS_S)
    assert isinstance(over, GiveUp)


def test_without_a_stream_it_gives_up() -> None:
    ladder = Ladder(meet(relay=None), NOW_S)
    assert ladder.due_s == NOW_S + GIVE_UP_S
    (over,) = ladder.tick(ladder.due_s)
    assert isinstance(over, GiveUp)
    assert "other" in over.reason
    assert ladder.is_over


def test_a_relayed_stream_that_broke_meanwhile_is_not_taken() -> None:
    ladder = Ladder(meet(), NOW_S)
    ladder.on_open(1, Way.RELAYED, NOW_S)
    ladder.on_closed(1)
    assert ladder.tick(NOW_S + MIN_PATIENCE_S) == []


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("opened"), st.integers(0, 5), st.sampled_from(Way)),
        st.tuples(st.just("chosen"), st.integers(0, 5), st.sampled_from(Way)),
        st.tuples(st.just("closed"), st.integers(0, 5)),
        st.tuples(st.just("seen"), st.floats(0, 3)),
        st.tuples(st.just("told")),
        st.tuples(st.just("lost")),
        st.tuples(st.just("tick")),
    ),
    max_size=30,
)


@given(events=EVENTS, is_caller=st.booleans(), may_punch=st.booleans(), gap_s=st.floats(0.0, 2.0))
def test_whatever_happens_it_ends_once_and_in_time(
    events: list[tuple[Any, ...]], *, is_caller: bool, may_punch: bool, gap_s: float
) -> None:
    ladder = Ladder(meet(is_caller=is_caller, may_punch=may_punch), NOW_S)
    ends, now_s = 0, NOW_S
    for name, *given_ in [*events, ("late",)]:
        now_s += gap_s
        match name:
            case "opened":
                effects = ladder.on_open(given_[0], given_[1], now_s)
            case "chosen":
                effects = ladder.on_chosen(given_[0], given_[1])
            case "closed":
                effects = ladder.on_closed(given_[0])
            case "seen":
                effects = ladder.on_leg_reported(given_[0])
            case "told":
                effects = ladder.on_punch(Punch(meeting=MEETING, address="192.0.2.2:888"))
            case "lost":
                ladder.lost_leg()
                effects = []
            case "tick":
                effects = ladder.tick(now_s)
            case _:
                effects = ladder.tick(NOW_S + GIVE_UP_S)
        for effect in effects:
            assert may_punch or not isinstance(effect, Connect)
            ends += isinstance(effect, Take | GiveUp)
    assert ends == 1
    assert ladder.is_over
