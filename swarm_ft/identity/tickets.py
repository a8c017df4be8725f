"""Tickets: by which a relay knows that the coordinator lets two members meet there. Pure.

A ticket is for one side of one meeting, and for a minute: meeting 16 bytes, side 1, expiry 4 (Unix
seconds), and the coordinator's signature (ECDSA, P-256).
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from swarm_ft.errors import NotAllowed
from swarm_ft.identity.keys import PrivateKey, PublicKey
from swarm_ft.protocol.messages.meeting import MAX_TICKET_BYTES, MEETING_BYTES

LIFETIME_S = 60
_BODY_BYTES = MEETING_BYTES + 1 + 4
_SIGNED = ec.ECDSA(SHA256())


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whom it lets in.

    Attributes:
        meeting: which.
        is_caller: which side of it.
    """

    meeting: bytes
    is_caller: bool


def sign_ticket(key: PrivateKey, ticket: Ticket, now_unix_s: float) -> bytes:
    """The ticket as its bearer shows it.

    Args:
        key: the coordinator's.
        ticket: whom it lets in.
        now_unix_s: it is good for `LIFETIME_S` from then on.
    """
    until = int(now_unix_s) + LIFETIME_S
    body = ticket.meeting + bytes([ticket.is_caller]) + until.to_bytes(4, "big")
    return body + key.sign(body, _SIGNED)


def check_ticket(key: PublicKey, data: bytes, now_unix_s: float) -> Ticket:
    """What somebody showed.

    Raises:
        NotAllowed: the coordinator did not sign it, or it is not good any more.
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
    return Ticket(meeting=body[:MEETING_BYTES], is_caller=bool(body[MEETING_BYTES]))
