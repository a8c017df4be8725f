"""Messages to bytes and back, bounded. It knows no transport."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarm_ft.errors import MalformedMessage

MAX_MESSAGE_BYTES = 128 << 20
"""Largest message. Above the largest frame that a real model makes (8,192 tokens x 4,096
channels of float32), below what a hostile sender needs to exhaust a volunteer's memory."""

Some = TypeVar("Some", bound=Message)


def to_bytes(message: Message, max_bytes: int) -> bytes:
    """The message's bytes.

    Raises:
        MalformedMessage: they are more than `max_bytes`.
    """
    data = message.SerializeToString()
    if len(data) > max_bytes:
        raise MalformedMessage(
            f"a {type(message).__name__} of {len(data)} bytes: expected {max_bytes} at most"
        )
    return data


def from_bytes(kind: type[Some], data: bytes, remote: str) -> Some:
    """The message of class `kind` that `remote` wrote as `data`.

    Raises:
        MalformedMessage: the bytes are not such a message.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise MalformedMessage(
            f"{remote} sent {len(data)} bytes that are not a {kind.__name__}"
        ) from None
