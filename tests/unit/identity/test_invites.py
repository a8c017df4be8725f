"""Text of an invitation: short, whole, and nothing but an invitation."""

import contextlib
import hashlib
from datetime import UTC, datetime

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.errors import BadInvite
from swarm_ft.identity.certificates import caller_of
from swarm_ft.identity.invites import (
    MAX_CHARS,
    PREFIX,
    Invite,
    invitation_certificate,
    invitation_key,
    parse_invite,
)
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Role

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AUTHORITY = invitation_certificate(new_key(), "some authority", NOW)

ports = st.integers(1, 65535)
addresses = st.one_of(
    st.builds("{}:{}".format, st.ip_addresses(v=4), ports),
    st.builds("[{}]:{}".format, st.ip_addresses(v=6), ports),
    st.builds(
        "{}:{}".format, st.from_regex(r"[a-z][a-z0-9]{0,30}\.example", fullmatch=True), ports
    ),
)
invites = st.builds(
    Invite,
    fingerprint=st.binary(min_size=16, max_size=16),
    number=st.binary(min_size=4, max_size=4),
    secret=st.binary(min_size=10, max_size=10),
    addresses=st.lists(addresses, min_size=1, max_size=4).map(tuple),
)


def example(*where: str) -> Invite:
    return Invite(
        fingerprint=bytes(range(16)),
        number=b"\x00\x01\x02\x03",
        secret=b"0123456789",
        addresses=where or ("203.0.113.7:7000",),
    )


@given(invites)
def test_what_is_written_is_read(invite: Invite) -> None:
    assert parse_invite(f" {invite}\n") == invite
    assert len(str(invite)) <= MAX_CHARS


def test_it_is_short_and_one_word() -> None:
    assert len(str(example())) == 61
    assert str(example()).isalnum()


def test_nothing_secret_is_in_a_log() -> None:
    assert repr(example()) == "<invite-00010203>"


@given(invites, st.data())
def test_one_wrong_character_is_noticed(invite: Invite, data: st.DataObject) -> None:
    text = str(invite)
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii").filter(lambda c: c != text[at]))
    with pytest.raises(BadInvite):
        parse_invite("." + text[:at] + other + text[at + 1 :] + ".")
    altered = text[:at] + other + text[at + 1 :]
    if not other.isspace():
        with pytest.raises(BadInvite):
            parse_invite(altered)


@given(st.text(max_size=200))
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadInvite):
        parse_invite(text)
    with pytest.raises(BadInvite):
        parse_invite(PREFIX + text)


@given(st.binary(max_size=120))
def test_other_bytes_are_refused_although_they_are_whole(body: bytes) -> None:
    """A handmade invitation with a right checksum fails at its content."""
    whole = body + hashlib.blake2b(body, digest_size=3).digest()
    text = PREFIX + base58.b58encode(whole).decode()
    with contextlib.suppress(BadInvite):
        assert str(parse_invite(text)) == text


@pytest.mark.parametrize("where", ["nowhere", "a b:1", "host:0", "host:70000", f"{'x' * 64}:1"])
def test_an_address_that_is_none_gets_into_no_invitation(where: str) -> None:
    with pytest.raises(BadInvite):
        str(example(where))


def test_both_sides_derive_the_same_key_from_the_secret() -> None:
    invite, newcomer = example(), new_key().public_key()
    known = invitation_certificate(invitation_key(invite.secret), invite.name, NOW)
    caller = caller_of(invite.newcomer_certificate(newcomer, NOW), AUTHORITY, [known])
    assert (caller.role, caller.name, caller.key) == (Role.NEWCOMER, invite.name, newcomer)
