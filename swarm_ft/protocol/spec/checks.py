"""What others may send, said in types, and the checks of those who read it by hand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.spec.bounds import Bound, Length
from swarm_ft.protocol.spec.digest import DIGEST_BYTES

MAX_ID_CHARS = 64
"""Run and peer names; a longer one would only fill logs."""
MAX_TEXT_CHARS = 1000
"""Reasons and details, which end in logs and terminals."""
MAX_PEER_NUMBER = 1e200
"""Norms and losses of peers, which are summed: larger ones, finite each, would overflow."""

MAX_ENDPOINT_CHARS = 255

_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]"
_ENDPOINT = re.compile(rf"({_HOST}):([0-9]{{1,5}})")


def is_endpoint(text: str) -> bool:
    """Whether it is `host:port`: a name, an IPv4 address or an IPv6 one in brackets."""
    if len(text) > MAX_ENDPOINT_CHARS:
        return False
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 1 <= int(match[3]) <= 65535


@dataclass(frozen=True, slots=True)
class Name(Bound):
    """A short printable name without slashes, since names end in paths."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        is_line = isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS and value.isprintable()
        if is_line and not {"/", "\\"}.intersection(str(value)):
            return None
        return (
            f"expected 1 to {MAX_ID_CHARS} printable characters and no slash, "
            f"got {ascii(value)[:MAX_ID_CHARS]}"
        )


@dataclass(frozen=True, slots=True)
class Line(Bound):
    """A line of text, perhaps empty; what every text has to be of which nothing else is said."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS and value.isprintable():
            return None
        return (
            f"expected at most {MAX_TEXT_CHARS} printable characters, "
            f"got {ascii(value)[:MAX_ID_CHARS]}"
        )


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Metadata of a text for people: never refused, but cut and made printable."""


@dataclass(frozen=True, slots=True)
class HostAndPort(Bound):
    """`host:port`, see `is_endpoint`; perhaps empty, where nobody knows."""

    is_optional: bool = False

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if isinstance(value, str) and (is_endpoint(value) or (self.is_optional and not value)):
            return None
        return f"expected HOST:PORT, got {ascii(value)[:MAX_ID_CHARS]}"


Endpoint = Annotated[str, HostAndPort()]
Text = Annotated[str, Cleaned()]
Digest = Annotated[bytes, Length(DIGEST_BYTES, DIGEST_BYTES)]
_NAME = Name()


def bounded(name: str, value: int, low: int, high: int) -> int:
    """`value`, if it lies in low..high.

    Raises:
        MalformedMessage: it does not.
    """
    if not low <= value <= high:
        raise MalformedMessage(f"{name}: expected {low} to {high}, got {value}")
    return value


def checked_id(name: str, value: str) -> str:
    """`value`, if it is a `Name`.

    Raises:
        MalformedMessage: it is none.
    """
    words = _NAME.refusal(value)
    if words is not None:
        raise MalformedMessage(f"{name}: {words}")
    return value


def checked_text(value: str) -> str:
    """`value` cut to a length fit for logs, without control characters."""
    return "".join(c if c.isprintable() else " " for c in value[:MAX_TEXT_CHARS])


def checked_digest(name: str, value: bytes, *, optional: bool = False) -> bytes:
    """`value`, if it is a digest (or empty, where optional).

    Raises:
        MalformedMessage: it has another length.
    """
    if len(value) != DIGEST_BYTES and not (optional and not value):
        raise MalformedMessage(f"{name}: expected {DIGEST_BYTES} bytes, got {len(value)}")
    return value
