"""Choice of the connections to drop: a pure decision, tested with any connections."""

from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.transport.admission import YOUNG_S, Incoming, address_of, connections_to_drop

NOW_S = 100.0

connections = st.lists(
    st.builds(
        Incoming,
        host=st.sampled_from(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"]),
        port=st.integers(1, 65535),
        since_s=st.floats(0.0, NOW_S),
        in_call=st.booleans(),
    ),
    unique_by=lambda one: (one.host, one.port),
)


def too_many(present: list[Incoming], per_address: int = 3, wanted: int = 5) -> list[Incoming]:
    return connections_to_drop(present, NOW_S, per_address=per_address, wanted=wanted)


@given(connections)
def test_no_address_keeps_more_than_it_may_and_nobody_is_dropped_twice(
    present: list[Incoming],
) -> None:
    dropped = too_many(present)
    remaining = [one for one in present if one not in dropped]
    assert len(set(dropped)) == len(dropped)
    for address in {address_of(one.host) for one in present}:
        assert sum(address_of(one.host) == address for one in remaining) <= 3


@given(connections)
def test_who_has_a_call_goes_only_for_others_of_its_address_that_have_one(
    present: list[Incoming],
) -> None:
    dropped = too_many(present)
    for one in dropped:
        if one.in_call:
            own = [o for o in present if address_of(o.host) == address_of(one.host)]
            staying = [o for o in own if o not in dropped]
            assert len(staying) == 3
            assert all(other.in_call and other.since_s <= one.since_s for other in staying)


@given(connections)
def test_room_is_made_by_those_without_a_call_alone(present: list[Incoming]) -> None:
    dropped = too_many(present, per_address=len(present))
    remaining = [one for one in present if one not in dropped]
    assert all(not one.in_call and NOW_S - one.since_s >= YOUNG_S for one in dropped)
    could_go = [one for one in remaining if not one.in_call and NOW_S - one.since_s >= YOUNG_S]
    assert len(remaining) <= 5 or not could_go


@given(connections)
def test_nobody_is_dropped_while_there_are_few(present: list[Incoming]) -> None:
    assert not too_many(present, per_address=len(present), wanted=len(present))


def test_an_ipv6_site_is_one_address_and_an_ipv4_address_is_the_same_in_ipv6() -> None:
    assert address_of("2001:db8::1") == address_of("2001:db8::ffff:2") != address_of("2001:db9::1")
    assert address_of("::ffff:10.0.0.1") == address_of("10.0.0.1") != address_of("10.0.0.2")
    assert address_of("fe80::1%eth0") == address_of("fe80::2")
    assert address_of("something else") == "something else"
