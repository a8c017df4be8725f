"""Certificates: the authority's signed statements on keys, roles and names. Pure but for chance.

The authority's key signs the certificate of every member, with a role and a name. Both ends of
every link show one (TLS 1.3), and the client names the server that it expects. An invitation is a
key too (see `invites`): its signature shows only that the bearer was invited.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from swarm_ft.errors import MalformedMessage, NotAllowed
from swarm_ft.identity.keys import PrivateKey, PublicKey, fingerprint_of, name_of
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role

Certificate = x509.Certificate

HOST_SUFFIX = "swarm-ft"
LIFETIME_S = 24 * 3600.0
RENEWED_AT = 0.5
"""Share of a certificate's lifetime after which it is renewed; the rest is for retries."""
CLOCK_SLACK_S = 3600.0
"""Seconds by which a certificate begins before its issue, since clocks differ."""
AUTHORITY_LIFETIME_S = 20 * 365 * 86400.0
WEB_LIFETIME_S = 800 * 86400.0
"""Seconds of a web certificate's lifetime; browsers accept 825 days at most."""
WEB_SUBJECT = "swarm-ft page"
"""Subject of the page's certificate; it names no role, so `caller_of` refuses it as a member's."""

_BOTH_ENDS = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_MAY_SIGN = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""Usage of an issuer: certificates and revocation lists, which some libraries require."""


_CERTIFIED = (Role.COORDINATOR, Role.PEER, Role.CLIENT, Role.RELAY)


def host_of(name: str) -> str:
    """Return the host name that TLS checks for a server of this name."""
    return f"{name}.{HOST_SUFFIX}"


def authority_certificate(
    key: PrivateKey, name: str, lifetime_s: float, now: datetime
) -> Certificate:
    """Return a key's self-signed certificate as an issuer, for an authority or an invitation."""
    begun = _begun(_subject(name), _subject(name), key.public_key(), lifetime_s, now)
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_MAY_SIGN, True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    )
    return _signed(begun, key, extensions)


def issue(
    issuer: Certificate, issuer_key: PrivateKey, holder: Caller, now: datetime
) -> Certificate:
    """Return a certificate of the holder's role and name, valid for a day."""
    subject = _subject(f"{holder.role}:{holder.name}")
    begun = _begun(subject, issuer.subject, holder.key, LIFETIME_S, now)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName([x509.DNSName(host_of(holder.name))]), False),
        (x509.ExtendedKeyUsage(_BOTH_ENDS), False),
        (signed_by, False),
    )
    return _signed(begun, issuer_key, extensions)


def issue_web(
    issuer: Certificate, issuer_key: PrivateKey, key: PublicKey, names: Iterable[str], now: datetime
) -> Certificate:
    """Return a certificate for browsers: the key belongs to the server at these names."""
    begun = _begun(_subject(WEB_SUBJECT), issuer.subject, key, WEB_LIFETIME_S, now)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName([_web_name(name) for name in names]), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (signed_by, False),
    )
    return _signed(begun, issuer_key, extensions)


def is_web_of(
    certificate: Certificate,
    issuer: Certificate,
    key: PublicKey,
    names: Iterable[str],
    now: datetime,
) -> bool:
    """Whether `issue_web` issued it for this key and these names, and half of its time is left."""
    try:
        shown = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return (
        set(map(_web_name, names)) <= set(shown)
        and is_of(certificate, fingerprint_of(key))
        and _is_signed_by(certificate, issuer)
        and now + timedelta(seconds=WEB_LIFETIME_S / 2) <= certificate.not_valid_after_utc
    )


def shown_fingerprint(certificate: Certificate) -> str:
    """Return the SHA-256 of a certificate as browsers show it: `AB:CD:...`."""
    return certificate.fingerprint(SHA256()).hex(":").upper()


def _web_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.lower())


def caller_of(
    certificate: Certificate, authority: Certificate, invitations: Iterable[Certificate] = ()
) -> Caller:
    """Return the caller of a certificate; TLS has checked its dates and the caller's key.

    Args:
        certificate: Certificate that the caller shows.
        authority: Certificate of the swarm's authority.
        invitations: Certificates of the open invitations, which may sign a newcomer's.

    Raises:
        NotAllowed: None of these signed it, or it is no certificate of a swarm.
    """
    key = certificate.public_key()
    if not isinstance(key, PublicKey):
        raise NotAllowed("certificate: expected one of a P-256 key")
    if _is_signed_by(certificate, authority):
        return _by_authority(certificate, key)
    for invitation in invitations:
        if _is_signed_by(certificate, invitation):
            return Caller(role=Role.NEWCOMER, name=common_name(invitation), key=key)
    raise NotAllowed("certificate: this swarm's authority did not sign it")


def _by_authority(certificate: Certificate, key: PublicKey) -> Caller:
    role, _, name = common_name(certificate).partition(":")
    expected = COORDINATOR_NAME if role == Role.COORDINATOR else name_of(key)
    if role not in _CERTIFIED or name != expected:
        raise NotAllowed(f"certificate of {role[:20]!r}: expected a role and the name of its key")
    return Caller(role=Role(role), name=name, key=key)


def common_name(certificate: Certificate) -> str:
    """Return the common name in a certificate; empty if it has none."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def renewal_due(certificate: Certificate) -> datetime:
    """Return the time at which to request the next certificate."""
    ends = certificate.not_valid_after_utc
    return ends - timedelta(seconds=LIFETIME_S * (1 - RENEWED_AT))


def is_of(certificate: Certificate, fingerprint: bytes) -> bool:
    """Whether the certificate's key has this fingerprint, whatever its text."""
    key = certificate.public_key()
    return isinstance(key, PublicKey) and fingerprint_of(key) == fingerprint


def key_name(certificate: Certificate) -> str:
    """Return the name of a certificate's key; empty for another kind of key."""
    key = certificate.public_key()
    return name_of(key) if isinstance(key, PublicKey) else ""


def to_pem(certificate: Certificate) -> bytes:
    """Return a certificate in PEM, for files."""
    return certificate.public_bytes(Encoding.PEM)


def to_der(certificate: Certificate) -> bytes:
    """Return a certificate in DER, for messages."""
    return certificate.public_bytes(Encoding.DER)


def from_pem(data: bytes) -> Certificate:
    """Return the certificate in a file or in a handshake's PEM.

    Raises:
        MalformedMessage: The bytes are no certificate.
    """
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError:
        raise MalformedMessage(f"{len(data)} bytes: expected a certificate in PEM") from None


def from_der(data: bytes) -> Certificate:
    """Return the certificate in a message.

    Raises:
        MalformedMessage: The bytes are no certificate.
    """
    try:
        return x509.load_der_x509_certificate(data)
    except ValueError:
        raise MalformedMessage(f"{len(data)} bytes: expected a certificate") from None


def _is_signed_by(certificate: Certificate, issuer: Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _signed(
    begun: x509.CertificateBuilder,
    key: PrivateKey,
    extensions: Iterable[tuple[x509.ExtensionType, bool]],
) -> Certificate:
    """Return the signed certificate with these extensions, each with whether it is critical."""
    for extension, is_critical in extensions:
        begun = begun.add_extension(extension, critical=is_critical)
    return begun.sign(key, SHA256())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(
    subject: x509.Name, issuer: x509.Name, holder: PublicKey, lifetime_s: float, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(holder)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=CLOCK_SLACK_S))
        .not_valid_after(now + timedelta(seconds=lifetime_s))
    )
