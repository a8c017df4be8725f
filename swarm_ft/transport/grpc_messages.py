"""Translation of gRPC's own texts for people; no other module shows gRPC's texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import grpc

LOST = "the connection was lost"
OTHER_SWARM = "it belongs to another swarm, or to none; check the address and the invitation"

_BY_TEXT: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        ("Hostname Verification Check failed", "it answers with another member's certificate"),
        ("certificate signature failure|CERTIFICATE_VERIFY_FAILED", OTHER_SWARM),
        ("WRONG_VERSION_NUMBER", "it answers without encryption, so it is not in this swarm"),
        ("http1|HTTP/1", "it answers as a web server, so it is not in a swarm"),
        ("Connection refused", "Connection refused"),
        ("No route to host", "No route to host"),
        ("Network is unreachable", "Network is unreachable"),
        ("DNS|Domain name not found|name resolution", "no host has this name"),
        ("Timeout occurred|timed out|keepalive|ping timeout", "it does not answer"),
        ("larger than max|message is too large", "a message is larger than allowed"),
        ("Method not found", "it runs another version of swarm-ft, and does not know this request"),
        (
            "Socket closed|Connection reset|Broken pipe|End of TCP|Stream removed|recvmsg|sendmsg"
            "|GOAWAY|RST_STREAM|Channel closed|Transport closed|Connection closed|FD shutdown",
            LOST,
        ),
    )
)
_BY_STATUS = {
    grpc.StatusCode.UNAVAILABLE: "it cannot be reached",
    grpc.StatusCode.DEADLINE_EXCEEDED: "it did not answer in time",
    grpc.StatusCode.CANCELLED: "the call was cancelled",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "it has no room for this call",
    grpc.StatusCode.UNIMPLEMENTED: "it runs another version of swarm-ft",
}


def describe_status(status: grpc.StatusCode, details: str) -> str:
    """Return the reason for which a call ended, for people.

    Args:
        status: gRPC's status of the call.
        details: gRPC's own text; the result contains no part of it.
    """
    found = (words for pattern, words in _BY_TEXT if pattern.search(details))
    return next(found, _BY_STATUS.get(status, "the call failed there"))
