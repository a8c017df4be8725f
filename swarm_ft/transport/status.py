"""The one table between this project's errors and gRPC's. It knows no call and no stream.

An error crosses the wire as trailing metadata (its stable code and its message); the gRPC
status beside it is for tools that know nothing of this project.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from swarm_ft.errors import InternalError, SwarmError, Unavailable, from_code

METADATA_KEY = "swarm-error-bin"
"""`-bin`: gRPC carries the value as raw bytes, so any language's text survives."""

MAX_MESSAGE_CHARS = 1_000
"""Of an error's message. gRPC bounds all metadata of a call at 8 KiB; 1,000 characters fit in
any script. It also bounds what a hostile peer can write into our logs."""

STATUS: dict[str, grpc.StatusCode] = {
    "swarm-error": grpc.StatusCode.UNKNOWN,
    "bad-input": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-option": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-codec": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-model": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-dataset": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-layers": grpc.StatusCode.INVALID_ARGUMENT,
    "run-mismatch": grpc.StatusCode.FAILED_PRECONDITION,
    "port-in-use": grpc.StatusCode.FAILED_PRECONDITION,
    "dht-unreachable": grpc.StatusCode.FAILED_PRECONDITION,
    "protocol-error": grpc.StatusCode.INVALID_ARGUMENT,
    "malformed-message": grpc.StatusCode.INVALID_ARGUMENT,
    "bad-frame": grpc.StatusCode.INVALID_ARGUMENT,
    "out-of-turn": grpc.StatusCode.FAILED_PRECONDITION,
    "not-found": grpc.StatusCode.NOT_FOUND,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "journal-error": grpc.StatusCode.INTERNAL,
    "bad-snapshot": grpc.StatusCode.DATA_LOSS,
    "non-finite": grpc.StatusCode.ABORTED,
    "run-failed": grpc.StatusCode.ABORTED,
    "internal": grpc.StatusCode.INTERNAL,
}

_GONE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)

Metadata = Iterable[tuple[str, str | bytes]]


def to_metadata(error: SwarmError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries `error`."""
    text = f"{error.code}\n{_printable(error.message)}"
    return ((METADATA_KEY, text.encode("utf-8", "replace")),)


def from_status(
    status: grpc.StatusCode, details: str, trailing: Metadata, remote: str
) -> SwarmError:
    """The error that ended a call, as `to_metadata` wrote it.

    Without our metadata it is gRPC itself that speaks: Unavailable if the other side cannot
    be reached or dropped the call, else InternalError.
    """
    for key, value in trailing:
        if key == METADATA_KEY and isinstance(value, bytes):
            code, _, message = value.decode("utf-8", "replace").partition("\n")
            return from_code(code, _printable(message))
    text = f"{remote}: {_printable(details) or 'no detail'} (gRPC {status.name})"
    return Unavailable(text) if status in _GONE else InternalError(text)


def _printable(text: str) -> str:
    """One bounded line, so that nobody can forge lines of a log or steer a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:MAX_MESSAGE_CHARS])
