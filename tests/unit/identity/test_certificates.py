"""What certificates say, and whose word counts."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from swarm_ft.errors import MalformedMessage, NotAllowed
from swarm_ft.identity.certificates import (
    AUTHORITY_LIFETIME_S,
    COORDINATOR_NAME,
    LIFETIME_S,
    Caller,
    Certificate,
    Role,
    authority_certificate,
    caller_of,
    from_der,
    from_pem,
    is_of,
    issue,
    renewal_due,
    to_der,
    to_pem,
)
from swarm_ft.identity.invites import invitation_certificate
from swarm_ft.identity.keys import PrivateKey, fingerprint_of, name_of, new_key

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = new_key()
AUTHORITY = authority_certificate(KEY, "authority", AUTHORITY_LIFETIME_S, NOW)


def holder(role: Role, key: PrivateKey, name: str | None = None) -> Caller:
    return Caller(role=role, name=name or name_of(key.public_key()), key=key.public_key())


def issued(who: Caller) -> Certificate:
    return issue(AUTHORITY, KEY, who, NOW)


@pytest.mark.parametrize("role", [Role.PEER, Role.CLIENT])
def test_the_authoritys_word_counts(role: Role) -> None:
    who = holder(role, new_key())
    assert caller_of(issued(who), AUTHORITY) == who


def test_there_is_a_certificate_for_the_coordinator_too() -> None:
    who = holder(Role.COORDINATOR, new_key(), COORDINATOR_NAME)
    assert caller_of(issued(who), AUTHORITY) == who


def test_a_stranger_with_the_same_names_is_nobody() -> None:
    other = new_key()
    same_name = authority_certificate(other, "authority", AUTHORITY_LIFETIME_S, NOW)
    forged = issue(same_name, other, holder(Role.PEER, new_key()), NOW)
    with pytest.raises(NotAllowed, match="did not sign"):
        caller_of(forged, AUTHORITY)


def test_an_invitation_makes_no_peers() -> None:
    """Whatever somebody who was invited writes into a certificate, they are a newcomer."""
    key = new_key()
    invitation = invitation_certificate(key, "invite-1", NOW)
    for role, name in ((Role.PEER, None), (Role.COORDINATOR, COORDINATOR_NAME)):
        forged = issue(invitation, key, holder(role, new_key(), name), NOW)
        caller = caller_of(forged, AUTHORITY, [invitation])
        assert (caller.role, caller.name) == (Role.NEWCOMER, "invite-1")


def test_a_member_makes_no_members() -> None:
    key = new_key()
    member = issued(holder(Role.PEER, key))
    forged = issue(member, key, holder(Role.COORDINATOR, new_key(), COORDINATOR_NAME), NOW)
    with pytest.raises(NotAllowed):
        caller_of(forged, AUTHORITY)


def test_a_peer_has_its_keys_name_and_no_other() -> None:
    for role, name in ((Role.PEER, "somebody"), (Role.PEER, COORDINATOR_NAME)):
        with pytest.raises(NotAllowed, match="the name of its key"):
            caller_of(issued(holder(role, new_key(), name)), AUTHORITY)
    with pytest.raises(NotAllowed, match="the name of its key"):
        caller_of(issued(holder(Role.COORDINATOR, new_key())), AUTHORITY)


def test_other_keys_are_refused() -> None:
    key = rsa.generate_private_key(65537, 2048)
    who = Caller(role=Role.PEER, name="x", key=key.public_key())  # type: ignore[arg-type]
    with pytest.raises(NotAllowed, match="P-256"):
        caller_of(issued(who), AUTHORITY)


def test_a_certificate_lasts_a_day_and_is_renewed_in_time() -> None:
    certificate = issued(holder(Role.PEER, new_key()))
    assert certificate.not_valid_before_utc < NOW
    assert certificate.not_valid_after_utc == NOW + timedelta(seconds=LIFETIME_S)
    assert renewal_due(certificate) == NOW + timedelta(seconds=LIFETIME_S / 2)


def test_an_authority_is_known_by_its_fingerprint() -> None:
    assert is_of(AUTHORITY, fingerprint_of(KEY.public_key()))
    assert not is_of(AUTHORITY, bytes(16))


def test_it_travels_and_nothing_else_does() -> None:
    assert from_der(to_der(AUTHORITY)) == from_pem(to_pem(AUTHORITY)) == AUTHORITY
    for data in (b"", b"\x00" * 100, to_der(AUTHORITY)[:-1]):
        with pytest.raises(MalformedMessage):
            from_der(data)
        with pytest.raises(MalformedMessage):
            from_pem(data)
