"""Numbers of bytes as people write and read them: `5GiB`, `500MB`. Pure."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = (1 << 10 * power for power in range(1, 5))
_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B?|B)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of a size: `2GiB`, `500MB`, `4096B`, or 0 for none.

    Raises:
        ValueError: `text` is no size, or a number without a unit.
    """
    text = text.strip()
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a size such as 2GiB, 500MB or 0, got {text!r}")
    number, unit = match["number"], match["unit"]
    if unit is None:
        if float(number) == 0:
            return 0
        first, second = _readings(number)
        raise ValueError(
            f"expected a size such as 2GiB, 500MB or 0, got {text!r}, which has no unit; "
            f"write {first} or {second}"
        )
    base = 1024 if unit[1:2].lower() == "i" else 1000
    return int(float(number) * base ** _POWERS.get(unit[0].upper(), 0))


def _readings(number: str) -> tuple[str, str]:
    """Return the two most probable meanings of a bare number."""
    units = ("B", "MiB") if float(number) >= MIB else ("GiB", "MiB")
    return f"{number}{units[0]}", f"{number}{units[1]}"


def format_size(num_bytes: int) -> str:
    """Return a size of memory or disk in binary units: `5 GiB`, `1.5 GiB`, `300 MiB`."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= unit:
            return f"{_rounded(num_bytes / unit)} {name}"
    return f"{num_bytes} bytes"


def size_word(num_bytes: int) -> str:
    """Return a size as `parse_size` reads it, in the largest exact unit: `2GiB`, `500B`, 0."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{name}"
    return f"{num_bytes}B" if num_bytes else "0"


def format_traffic(num_bytes: int) -> str:
    """Return traffic in decimal units, as networks count it: `50.3 MB`."""
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def _rounded(number: float) -> str:
    """Return the number, with one digit after the point below 100 if that is not 0."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}".removesuffix(".0")
