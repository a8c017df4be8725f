"""Bounds of fields, declared beside their types and checked at every source of values.

    batch_size: Annotated[int, Range(1, 65536)]

Each source of values (a command line, a Python caller, another process) calls `refusal` or
`first_refusal`, and raises its own error.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from swarm_ft.digest import DIGEST_BYTES
from swarm_ft.errors import MalformedMessage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SHOWN_CHARS = 80
"""Characters of a refused value in an error, which may end in a log."""
T = TypeVar("T")


class Bound(ABC):
    """Metadata of a type that refuses some values."""

    @abstractmethod
    def refusal(self, value: object) -> str | None:
        """Return None for a valid value, else a text with the expected and the actual value."""


@dataclass(frozen=True, slots=True)
class Range(Bound):
    """Bound: a number from `minimum` to `maximum`, both included; never inf, never NaN.

    Only integers are valid if `minimum` is an int; `Range(0.0)` accepts any finite number from 0
    on. With `is_open` the minimum itself is not valid.
    """

    minimum: float
    maximum: float = math.inf
    is_open: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether only integers are valid."""
        return isinstance(self.minimum, int)

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if isinstance(value, bool) or not isinstance(
            value, int if self.is_integer else int | float
        ):
            return (
                f"expected {'an integer' if self.is_integer else 'a number'}, got {_shown(value)}"
            )
        is_above = self.minimum < value if self.is_open else self.minimum <= value
        if math.isfinite(value) and is_above and value <= self.maximum:
            return None
        return f"expected {self}, got {value}"

    def __str__(self) -> str:
        kind, low, high = "", str(self.minimum), str(self.maximum)
        if not self.is_integer:
            kind, low, high = "a finite number, ", f"{self.minimum:g}", f"{self.maximum:g}"
        if self.is_open:
            return f"{kind}above {low}" + ("" if self.maximum == math.inf else f", up to {high}")
        return f"{kind}{low} or more" if self.maximum == math.inf else f"{kind}{low} to {high}"


@dataclass(frozen=True, slots=True)
class Length(Bound):
    """Bound: a text, bytes or a collection of `minimum` to `maximum` bytes or entries.

    A text's length is that of its UTF-8, as file systems and the wire store it.
    """

    maximum: int
    minimum: int = 0

    def refusal(self, value: object) -> str | None:
        """See `Bound`. The text does not show the value, which may be long."""
        if not isinstance(value, Collection):
            return f"expected {self._in('entries')}, got {_shown(value)}"
        length = num_utf8_bytes(value) if isinstance(value, str) else len(value)
        if length is None:
            return f"expected Unicode text, got {_shown(value)}"
        if self.minimum <= length <= self.maximum:
            return None
        unit = "bytes" if isinstance(value, bytes) else "entries"
        unit = "bytes of UTF-8" if isinstance(value, str) else unit
        return f"expected {self._in(unit)}, got {length}"

    def _in(self, unit: str) -> str:
        if self.minimum == self.maximum:
            return f"{self.maximum} {unit}"
        few = f"{self.minimum} to " if self.minimum else "at most "
        return f"{few}{self.maximum} {unit}"


@dataclass(frozen=True, slots=True)
class OneOf(Bound):
    """Bound: one of a few values."""

    values: tuple[object, ...]

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        return None if value in self.values else f"expected {self}, got {_shown(value)}"

    def __str__(self) -> str:
        *others, last = map(str, self.values)
        return f"{', '.join(others)} or {last}" if others else last


# ---- bounds of values from other processes

MAX_ID_BYTES = 64
"""Bytes of run and peer names in UTF-8; a longer one would only fill logs."""
MAX_TEXT_BYTES = 1000
"""Bytes of reasons and details in UTF-8, which end in logs and terminals."""
MAX_HOSTED = 4
"""Stages at one peer, each of another run."""
MAX_PEER_NUMBER = 1e200
"""Largest loss or time of a peer; sums of larger ones would overflow."""
MAX_SQUARED_NORM = 1e60
"""Largest squared norm of a stage's gradient; a larger one means that the model diverged."""
MAX_SCALAR = 1e30
"""Largest learning rate or bound of a norm.

float32 holds it times `MAX_FACTOR`, and divided by an optimizer's first bias correction (0.1):
torch refuses a larger number in the middle of a step.
"""
MAX_FACTOR = 1e6
"""Largest factor of learning rates and losses."""
MAX_ENDPOINT_CHARS = 255

_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]"
_ENDPOINT = re.compile(rf"({_HOST}):([0-9]{{1,5}})")


def is_endpoint(text: str) -> bool:
    """Whether a text is `host:port`: a name, an IPv4 address or an IPv6 one in brackets."""
    if len(text) > MAX_ENDPOINT_CHARS:
        return False
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 1 <= int(match[3]) <= 65535


def is_loopback(host: str) -> bool:
    """Whether a host is one of this machine's own addresses, 127.0.0.0/8 or ::1.

    A name is not: it may lead anywhere.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


PRIVATE_NETWORKS = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)
"""Networks of RFC 1918 and RFC 4193, which every house may use."""


def is_private(host: str) -> bool:
    """Whether a host is an address within a house, which another house may have as well."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in PRIVATE_NETWORKS)


def host_of(endpoint: str) -> str:
    """Return the host of `host:port`, an IPv6 address without its brackets."""
    return endpoint.rpartition(":")[0].strip("[]")


