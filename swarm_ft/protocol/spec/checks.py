"""Bounds for what others send: the checks that every reader of the wire uses. Nothing else."""

from __future__ import annotations

import math
import re

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import BlockIndex, PeerId, RunId
from swarm_ft.protocol.spec.digest import DIGEST_BYTES
from swarm_ft.protocol.spec.layers import MAX_BLOCKS

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


def checked_endpoint(text: str, *, optional: bool = False) -> str:
    """`text`, if it is an endpoint (or empty, where optional).

    Raises:
        MalformedMessage: it is neither.
    """
    if not is_endpoint(text) and not (optional and not text):
        raise MalformedMessage(f"endpoint {ascii(text)[:80]}: expected HOST:PORT")
    return text


def bounded(name: str, value: int, low: int, high: int) -> int:
    """`value`, if it lies in low..high.

    Raises:
        MalformedMessage: it does not.
    """
    if not low <= value <= high:
        raise MalformedMessage(f"{name}: expected {low} to {high}, got {value}")
    return value


def checked_id(name: str, value: str, *, optional: bool = False) -> str:
    """`value`, if it is a short printable name without slashes, since names end in paths.

    Raises:
        MalformedMessage: it is too long, not printable, or empty and not optional.
    """
    is_printable = value.isprintable() and not {"/", "\\"} & set(value)
    if (not value and not optional) or len(value) > MAX_ID_CHARS or not is_printable:
        raise MalformedMessage(
            f"{name}: expected 1 to {MAX_ID_CHARS} printable characters and no slash"
        )
    return value


def checked_run_id(text: str) -> RunId:
    """A run's name, if it is one.

    Raises:
        MalformedMessage: see `checked_id`.
    """
    return RunId(checked_id("run id", text))


def checked_peer_id(text: str) -> PeerId:
    """A peer's name, if it is one.

    Raises:
        MalformedMessage: see `checked_id`.
    """
    return PeerId(checked_id("peer id", text))


def checked_boundary(number: int) -> BlockIndex:
    """A boundary, if it can be one.

    Raises:
        MalformedMessage: it lies in front of every model, or behind.
    """
    return BlockIndex(bounded("boundary", number, 1, MAX_BLOCKS))


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


def finite(name: str, value: float, *, high: float = math.inf) -> float:
    """`value`, if it is a finite number from 0 to `high`.

    Raises:
        MalformedMessage: it is not.
    """
    if not (math.isfinite(value) and 0.0 <= value <= high):
        raise MalformedMessage(f"{name}: expected a finite number from 0 to {high}, got {value}")
    return value
