"""Conversion of values to protobuf and back by their types, for every message but the hot ones.

A frozen dataclass or a named tuple travels as a message with fields of the same names:

    X | None            a field with presence, absent for None
    tuple, frozenset    a repeated field; sets are sorted
    dict[K, V]          repeated messages of two fields, the key and the value
    IntEnum             an enum, or its number
    A | B | C           a message whose oneof has a field for each, of the message of that name
    a class of one field, where the message has a plain field: that field

The converter checks received values by their types: the bounds of `Annotated`, those of names and
numbers in `IDS`, finite floats, printable texts. A dataclass may refuse what no bound can express
(`__post_init__`). Every fault, and nothing else, ends in MalformedMessage.
"""

from __future__ import annotations

import functools
import math
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from swarm_ft.errors import MalformedMessage, SwarmError
from swarm_ft.ids import BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.spec.bounds import (
    MAX_ID_BYTES,
    Bound,
    Cleaned,
    Line,
    Name,
    Range,
    clean_text,
    cut_text,
    field_hints,
    metadata,
)
from swarm_ft.protocol.spec.layers import MAX_BLOCKS
from swarm_ft.protocol.spec.run_spec import MAX_MICROBATCHES, MAX_SAMPLES, MAX_STEPS
from swarm_ft.protocol.spec.version import VersionField

T = TypeVar("T")

IDS: Mapping[object, Bound] = {
    RunId: Name(),
    PeerId: Name(),
    BlockIndex: Range(1, MAX_BLOCKS),
    SampleId: Range(0, MAX_SAMPLES - 1),
    StepNumber: Range(0, MAX_STEPS),
    MicrobatchIndex: Range(0, MAX_MICROBATCHES - 1),
}
"""Bounds of names and numbers, wherever they occur; a block in a message is a boundary."""
DEFAULTS: Mapping[object, Bound] = {float: Range(-math.inf), str: Line()}
"""Bounds of values whose type declares none."""
MAX_REFUSAL_CHARS = 500
MAX_FLOAT = sys.float_info.max

Convert = Callable[[Any], Any]


class WireType(Generic[T]):
    """Wire type of values: their protobuf message and their bytes.

    Args:
        kind: Type of the values, perhaps a union.
        message: The protobuf class.
        to_wire: Converts a value to a message.
        from_wire: Converts a message to a value, or raises MalformedMessage.
    """

    def __init__(
        self, kind: object, message: type[Message], to_wire: Convert, from_wire: Convert
    ) -> None:
        self.kind: object = kind
        self.message = message
        self._to_wire = to_wire
        self._from_wire = from_wire

    @property
    def name(self) -> str:
        """Name of the message, for people."""
        return str(self.message.DESCRIPTOR.name)

    def to_wire(self, value: T) -> Message:
        """Return a value of our own as a message."""
        message: Message = self._to_wire(value)
        return message

    def from_wire(self, message: Message) -> T:
        """Return a received message as a value.

        Raises:
            MalformedMessage: A field is wrong; the text names the field, the expected value and the
                received one.
            VersionMismatch: The sender has another version.
        """
        value: T = self._from_wire(message)
        return value

    def to_bytes(self, value: T) -> bytes:
        """Return a value of our own as bytes."""
        return self.to_wire(value).SerializeToString()

    def from_bytes(self, data: bytes) -> T:
        """Return received bytes as a value.

        Raises:
            MalformedMessage, VersionMismatch: See `from_wire`.
        """
        try:
            message = self.message.FromString(data)
        except DecodeError:
            raise MalformedMessage(f"{len(data)} bytes that are not a {self.name}") from None
        return self.from_wire(message)


def wire_type(hint: object, message: type[Message]) -> WireType[Any]:
    """Return the `WireType` of a dataclass, or of a union of dataclasses.

    Raises:
        TypeError: The type and the message have different fields.
    """
    kinds = _kinds_of(hint)
    descriptor: Any = message.DESCRIPTOR
    plan = _record(kinds[0], descriptor) if len(kinds) == 1 else _union(kinds, descriptor)

    def from_wire(received: Message) -> Any:  # noqa: ANN401 - a value of that type
        try:
            return plan.from_wire(received)
        except _Refused as refused:
            raise MalformedMessage(refused.in_words(descriptor.name)) from None

    return WireType(hint, message, plan.to_wire, from_wire)


# ---- plans: conversions of values, built once


@dataclass(frozen=True, slots=True)
class _Plan:
    to_wire: Convert
    from_wire: Convert


