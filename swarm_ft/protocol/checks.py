"""Bounds for what others send: the checks that every reader of the wire uses. Nothing else."""

from __future__ import annotations

import math

from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.digest import DIGEST_BYTES

MAX_ID_CHARS = 64
"""Run and peer names; a longer one would only fill logs."""
MAX_TEXT_CHARS = 1000
"""Reasons and details, which end in logs and terminals."""


def bounded(name: str, value: int, low: int, high: int) -> int:
    """`value`, if it lies in low..high.

    Raises:
        MalformedMessage: it does not.
    """
    if not low <= value <= high:
        raise MalformedMessage(f"{name}: expected {low} to {high}, got {value}")
    return value


def checked_id(name: str, value: str, *, optional: bool = False) -> str:
    """`value`, if it is a short printable name.

    Raises:
        MalformedMessage: it is too long, not printable, or empty and not optional.
    """
    if (not value and not optional) or len(value) > MAX_ID_CHARS or not value.isprintable():
        raise MalformedMessage(f"{name}: expected 1 to {MAX_ID_CHARS} printable characters")
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


def finite(name: str, value: float, *, low: float = 0.0) -> float:
    """`value`, if it is a finite number and not below `low`.

    Raises:
        MalformedMessage: it is not.
    """
    if not (math.isfinite(value) and value >= low):
        raise MalformedMessage(f"{name}: expected a finite number from {low}, got {value}")
    return value
