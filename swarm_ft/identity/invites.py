"""Invitations: a short text with which a stranger's machine becomes a member. Pure.

An invitation holds the coordinator's addresses, the fingerprint of the authority's key, and a
secret from which both sides derive the same key. The newcomer signs a certificate for its own key
with the derived one, and shows it to the coordinator like any other certificate. TLS proves that
the newcomer has the secret, which never crosses the wire, and that the coordinator is the one that
invited it (docs/explanation/security.md).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass
from datetime import datetime

import base58
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarm_ft.errors import BadInvite
from swarm_ft.identity.certificates import Certificate, authority_certificate, issue
from swarm_ft.identity.keys import CURVE, FINGERPRINT_BYTES, PrivateKey, PublicKey
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.spec.bounds import is_endpoint

PREFIX = "swarm1"
VERSION = 1
NUMBER_BYTES = 4
SECRET_BYTES = 10
"""Bytes of an invitation's secret: 80 bits, which only the coordinator can check."""
CHECK_BYTES = 3
MAX_CHARS = 500
MAX_ADDRESSES = 4
MAX_LIFETIME_S = 366 * 86400.0

_IPV4, _IPV6, _NAME = 4, 6, 0x40
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_HOST_AND_PORT = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:]+)):(?P<port>\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Invite:
    """Fields of an invitation.

    Attributes:
        fingerprint: Fingerprint of the key of the swarm's authority.
        number: Number by which the coordinator identifies it.
        secret: Secret of this invitation.
        addresses: Addresses of the coordinator, `host:port`, the best one first.
    """

    fingerprint: bytes
    number: bytes
    secret: bytes
    addresses: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name in lists and logs, which reveals nothing of the secret."""
        return f"invite-{self.number.hex()}"

    def __str__(self) -> str:
        where = b"".join(_packed(address) for address in self.addresses)
        body = bytes([VERSION]) + self.fingerprint + self.number + self.secret + where
        return PREFIX + base58.b58encode(body + _check(body)).decode("ascii")

    def __repr__(self) -> str:
        return f"<{self.name}>"  # keeps the secret out of logs

    def newcomer_certificate(self, key: PublicKey, now: datetime) -> Certificate:
        """Return the certificate that a newcomer with this key shows to the coordinator."""
        signer = invitation_key(self.secret)
        issuer = invitation_certificate(signer, self.name, now)
        return issue(issuer, signer, Caller(role=Role.NEWCOMER, name=self.name, key=key), now)


def invitation_key(secret: bytes) -> PrivateKey:
    """Return the key that both sides derive from an invitation's secret (HKDF, RFC 5869)."""
    # 16 bytes more than the curve's order make all values equally likely.
    drawn = HKDF(SHA256(), 48, None, b"swarm-ft invitation").derive(secret)
    return ec.derive_private_key(int.from_bytes(drawn, "big") % (_ORDER - 1) + 1, CURVE)


def invitation_certificate(key: PrivateKey, name: str, now: datetime) -> Certificate:
    """Return the certificate by which the coordinator verifies newcomers with this invitation."""
    return authority_certificate(key, name, MAX_LIFETIME_S, now)


def parse_invite(text: str) -> Invite:
    """Return the fields of an invitation's text.

    Raises:
        BadInvite: The text is no invitation, or was altered.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_CHARS:
        raise BadInvite(f"invitation {text[:12]!r}...: expected {PREFIX} and about 55 characters")
    try:
        data = base58.b58decode(text[len(PREFIX) :])
    except ValueError:
        raise BadInvite("invitation: it has characters that no invitation has") from None
    body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
    if not body or check != _check(body):
        raise BadInvite("invitation: a character is wrong or missing; copy the whole of it")
    if body[0] != VERSION:
        raise BadInvite(f"invitation: of version {body[0]}, expected {VERSION}; update swarm-ft")
    return _parsed(body[1:])


def _parsed(body: bytes) -> Invite:
    parts = []
    for length in (FINGERPRINT_BYTES, NUMBER_BYTES, SECRET_BYTES):
        parts.append(body[:length])
        body = body[length:]
    fingerprint, number, secret = parts
    addresses: list[str] = []
    while body and len(addresses) < MAX_ADDRESSES:
        address, body = _unpacked(body)
        addresses.append(address)
    if body or not addresses:
        raise BadInvite(f"invitation: expected 1 to {MAX_ADDRESSES} addresses")
    return Invite(fingerprint=fingerprint, number=number, secret=secret, addresses=tuple(addresses))


# ---- compact addresses


def _packed(address: str) -> bytes:
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not is_endpoint(address):
        raise BadInvite(f"address {address}: expected HOST:PORT")
    port = int(match["port"]).to_bytes(2, "big")
    host = match["ipv6"] or match["host"]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        if len(name) >= _NAME:
            raise BadInvite(f"address {address}: a name of {_NAME - 1} letters at most") from None
        return bytes([_NAME + len(name)]) + name + port
    return bytes([ip.version]) + ip.packed + port


def _unpacked(data: bytes) -> tuple[str, bytes]:
    """Return the first address, and the bytes after it."""
    kind = data[0]
    length = {_IPV4: 4, _IPV6: 16}.get(kind, kind - _NAME)
    raw, port, rest = data[1 : length + 1], data[length + 1 : length + 3], data[length + 3 :]
    if length < 1 or len(port) < 2:
        raise BadInvite("invitation: an address in it is cut short")
    host = _host(kind, raw)
    address = f"{host}:{int.from_bytes(port, 'big')}"
    if not is_endpoint(address):
        raise BadInvite("invitation: an address in it is malformed")
    return address, rest


def _host(kind: int, raw: bytes) -> str:
    if kind == _IPV4:
        return str(ipaddress.IPv4Address(raw))
    if kind == _IPV6:
        return f"[{ipaddress.IPv6Address(raw)}]"
    return raw.decode("ascii", "replace")


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=CHECK_BYTES).digest()
