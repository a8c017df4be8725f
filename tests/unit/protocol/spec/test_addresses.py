"""Addresses that a member may make another machine dial."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.spec.addresses import (
    MAX_HOUSE_ENDPOINTS,
    Scope,
    Vantage,
    endpoints_in_house,
    endpoints_seen,
    is_same_site,
    is_socket_address,
    may_dial,
    scope_of,
)
from swarm_ft.protocol.spec.bounds import host_of
from swarm_ft.transport.grpc_options import format_endpoint

HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.sampled_from(("127.0.0.1", "192.168.1.7", "10.0.0.1", "::1", "fd00::1", "192.0.2.1")),
)
ENDPOINTS = st.builds(format_endpoint, HOSTS, st.integers(1, 65535))


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("192.0.2.1", Scope.PUBLIC),
        ("2001:db8::1", Scope.PUBLIC),
        ("127.3.2.1", Scope.LOOPBACK),
        ("::1", Scope.LOOPBACK),
        ("10.0.0.1", Scope.PRIVATE),
        ("100.64.0.1", Scope.PRIVATE),
        ("fd00::1", Scope.PRIVATE),
        ("localhost", None),
        ("127.1", None),
        ("0177.0.0.1", None),
        ("0.0.0.0", None),
        ("169.254.169.254", None),
        ("239.1.2.3", None),
        ("255.255.255.255", None),
        ("::", None),
        ("::ffff:192.0.2.1", None),
        ("::ffff:127.0.0.1", None),
        ("64:ff9b::7f00:1", None),
        ("2002:7f00:1::1", None),
        ("fe80::1", None),
        ("ff02::1", None),
    ],
)
def test_an_address_means_the_same_machine_within_its_scope(host: str, scope: Scope | None) -> None:
    assert scope_of(host) is scope


@given(own=HOSTS, host=HOSTS)
def test_who_may_be_sent_there_is_in_the_same_scope(own: str, host: str) -> None:
    if may_dial(own, host) and scope_of(host) is not Scope.PUBLIC:
        assert not ipaddress.ip_address(own).is_global
        assert scope_of(own) in {scope_of(host), Scope.LOOPBACK}


@given(own=HOSTS, theirs=HOSTS, endpoints=st.lists(ENDPOINTS, max_size=8))
def test_of_what_a_member_announces_only_its_own_address_is_left(
    own: str, theirs: str, endpoints: list[str]
) -> None:
    seen = endpoints_seen(own, theirs, endpoints)
    assert {host_of(endpoint) for endpoint in seen} <= {theirs}
    house = endpoints_in_house(own, theirs, endpoints)
    assert len(house) <= MAX_HOUSE_ENDPOINTS
    assert not house or own == theirs
    assert all(scope_of(host_of(endpoint)) is Scope.PRIVATE for endpoint in house)
    assert len({endpoint.rpartition(":")[2] for endpoint in house}) <= 1


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fd00::1", "fd00::2", False),
        ("::1", "::2", False),
        ("a", "a", False),
    ],
)
def test_a_customer_has_one_address_or_one_ipv6_network(
    one: str, other: str, *, is_one: bool
) -> None:
    assert is_same_site(one, other) == is_same_site(other, one) == is_one


HOME = Vantage(own="192.168.1.9", coordinator="192.0.2.9", gateway="192.168.1.1")


@pytest.mark.parametrize(
    ("endpoint", "is_in_house"),
    [
        ("192.168.1.7:7000", True),
        ("192.168.1.7:80", False),
        ("192.168.1.1:7000", False),
        ("192.168.1.9:7000", False),
        ("192.168.2.7:7000", False),
        ("10.0.0.7:7000", False),
        ("127.0.0.1:7000", False),
        ("192.0.2.7:7000", False),
        ("[fd00::7]:7000", False),
    ],
)
def test_a_house_is_a_network_that_this_machine_is_in(endpoint: str, *, is_in_house: bool) -> None:
    assert HOME.is_in_house(endpoint) == is_in_house
    assert not Vantage().is_in_house(endpoint), "who knows nothing of itself has no house"


@pytest.mark.parametrize(
    ("coordinator", "endpoint", "may"),
    [
        ("192.0.2.9", "192.0.2.7:80", True),
        ("192.0.2.9", "10.0.0.7:7000", False),
        ("192.0.2.9", "127.0.0.1:7000", False),
        ("192.0.2.9", "192.168.1.7:7000", True),  # its own house
        ("10.0.0.9", "10.0.1.7:7000", True),
        ("10.0.0.9", "10.0.1.7:22", False),
        ("10.0.0.9", "127.0.0.1:7000", False),
        ("127.0.0.1", "127.0.0.1:7000", True),
        ("", "127.0.0.1:7000", False),
    ],
)
def test_a_member_dials_private_addresses_where_its_coordinator_has_one(
    coordinator: str, endpoint: str, *, may: bool
) -> None:
    assert Vantage(own="192.168.1.9", coordinator=coordinator).may_dial(endpoint) == may


@given(endpoint=ENDPOINTS)
def test_an_address_in_a_message_is_one_that_can_be_dialled(endpoint: str) -> None:
    assert is_socket_address(endpoint) == (scope_of(host_of(endpoint)) is not None)


@pytest.mark.parametrize(
    "text",
    ["localhost:1", "192.0.2.1", "192.0.2.1:0", "[192.0.2.1]:1", "[2001:DB8::1]:1", ":1", ""],
)
def test_another_form_of_an_address_is_none(text: str) -> None:
    assert not is_socket_address(text)
