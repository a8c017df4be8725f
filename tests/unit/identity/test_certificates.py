"""Content of certificates, and the signatures that count."""

import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from swarm_ft.errors import MalformedMessage, NotAllowed
from swarm_ft.identity.certificates import (
    AUTHORITY_LIFETIME_S,
    LIFETIME_S,
    Certificate,
    authority_certificate,
    caller_of,
    from_der,
    from_pem,
    host_of,
    is_of,
    issue,
    issue_web,
    renewal_due,
    to_der,
    to_pem,
)
from swarm_ft.identity.invites import invitation_certificate
from swarm_ft.identity.keys import PrivateKey, fingerprint_of, key_pem, name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY = new_key()
AUTHORITY = authority_certificate(KEY, "authority", AUTHORITY_LIFETIME_S, NOW)


def holder(role: Role, key: PrivateKey, name: str | None = None) -> Caller:
    return Caller(role=role, name=name or name_of(key.public_key()), key=key.public_key())


def issued(caller: Caller) -> Certificate:
    return issue(AUTHORITY, KEY, caller, NOW)


@pytest.mark.parametrize("role", [Role.PEER, Role.CLIENT])
def test_the_authoritys_word_counts(role: Role) -> None:
    caller = holder(role, new_key())
    assert caller_of(issued(caller), AUTHORITY) == caller


def test_there_is_a_certificate_for_the_coordinator_too() -> None:
    caller = holder(Role.COORDINATOR, new_key(), COORDINATOR_NAME)
    assert caller_of(issued(caller), AUTHORITY) == caller


def test_a_stranger_with_the_same_names_is_nobody() -> None:
    other = new_key()
    same_name = authority_certificate(other, "authority", AUTHORITY_LIFETIME_S, NOW)
    forged = issue(same_name, other, holder(Role.PEER, new_key()), NOW)
    with pytest.raises(NotAllowed, match="did not sign"):
        caller_of(forged, AUTHORITY)


def test_an_invitation_makes_no_peers() -> None:
    """The bearer of an invitation stays a newcomer, whatever its certificate contains."""
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
    caller = Caller(role=Role.PEER, name="x", key=key.public_key())  # type: ignore[arg-type]
    with pytest.raises(NotAllowed, match="P-256"):
        caller_of(issued(caller), AUTHORITY)


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


# ---- as others check them


def shown_over_tls(
    folder: Path, trusted: Certificate, shown: Certificate, key: PrivateKey, host: str, flags: int
) -> str:
    """Return the TLS version of a connection that Python's TLS makes to this certificate.

    Raises:
        ssl.SSLCertVerificationError: Python's TLS refuses the certificate.
    """
    (folder / "shown.pem").write_bytes(key_pem(key) + to_pem(shown))
    client, server = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    )
    client.load_verify_locations(cadata=to_pem(trusted).decode())
    client.verify_flags = ssl.VerifyFlags(flags)
    server.load_cert_chain(folder / "shown.pem")
    out, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(back, out, server_hostname=host)
    answers = server.wrap_bio(out, back, server_side=True)
    for one in (client_side, answers, client_side, answers):
        with suppress(ssl.SSLWantReadError):
            one.do_handshake()
    return client_side.version() or ""


STRICT = ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
"""Flags that Python sets by itself from 3.13 on."""
Issued = Callable[[Certificate, PrivateKey, PrivateKey], Certificate]


def as_coordinator(authority: Certificate, key: PrivateKey, own: PrivateKey) -> Certificate:
    now = datetime.now(UTC)
    return issue(authority, key, holder(Role.COORDINATOR, own, COORDINATOR_NAME), now)


def as_page(authority: Certificate, key: PrivateKey, own: PrivateKey) -> Certificate:
    host = host_of(COORDINATOR_NAME)
    return issue_web(authority, key, own.public_key(), [host], datetime.now(UTC))


@pytest.mark.parametrize("flags", [0, STRICT], ids=["lenient", "strict"])
@pytest.mark.parametrize("made", [as_coordinator, as_page])
def test_what_an_authority_signs_is_believed_by_the_strictest(
    tmp_path: Path, made: Issued, flags: int
) -> None:
    key, own = new_key(), new_key()
    authority = authority_certificate(key, "authority", AUTHORITY_LIFETIME_S, datetime.now(UTC))
    shown = made(authority, key, own)
    host = host_of(COORDINATOR_NAME)
    assert shown_over_tls(tmp_path, authority, shown, own, host, flags) == "TLSv1.3"


def authority_of_before(key: PrivateKey) -> Certificate:
    """Return a certificate of the first kind: it may sign, and has no other extension."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    now = datetime.now(UTC)
    begun = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    begun = begun.public_key(key.public_key()).serial_number(x509.random_serial_number())
    begun = begun.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    may_sign = x509.BasicConstraints(ca=True, path_length=0)
    return begun.add_extension(may_sign, critical=True).sign(key, SHA256())


@pytest.mark.parametrize("made", [as_coordinator, as_page])
def test_an_authority_of_before_signs_on(tmp_path: Path, made: Issued) -> None:
    key, own = new_key(), new_key()
    authority = authority_of_before(key)
    shown = made(authority, key, own)
    host = host_of(COORDINATOR_NAME)
    assert shown_over_tls(tmp_path, authority, shown, own, host, 0) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        shown_over_tls(tmp_path, authority, shown, own, host, STRICT)
    peer = holder(Role.PEER, own)
    assert caller_of(issue(authority, key, peer, datetime.now(UTC)), authority) == peer
