"""Tickets: proofs for a relay that the coordinator allows two members to meet there. Pure.

A ticket is for one side of one meeting, and for a minute: meeting 16 bytes, side 1, the hash of
each side's name 8, expiry 4 (Unix seconds), and the coordinator's signature (ECDSA, P-256).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from swarm_ft.errors import NotAllowed
from swarm_ft.identity.keys import PrivateKey, PublicKey
from swarm_ft.protocol.messages.meeting import MAX_TICKET_BYTES, MEETING_BYTES

LIFETIME_S = 60
MEMBER_BYTES = 8
"""Bytes of a member's hash: among 65,536 members two collide with probability 1e-10."""
_BODY_BYTES = MEETING_BYTES + 1 + 2 * MEMBER_BYTES + 4
_SIGNED = ec.ECDSA(SHA256())


@dataclass(frozen=True, slots=True)
class Ticket:
    """Meeting and side that a ticket admits.

    Attributes:
        meeting: Number of the meeting, 16 bytes.
        is_caller: Whether the bearer is the meeting's caller.
        caller: `member_hash` of the member that requested the meeting. The relay counts legs and
            links against this one: a member does not choose who calls it.
        callee: `member_hash` of the other side.
    """

    meeting: bytes
    is_caller: bool
    caller: bytes
    callee: bytes


def member_hash(name: str, secret: bytes) -> bytes:
    """Return a member's hash in tickets: a relay can count by it, and cannot derive the name.

    Args:
        name: Name of the member.
        secret: Secret of the coordinator, the same for all tickets that one relay compares.

    Returns:
        `MEMBER_BYTES` bytes.
    """
    return hashlib.blake2b(name.encode(), digest_size=MEMBER_BYTES, key=secret).digest()


def sign_ticket(key: PrivateKey, ticket: Ticket, now_unix_s: float) -> bytes:
    """Return the signed bytes of a ticket.

    Args:
        key: Private key of the coordinator.
        ticket: Meeting and side that it admits.
        now_unix_s: Unix seconds at which its `LIFETIME_S` begins.
    """
    until = int(now_unix_s) + LIFETIME_S
    side = bytes([ticket.is_caller])
    body = ticket.meeting + side + ticket.caller + ticket.callee + until.to_bytes(4, "big")
    return body + key.sign(body, _SIGNED)


def check_ticket(key: PublicKey, data: bytes, now_unix_s: float) -> Ticket:
    """Return the ticket in the bytes that a member presents.

    Raises:
        NotAllowed: The coordinator did not sign it, or it has expired.
    """
    body, signature = data[:_BODY_BYTES], data[_BODY_BYTES:]
    if len(data) > MAX_TICKET_BYTES or len(body) != _BODY_BYTES or body[MEETING_BYTES] > 1:
        raise NotAllowed(f"a ticket of {len(data)} bytes: expected one of this swarm's coordinator")
    try:
        key.verify(signature, body, _SIGNED)
    except InvalidSignature:
        raise NotAllowed("a ticket that this swarm's coordinator did not sign") from None
    if int.from_bytes(body[-4:], "big") < now_unix_s:
        raise NotAllowed("a ticket that has expired")
    members = body[MEETING_BYTES + 1 :]
    return Ticket(
        meeting=body[:MEETING_BYTES],
        is_caller=bool(body[MEETING_BYTES]),
        caller=members[:MEMBER_BYTES],
        callee=members[MEMBER_BYTES : 2 * MEMBER_BYTES],
    )