class _Refused(Exception):
    """A received value is wrong; its path is collected from the inside out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._reason = reason
        self._path: list[str] = []

    def inside(self, name: str) -> _Refused:
        self._path.append(name)
        return self

    def in_words(self, message: str) -> str:
        return f"{'.'.join([message, *reversed(self._path)])}: {self._reason}"[:MAX_REFUSAL_CHARS]


def _same(value: Any) -> Any:  # noqa: ANN401
    return value


_AS_IT_IS = _Plan(_same, _same)


@functools.cache
def _record(kind: type, descriptor: Descriptor) -> _Plan:
    """Return the plan of a dataclass or a named tuple whose message has the same fields."""
    hints, by_name = field_hints(kind), descriptor.fields_by_name
    names = _names_of(kind)
    if set(names) != set(by_name):
        raise TypeError(f"{kind.__name__}: fields {names}, but {list(by_name)} in the message")
    plans = {name: _field(hints[name], by_name[name]) for name in names}
    spoken = [
        (name, s) for name in names for s in metadata(hints[name]) if isinstance(s, VersionField)
    ]
    optional = {name for name in names if _is_optional(hints[name])}
    message_class = GetMessageClass(descriptor)
    writers = [(name, plan.to_wire) for name, plan in plans.items()]
    readers = [(name, name in optional, plan.from_wire) for name, plan in plans.items()]

    def to_wire(value: object) -> Message:
        return message_class(**{name: write(getattr(value, name)) for name, write in writers})

    def from_wire(message: Message) -> object:
        for name, version in spoken:
            sender = cut_text(clean_text(getattr(message, "peer_id", "")), MAX_ID_BYTES)
            version.check(getattr(message, name), sender)
        values: dict[str, Any] = {}
        for name, may_be_absent, read in readers:
            if may_be_absent and not message.HasField(name):
                values[name] = None
                continue
            try:
                values[name] = read(getattr(message, name))
            except _Refused as refused:
                raise refused.inside(name) from None
        return _made(kind, values)

    return _Plan(to_wire, from_wire)


def _made(kind: type, values: dict[str, Any]) -> object:
    try:
        return kind(**values)
    except SwarmError as error:
        raise _Refused(error.message) from error


def _union(kinds: Iterable[type], descriptor: Descriptor) -> _Plan:
    """Return the plan of one of several dataclasses; the message's oneof names which one."""
    (oneof,) = descriptor.oneofs
    inner = {field.name: _message_of(field) for field in oneof.fields}
    by_name = {kind.__name__: kind for kind in kinds}
    if set(by_name) != {message.name for message in inner.values()}:
        raise TypeError(f"{descriptor.name}: its oneof has other messages than {list(by_name)}")
    plans = {name: _record(by_name[message.name], message) for name, message in inner.items()}
    names = {by_name[message.name]: name for name, message in inner.items()}
    message_class = GetMessageClass(descriptor)

    def to_wire(value: object) -> Message:
        name = names[type(value)]
        return message_class(**{name: plans[name].to_wire(value)})

    def from_wire(message: Message) -> object:
        name = message.WhichOneof(oneof.name)
        if name is None:
            raise _Refused(f"expected one of {', '.join(plans)}, got none that we know")
        try:
            return plans[name].from_wire(getattr(message, name))
        except _Refused as refused:
            raise refused.inside(name) from None

    return _Plan(to_wire, from_wire)


def _field(hint: object, field: FieldDescriptor) -> _Plan:
    if _is_optional(hint):
        (kind,) = _kinds_of(hint)
        plan = _field(kind, field)
        return _Plan(lambda v: None if v is None else plan.to_wire(v), plan.from_wire)
    if not field.is_repeated:
        return _single(hint, field)
    check = _checking(_bounds_of(hint))
    plan = _collection(_bare(hint), field)
    return _Plan(plan.to_wire, lambda values: plan.from_wire(check(values)))


def _collection(kind: object, field: FieldDescriptor) -> _Plan:
    origin: Any = get_origin(kind)
    inner = get_args(kind)
    if origin is dict:
        return _mapping(inner, field)
    entry = _single(inner[0], field)
    many = _many(inner[0], entry, origin)
    if origin is frozenset:
        return _Plan(lambda values: list(map(entry.to_wire, sorted(values))), many)
    if entry.to_wire is _same:
        return _Plan(_same, many)
    return _Plan(lambda values: [entry.to_wire(value) for value in values], many)


def _many(hint: object, entry: _Plan, made: Callable[[Iterable[Any]], Any]) -> Convert:
    """Return the conversion of many values; whole numbers, perhaps thousands, need no call each."""
    bounds = _bounds_of(hint)
    if entry.from_wire is _same:
        return made
    if len(bounds) != 1 or not isinstance(bounds[0], Range) or not bounds[0].is_integer:
        return lambda values: made(map(entry.from_wire, values))

    def from_wire(values: Iterable[Any]) -> Any:  # noqa: ANN401
        numbers = made(values)
        if numbers:
            entry.from_wire(min(numbers))
            entry.from_wire(max(numbers))
        return numbers

    return from_wire


