"""The coordinator's own values as JSON, by their types. Pure.

Messages of peers, and a run's spec, are stored as the bytes in which they travel (protobuf, in
base64). All other values are the coordinator's own:

    a dataclass             an object of its fields
    Mapping                 a list of pairs, in its order
    tuple, frozenset        a list; sets are sorted
    bytes                   base64
    IntEnum, StrEnum        its number, its name

Keys are never written, see `KEYS`.
"""

from __future__ import annotations

import typing
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.recording.earlier import UPGRADES
from swarm_ft.protocol.messages.control import FromPeer
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.convert import WireType
from swarm_ft.protocol.wire.earlier import any_message, any_spec
from swarm_ft.transport.methods import JOIN

KEYS = frozenset({"storage_key"})
"""Fields that are not written, and are empty after reading."""
MEMOS = frozenset({"memo"})
"""Fields that hold cached answers, which are computed again."""
MESSAGES: Mapping[type, WireType[Any]] = {
    **dict.fromkeys(get_args(FromPeer), JOIN.request),
    RunSpec: RUN_SPEC,
}


def encode_value(value: Any) -> Any:  # noqa: ANN401 - values of all types
    """Return a value as `json` takes it.

    Raises:
        TypeError: The type of the value is not supported.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in MESSAGES:
        return b64encode(MESSAGES[kind].to_bytes(value)).decode()
    if is_dataclass(kind):
        return {name: encode_value(getattr(value, name)) for name in _names(kind)}
    return _plain_part(value)


def _plain_part(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, (IntEnum, int)):
        return int(value)
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return [[encode_value(key), encode_value(entry)] for key, entry in value.items()]
    if isinstance(value, frozenset):
        return [encode_value(one) for one in sorted(value)]
    if isinstance(value, tuple):
        return [encode_value(one) for one in value]
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(f"there is no way to write a {type(value).__name__}")


@cache
def _names(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a dataclass
    return tuple(field.name for field in fields(kind) if field.name not in KEYS | MEMOS)


def decode_value(hint: Any, found: Any) -> Any:  # noqa: ANN401
    """Return the value of which `plain` made this.

    Args:
        hint: Type of the value.
        found: Value that `json` read.

    Raises:
        ValueError, TypeError, KeyError, SwarmError: It is no such value.
    """
    return _builder(hint)(found)


@cache
def _builder(hint: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - a kind of type a line
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (typing.Union, UnionType):
        return _optional(inner)
    if origin in (Mapping, dict):
        key, entry = _builder(inner[0]), _builder(inner[1])
        made = MappingProxyType if origin is Mapping else dict
        return lambda found: made({key(k): entry(v) for k, v in found})
    if origin is frozenset:
        one = _builder(inner[0])
        return lambda found: frozenset(map(one, found))
    if origin is tuple:
        return _tuple(inner)
    if hint in MESSAGES:
        return _message(hint)
    if is_dataclass(hint):
        return _record(hint)
    if hint is bytes:
        return b64decode
    is_enum = isinstance(hint, type) and issubclass(hint, (IntEnum, StrEnum))
    if hint in (bool, int, float, str) or is_enum:
        return lambda found: hint(found)
    raise TypeError(f"there is no way to read a {hint}")


def _message(kind: type) -> Callable[[Any], Any]:
    if kind is RunSpec:
        return lambda found: any_spec(b64decode(found))
    return lambda found: any_message(MESSAGES[kind], b64decode(found))


def _optional(inner: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Return a builder of a value or None, or of any message of a peer."""
    kinds = [kind for kind in inner if kind is not NoneType]
    if len(kinds) > 1 and not all(kind in MESSAGES for kind in kinds):
        raise TypeError(f"there is no way to read one of {kinds}")
    one = _builder(kinds[0])
    absent = (None, "") if kinds[0] is Reason else (None,)  # version 1 has an empty text
    return lambda found: None if found in absent else one(found)


def _tuple(inner: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        one = _builder(inner[0])
        return lambda found: tuple(map(one, found))
    each = [_builder(kind) for kind in inner]
    return lambda found: tuple(build(part) for build, part in zip(each, found, strict=True))


def _record(kind: Any) -> Callable[[Any], Any]:  # noqa: ANN401
    hints = get_type_hints(kind)
    upgraded = UPGRADES.get(kind)
    builders: dict[str, Callable[[Any], Any]] = {}

    def build(found: Any) -> Any:  # noqa: ANN401
        if not builders:  # filled late, since a type may contain itself
            builders.update((name, _builder(hints[name])) for name in _names(kind))
        if upgraded is not None:
            found = upgraded(found)
        # A field that an earlier version lacked has its default.
        return kind(**{name: one(found[name]) for name, one in builders.items() if name in found})

    return build