def num_utf8_bytes(text: str) -> int | None:
    """Return the length of a text in UTF-8; None if a lone surrogate makes that impossible."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return None


def cut_text(text: str, max_bytes: int) -> str:
    """Return the longest prefix of a text that fits, without splitting a character.

    Args:
        text: Text that may contain lone surrogates, which become question marks.
        max_bytes: Bytes of the result's UTF-8.
    """
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _is_line(value: object, max_bytes: int) -> bool:
    """Whether a value is a printable text of at most `max_bytes`; no surrogate is printable."""
    return isinstance(value, str) and value.isprintable() and len(value.encode()) <= max_bytes


@dataclass(frozen=True, slots=True)
class Name(Bound):
    """Bound: a short printable name without slashes; paths contain its `digest.file_stem`."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if value and _is_line(value, MAX_ID_BYTES) and not {"/", "\\"}.intersection(str(value)):
            return None
        return (
            f"expected 1 to {MAX_ID_BYTES} bytes of printable UTF-8 and no slash, "
            f"got {ascii(value)[:MAX_SHOWN_CHARS]}"
        )


@dataclass(frozen=True, slots=True)
class NameList(Bound):
    """Bound: up to `maximum` names with commas between them."""

    maximum: int

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        names = value.split(",", self.maximum) if isinstance(value, str) and value else []
        if not isinstance(value, str) or len(names) > self.maximum:
            return f"expected at most {self.maximum} names, as NAME,NAME, got {_shown(value)}"
        if any(name != name.strip() for name in names):
            return f"expected no space around a name, got {_shown(value)}"
        return _first(Name().refusal(name) for name in names)


@dataclass(frozen=True, slots=True)
class Line(Bound):
    """Bound: a line of text, perhaps empty; it holds for every text without another bound."""

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if _is_line(value, MAX_TEXT_BYTES):
            return None
        return (
            f"expected at most {MAX_TEXT_BYTES} bytes of printable UTF-8, "
            f"got {ascii(value)[:MAX_SHOWN_CHARS]}"
        )


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Metadata of a text for people: never refused, but cut and made printable."""


@dataclass(frozen=True, slots=True)
class HostAndPort(Bound):
    """Bound: `host:port`, see `is_endpoint`; empty only if optional."""

    is_optional: bool = False

    def refusal(self, value: object) -> str | None:
        """See `Bound`."""
        if isinstance(value, str) and (is_endpoint(value) or (self.is_optional and not value)):
            return None
        return f"expected HOST:PORT, got {ascii(value)[:MAX_SHOWN_CHARS]}"


Endpoint = Annotated[str, HostAndPort()]
Text = Annotated[str, Cleaned()]
DIGEST = Length(DIGEST_BYTES, DIGEST_BYTES)
Digest = Annotated[bytes, DIGEST]


def check_bound(name: str, value: T, bound: Bound) -> T:
    """Return `value`, if it is within the bound; for messages that are read by hand.

    Raises:
        MalformedMessage: The value is out of the bound.
    """
    text = bound.refusal(value)
    if text is not None:
        raise MalformedMessage(f"{name}: {text}")
    return value


def clean_text(value: str) -> str:
    """Return `value` without control characters, cut to a length fit for logs."""
    printable = "".join(c if c.isprintable() else " " for c in value[:MAX_TEXT_BYTES])
    return cut_text(printable, MAX_TEXT_BYTES)


# ---- check of a value against its type's bounds


def refusal(value: object, hint: object) -> str | None:
    """Return why a value is out of its type's bounds, with the expected and the actual value.

    Args:
        value: Any value, of any type.
        hint: A type. The check uses the bounds of `Annotated` in it, in the entries of tuples,
            sets and mappings, and in `X | None`. Nested dataclasses check themselves.

    Returns:
        None for a valid value.
    """
    origin = get_origin(hint)
    if origin is None:
        return None
    inner = get_args(hint)
    if origin is Annotated:
        for one in inner[1:]:
            text = one.refusal(value) if isinstance(one, Bound) else None
            if text is not None:
                return text
        return refusal(value, inner[0])
    if origin in (Union, UnionType):
        # Other unions have no bounds here, since the intended type is unknown.
        others = [one for one in inner if one is not NoneType]
        return None if value is None or len(others) > 1 else refusal(value, others[0])
    if not inner or not isinstance(value, Collection):
        return None
    return _first(refusal(entry, of) for entry, of in _entries(value, inner))


def first_refusal(checked: DataclassInstance) -> tuple[str, str] | None:
    """Return the first field of a dataclass instance that is out of its bounds.

    Returns:
        The field's name and its `refusal`; None if all are valid.
    """
    for name, hint in _bounded_fields(type(checked)):
        text = refusal(getattr(checked, name), hint)
        if text is not None:
            return name, text
    return None


@functools.cache
def _bounded_fields(of: type[DataclassInstance]) -> tuple[tuple[str, object], ...]:
    """Return the fields with bounds: specs are built often, and most fields need no check."""
    hints = ((field.name, field_hints(of)[field.name]) for field in fields(of))
    return tuple((name, hint) for name, hint in hints if _has_bounds(hint))


def _has_bounds(hint: object) -> bool:
    return isinstance(hint, Bound) or any(map(_has_bounds, get_args(hint)))


@functools.cache
def field_hints(of: type[DataclassInstance]) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields with their metadata, by name."""
    return get_type_hints(of, include_extras=True)


def metadata(hint: object) -> tuple[Any, ...]:
    """Return the metadata of an `Annotated` type; empty for other types."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _entries(value: Collection[Any], inner: tuple[object, ...]) -> Iterable[tuple[object, object]]:
    """Yield the entries of a collection, each with its type."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield key, inner[0]
            yield entry, inner[1]
    elif len(inner) == 1 or inner[1] is Ellipsis:
        yield from ((entry, inner[0]) for entry in value)
    else:
        yield from zip(value, inner, strict=False)


def _first(refusals: Iterable[str | None]) -> str | None:
    return next((text for text in refusals if text is not None), None)


def _shown(value: object) -> str:
    return ascii(value)[:MAX_SHOWN_CHARS]
