"""Options: fields that users set, told once, beside their type, their bounds and their default.

    batch_size: Annotated[int, Range(1, 65536), Option("Samples a step.")] = 8

The command line, the checks of values and the reference in docs/options.md are made of that.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from swarm_ft.errors import BadOption
from swarm_ft.protocol.bounds import Bound, OneOf, field_hints, first_refusal, metadata

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Option:
    """Makes a field of a dataclass an option of the commands that take the dataclass.

    Attributes:
        help: what it is for, in a sentence.
        name: on the command line, without dashes; the field's own where empty.
        metavar: what stands for the value in help; by the type where empty.
        default: the default in words, where it is not the field's own or does not speak.
        words: what stands for False and for True, of a bool that is no switch.
        has_no: whether there is a `--no-NAME` beside a switch.
    """

    help: str
    name: str = ""
    metavar: str = ""
    default: str = ""
    words: tuple[str, str] | None = None
    has_no: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """One option as it was declared.

    Attributes:
        field: its name in Python, and as the parameter of a command.
        kind: its type, without None and metadata.
        default: a value of `kind`, or None; MISSING if it must be given.
        notes: all that its type is annotated with: bounds, and what others put there.
    """

    field: str
    kind: type
    option: Option
    default: object
    notes: tuple[Any, ...]

    @property
    def flag(self) -> str:
        """As it is written on the command line."""
        return f"--{self.option.name or self.field.replace('_', '-')}"

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """What its values keep to."""
        return tuple(note for note in self.notes if isinstance(note, Bound))

    @property
    def choices(self) -> Mapping[str, object]:
        """The values by their words, where there are but a few; else empty."""
        if self.option.words is not None:
            return dict(zip(self.option.words, (False, True), strict=True))
        if issubclass(self.kind, Enum):
            return {one.name.lower(): one for one in self.kind}
        few = next((bound.values for bound in self.bounds if isinstance(bound, OneOf)), ())
        return {str(value): value for value in few}

    @property
    def is_switch(self) -> bool:
        """Whether it is given without a value."""
        return self.kind is bool and self.option.words is None

    @property
    def default_word(self) -> str:
        """The default as users know it; empty if there is none to tell."""
        if self.option.default or self.default in (None, MISSING):
            return self.option.default
        if self.is_switch:
            return self.flag.replace("--", "" if self.default else "no-") * self.option.has_no
        words = (word for word, value in self.choices.items() if value == self.default)
        return next(words, str(self.default))


@functools.cache
def declared(of: type[DataclassInstance]) -> tuple[Declared, ...]:
    """The options of a dataclass in order; where it is made of others, theirs in their place."""
    found: list[Declared] = []
    for field in fields(of):
        kind, notes = _kind_and_notes(field_hints(of)[field.name])
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is not None:
            found.append(
                Declared(
                    field=field.name, kind=kind, option=option, default=field.default, notes=notes
                )
            )
        elif is_dataclass(kind):
            found += declared(kind)
    return tuple(found)


def build(of: type[Options], given: Mapping[str, object]) -> Options:
    """A dataclass, and those that it is made of, from its options.

    Args:
        of: what to build.
        given: values by `Declared.field`; None, or nothing, leaves the default.

    Raises:
        BadInput: a value that the dataclass refuses.
    """
    values: dict[str, Any] = {}
    for field in fields(of):
        kind, _ = _kind_and_notes(field_hints(of)[field.name])
        if is_dataclass(kind):
            values[field.name] = build(kind, given)
        elif given.get(field.name) is not None:
            values[field.name] = given[field.name]
    return of(**values)


def check(options: DataclassInstance) -> None:
    """Refuse values out of the bounds that are declared.

    Raises:
        BadOption: the first of them, by the name that users know it by.
    """
    refused = first_refusal(options)
    if refused is not None:
        field, words = refused
        raise BadOption(f"{_called(type(options), field)}: {words}")
    own = {field.name for field in fields(options)}  # of what it is made of, each checks itself
    for one in declared(type(options)):
        if one.field in own and one.choices:
            _check_choice(one, getattr(options, one.field))


def _check_choice(one: Declared, value: object) -> None:
    if value not in one.choices.values():
        raise BadOption(f"{one.flag}: expected {OneOf(tuple(one.choices))}, got {value!a:.80}")


def _called(of: type[DataclassInstance], field: str) -> str:
    flags = {one.field: one.flag for one in declared(of)}
    return flags.get(field, field.replace("num_", "number of ").replace("_", " "))


def _kind_and_notes(hint: object) -> tuple[type, tuple[Any, ...]]:
    """`X` of `Annotated[Annotated[X, ...] | None, ...]`, and what all of it is annotated with."""
    if get_origin(hint) is Annotated:
        kind, notes = _kind_and_notes(get_args(hint)[0])
        return kind, (*notes, *metadata(hint))
    if get_origin(hint) in (Union, UnionType):
        return _kind_and_notes(next(one for one in get_args(hint) if one is not NoneType))
    return cast(type, hint), ()