def _mapping(inner: tuple[Any, ...], field: FieldDescriptor) -> _Plan:
    entry = _message_of(field)
    key_field, value_field = entry.fields
    key, value = _field(inner[0], key_field), _field(inner[1], value_field)
    entry_class = GetMessageClass(entry)

    def to_wire(values: Mapping[Any, Any]) -> list[Message]:
        return [
            entry_class(**{key_field.name: key.to_wire(k), value_field.name: value.to_wire(v)})
            for k, v in values.items()
        ]

    def from_wire(entries: Iterable[Message]) -> dict[Any, Any]:
        return {
            key.from_wire(getattr(entry, key_field.name)): value.from_wire(
                getattr(entry, value_field.name)
            )
            for entry in entries
        }

    return _Plan(to_wire, from_wire)


def _single(hint: object, field: FieldDescriptor) -> _Plan:
    kind = _bare(hint)
    check = _checking(_bounds_of(hint))
    if isinstance(kind, type) and _names_of(kind):
        plan = _record(kind, field.message_type) if field.message_type else _wrapper(kind, field)
        if check is _same:
            return plan
        return _Plan(plan.to_wire, lambda message: check(plan.from_wire(message)))
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return _Plan(_same, _enum(kind))
    if any(isinstance(one, Cleaned) for one in metadata(hint)):
        return _Plan(clean_text, clean_text)
    if kind not in (bool, int, float, str, bytes):
        raise TypeError(f"{field.full_name}: there is no way to send a {hint}")
    return _AS_IT_IS if check is _same else _Plan(_same, check)


def _wrapper(kind: type, field: FieldDescriptor) -> _Plan:
    """Return the plan of a class around one value, which travels as this value."""
    (name,) = _names_of(kind)
    inside = _field(field_hints(kind)[name], field)
    return _Plan(
        lambda value: inside.to_wire(getattr(value, name)),
        lambda value: _made(kind, {name: inside.from_wire(value)}),
    )


def _enum(kind: type[IntEnum]) -> Convert:
    members = {int(member): member for member in kind}
    numbers = ", ".join(map(str, members))

    def from_wire(number: int) -> IntEnum:
        member = members.get(number)
        if member is None:
            raise _Refused(f"expected one of {numbers}, got {number}")
        return member

    return from_wire


def _checking(bounds: tuple[Bound, ...]) -> Convert:
    """Return a function that returns its argument, if it is within all bounds."""
    if not bounds:
        return _same
    if len(bounds) == 1 and isinstance(bounds[0], Range):
        return _in_range(bounds[0])

    def check(value: Any) -> Any:  # noqa: ANN401
        for bound in bounds:
            text = bound.refusal(value)
            if text is not None:
                raise _Refused(text)
        return value

    return check


def _in_range(bound: Range) -> Convert:
    low, high = max(bound.minimum, -MAX_FLOAT), min(bound.maximum, MAX_FLOAT)

    def check(value: float) -> float:
        if low <= value <= high:
            return value
        raise _Refused(str(bound.refusal(value)))

    return check


# ---- facts from types


def _bare(hint: Any) -> Any:  # noqa: ANN401 - types are of many types
    """Return a type without its metadata, and the base of a `NewType`."""
    while metadata(hint) or hasattr(hint, "__supertype__"):
        hint = get_args(hint)[0] if metadata(hint) else hint.__supertype__
    return hint


def _bounds_of(hint: object) -> tuple[Bound, ...]:
    """Return the bounds that a type declares; otherwise those of its ids, or of all like it."""
    notes = metadata(hint)
    bounds = tuple(one for one in notes if isinstance(one, Bound))
    if bounds or any(isinstance(one, Cleaned) for one in notes):
        return bounds
    kind = get_args(hint)[0] if notes else hint
    implied = IDS.get(kind) or DEFAULTS.get(kind)
    return (implied,) if implied is not None else ()


def _message_of(field: FieldDescriptor) -> Descriptor:
    if field.message_type is None:
        raise TypeError(f"{field.full_name}: expected a message")
    return field.message_type


def _names_of(kind: type) -> list[str]:
    """Return the fields of a dataclass or a named tuple; empty for other types."""
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return list(getattr(kind, "_fields", ()))


def _kinds_of(hint: object) -> list[Any]:
    """Return the types of a union without None, or the one type itself."""
    if get_origin(hint) in (typing.Union, UnionType):
        return [kind for kind in get_args(hint) if kind is not NoneType]
    return [hint]


def _is_optional(hint: object) -> bool:
    return get_origin(hint) in (typing.Union, UnionType) and NoneType in get_args(hint)
