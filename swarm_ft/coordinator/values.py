"""Values as JSON, by the types of their fields: the one serialiser of journal and recording. Pure.

a dataclass             an object of its fields, or a list, see `Serialiser`
Mapping                 a list of pairs, in its order
tuple, frozenset        a list; sets are sorted
bytes                   base64
IntEnum, StrEnum        its number, its name
"""

from __future__ import annotations

import typing
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]
Build = Callable[[Any], Any]


class Serialiser:
    """A way to write values as JSON, and to read them.

    A field that is not written has its default after reading, also one that an earlier version
    lacked.

    Args:
        left_out: Names of fields that are not written.
        is_sparse: Whether fields that have their default are left out too.
        lists: Dataclasses written as lists of their fields; none of these is left out.
        wires: Classes written as bytes, with their encoder and decoder.
        upgrades: Functions from the JSON of any version to today's, by dataclass; None: no value.
    """

    def __init__(
        self,
        *,
        left_out: Collection[str] = (),
        is_sparse: bool = False,
        lists: Collection[type] = (),
        wires: Mapping[type, tuple[Encode, Decode]] = MappingProxyType({}),
        upgrades: Mapping[type, Build] = MappingProxyType({}),
    ) -> None:
        self._left_out = left_out
        self._is_sparse = is_sparse
        self._lists = lists
        self._wires = wires
        self._upgrades = upgrades
        self._fields: dict[type, tuple[Field[Any], ...]] = {}
        self._builds: dict[Any, Build] = {}

    def encode(self, value: Any) -> Any:  # noqa: ANN401 - values of all types
        """Return a value as `json` takes it.

        Raises:
            TypeError: The type of the value is not supported.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind in self._wires:
            return b64encode(self._wires[kind][0](value)).decode()
        if kind in self._lists:
            return [self.encode(getattr(value, field.name)) for field in fields(kind)]
        if is_dataclass(kind):
            return self._object(value)
        return self._plain(value)

    def _object(self, value: Any) -> dict[str, Any]:  # noqa: ANN401
        found = {}
        for field in self._written(type(value)):
            one = getattr(value, field.name)
            if not (self._is_sparse and one == default_of(field)):
                found[field.name] = self.encode(one)
        return found

    def _plain(self, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, (IntEnum, int)):
            return int(value)
        if isinstance(value, StrEnum):
            return str(value)
        if isinstance(value, Mapping):
            return [[self.encode(key), self.encode(entry)] for key, entry in value.items()]
        if isinstance(value, frozenset):
            return [self.encode(one) for one in sorted(value)]
        if isinstance(value, tuple):
            return [self.encode(one) for one in value]
        if isinstance(value, bytes):
            return b64encode(value).decode()
        raise TypeError(f"there is no way to write a {type(value).__name__}")

    def _written(self, kind: Any) -> tuple[Field[Any], ...]:  # noqa: ANN401 - a dataclass
        if kind not in self._fields:
            self._fields[kind] = tuple(f for f in fields(kind) if f.name not in self._left_out)
        return self._fields[kind]

    def decode(self, hint: Any, found: Any) -> Any:  # noqa: ANN401
        """Return the value of which `encode` made this.

        Args:
            hint: Type of the value.
            found: Value that `json` read.

        Raises:
            ValueError, TypeError, KeyError, SwarmError: It is no such value.
        """
        return self._build(hint)(found)

    def _build(self, hint: Any) -> Build:  # noqa: ANN401
        if hint not in self._builds:
            self._builds[hint] = self._make_build(hint)
        return self._builds[hint]

    def _make_build(self, hint: Any) -> Build:  # noqa: ANN401 - a kind of type a line
        while hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (typing.Union, UnionType):
            return self._optional(inner)
        if origin in (Mapping, dict):
            key, entry = self._build(inner[0]), self._build(inner[1])
            made = MappingProxyType if origin is Mapping else dict
            return lambda found: made({key(k): entry(v) for k, v in found})
        if origin is frozenset:
            one = self._build(inner[0])
            return lambda found: frozenset(map(one, found))
        if origin is tuple:
            return self._tuple(inner)
        if hint in self._wires:
            decode = self._wires[hint][1]
            return lambda found: decode(b64decode(found))
        return self._record(hint) if is_dataclass(hint) else _scalar(hint)

    def _optional(self, inner: tuple[Any, ...]) -> Build:
        """Return a builder of a value or None, or of any class that is written as bytes."""
        kinds = [kind for kind in inner if kind is not NoneType]
        if len(kinds) > 1 and not all(kind in self._wires for kind in kinds):
            raise TypeError(f"there is no way to read one of {kinds}")
        one = self._build(kinds[0])
        return lambda found: None if found is None else one(found)

    def _tuple(self, inner: tuple[Any, ...]) -> Build:
        if len(inner) == 2 and inner[1] is Ellipsis:
            one = self._build(inner[0])
            return lambda found: tuple(map(one, found))
        each = [self._build(kind) for kind in inner]
        return lambda found: tuple(build(part) for build, part in zip(each, found, strict=True))

    def _record(self, kind: Any) -> Build:  # noqa: ANN401
        hints = get_type_hints(kind)
        upgrade = self._upgrades.get(kind)
        builds: dict[str, Build] = {}

        def build(found: Any) -> Any:  # noqa: ANN401
            if not builds:  # filled late, since a type may contain itself
                builds.update((f.name, self._build(hints[f.name])) for f in self._written(kind))
            if kind in self._lists:
                found = dict(zip(builds, found, strict=True))
            if upgrade is not None:
                found = upgrade(found)
            if found is None:
                return None
            return kind(**{name: one(found[name]) for name, one in builds.items() if name in found})

        return build


def _scalar(hint: Any) -> Build:  # noqa: ANN401
    if hint is bytes:
        return b64decode
    if hint is float:  # a field of that type may have an int
        return lambda found: found if type(found) is int else float(found)
    is_enum = isinstance(hint, type) and issubclass(hint, (IntEnum, StrEnum))
    if hint in (bool, int, str) or is_enum:
        return lambda found: hint(found)
    raise TypeError(f"there is no way to read a {hint}")


def default_of(field: Field[Any]) -> Any:  # noqa: ANN401
    """Return a field's default; `MISSING` if it has none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
