"""Options: fields that users set, told once, beside their type, their bounds and their default.

    batch_size: Annotated[int, Range(1, 65536), Option("Samples a step.")] = 8

The command line, the checks of values and docs/reference/options.md are made of that.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Bound, OneOf, field_hints, first_refusal, metadata
from swarm_ft.protocol.spec.sizes import parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Option:
    """Makes a field of a dataclass an option of the commands that take the dataclass.

    Attributes:
        help: what it is for, in a sentence.
        name: on the command line, without dashes; the field's own where empty.
        long_name: another one, for who does not know the short one.
        metavar: what stands for the value in help; by the type where empty.
        default: the default in words, where it is not the field's own or does not speak.
        words: what stands for False and for True, of a bool that is no switch.
        has_no: whether there is a `--no-NAME` beside a switch.
    """

    help: str
    name: str = ""
    long_name: str = ""
    metavar: str = ""
    default: str = ""
    words: tuple[str, str] | None = None
    has_no: bool = True


@dataclass(frozen=True, slots=True)
class Size:
    """Beside an `Option` of a number of bytes: it may be written as 2GiB or 500MB."""


@dataclass(frozen=True)
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
    def long_flag(self) -> str:
        """Another way to write it; empty if there is none."""
        return self.option.long_name and f"--{self.option.long_name}"

    @property
    def no_flag(self) -> str:
        """What turns a switch off; empty if nothing does."""
        has_one = self.is_switch and self.option.has_no
        return f"--no-{self.flag[2:]}" if has_one else ""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """What its values keep to."""
        return tuple(note for note in self.notes if isinstance(note, Bound))

    @functools.cached_property
    def choices(self) -> Mapping[str, object]:
        """The values by their words, where there are but a few; else empty."""
        if self.option.words is not None:
            return dict(zip(self.option.words, (False, True), strict=True))
        if issubclass(self.kind, Enum):
            return {one.name.lower().replace("_", "-"): one for one in self.kind}
        few = next((bound.values for bound in self.bounds if isinstance(bound, OneOf)), ())
        return {str(value): value for value in few}

    @property
    def is_switch(self) -> bool:
        """Whether it is given without a value."""
        return self.kind is bool and self.option.words is None

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, which people write with a unit."""
        return any(isinstance(note, Size) for note in self.notes)

    @property
    def is_repeated(self) -> bool:
        """Whether it may be given several times, so that its value is a tuple of texts."""
        return self.kind is tuple

    @property
    def default_word(self) -> str:
        """The default as users know it; empty if there is none to tell."""
        if self.option.default or self.default in (None, MISSING, ()):
            return self.option.default
        if self.is_switch:
            return (self.flag if self.default else self.no_flag)[2:]
        return self.word_for(self.default)

    @property
    def names(self) -> tuple[str, ...]:
        """By which it is known in Python and in files: with underscores, its field's name first."""
        flags = (flag[2:].replace("-", "_") for flag in (self.flag, self.long_flag) if flag)
        return tuple(dict.fromkeys((self.field, *flags)))

    def value_of(self, given: object) -> object:
        """A value of `kind`, of what a program or a file gave: itself, or its word.

        Raises:
            BadOption: it is neither.
        """
        if self.is_repeated and given is not None:
            return self._texts_of(given)
        if given is None or (
            isinstance(given, self.kind) and not (isinstance(given, bool) and self.kind is not bool)
        ):
            return given
        if self.choices:
            word = self.word_of(given)
            if word not in self.choices:
                words = OneOf(tuple(self.choices))
                raise BadOption(f"{self.flag}: expected {words}, got {given!a:.80}")
            return self.choices[word]
        if self.is_size and isinstance(given, str):
            try:
                return parse_size(given)
            except ValueError as error:
                raise BadOption(f"{self.flag}: {error}") from None
        try:
            return self._converted(given)
        except (TypeError, ValueError):
            kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}
            expected = kind.get(self.kind.__name__, self.kind.__name__)
            raise BadOption(f"{self.flag}: expected {expected}, got {given!a:.80}") from None

    def _texts_of(self, given: object) -> tuple[str, ...]:
        """The texts of a repeated option: of a list, of one text, or `key=value` of a mapping."""
        if isinstance(given, Mapping):
            given = [f"{key}={value}" for key, value in given.items()]
        texts = (given,) if isinstance(given, str) else given
        if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
            raise BadOption(f"{self.flag}: expected texts, got {given!a:.80}")
        return tuple(texts)

    def word_of(self, given: object) -> str:
        """What a program or a file gave, as it is written on the command line.

        YAML takes no, off and on for truth values.
        """
        if isinstance(given, bool):
            words = ("on", "yes", "true") if given else ("no", "off", "false")
            return next((word for word in words if word in self.choices), words[-1])
        if isinstance(given, (list, tuple)):
            return ",".join(str(one) for one in given)
        return str(given).lower().replace("_", "-") if self.choices else str(given)

    def _converted(self, given: object) -> object:
        """`given` as `kind`, where nothing is lost by that."""
        if self.kind is str and isinstance(given, (list, tuple)):
            return self.word_of(given)
        if isinstance(given, (bool, list, tuple, Mapping)) or self.kind is bool:
            raise TypeError
        value = self.kind(given)  # such as a path, or 1e-4, which YAML takes for a text
        if self.kind is int and float(str(given)) != value:
            raise ValueError
        return value

    def arguments(self, value: object) -> list[str]:
        """What asks for a value on the command line."""
        if self.is_switch:
            return [self.flag if value else self.no_flag]
        if isinstance(value, tuple):
            return [word for one in value for word in (self.flag, str(one))]
        return [self.flag, self.word_for(value)]

    def word_for(self, value: object) -> str:
        """A value as it is written on the command line."""
        if self.is_size and value:
            return f"{value}B"
        words = (word for word, choice in self.choices.items() if choice == value)
        return next(words, str(value))


def declared(of: type[DataclassInstance]) -> tuple[Declared, ...]:
    """The options of a dataclass in order; where it is made of others, theirs in their place."""
    found: list[Declared] = []
    for part in _parts(of).values():
        found += [part] if isinstance(part, Declared) else declared(part)
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
    for name, part in _parts(of).items():
        if not isinstance(part, Declared):
            values[name] = build(part, given)
        elif given.get(name) is not None:
            values[name] = given[name]
    return of(**values)


def by_names(of: type[DataclassInstance], given: Mapping[str, object]) -> dict[str, object]:
    """Values by `Declared.field`, for `build`, of what was given by any name that an option has.

    Args:
        of: what declares the options.
        given: values, or the words that stand for them, by a field's name or by an option's, with
            dashes or underscores.

    Raises:
        BadOption: there is no such option (the nearest name is told), one is given twice, or a
            word stands for none of its values.
    """
    known = {name: one for one in declared(of) for name in one.names}
    values: dict[str, object] = {}
    for name, value in given.items():
        one = known.get(name.replace("-", "_"))
        if one is None:
            raise BadOption(f"{name!a:.80}: there is no such option{nearest(name, known)}")
        if one.field in values:
            raise BadOption(f"{one.flag}: given twice, as {name!a} too")
        values[one.field] = one.value_of(value)
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, where a known name is like it; else nothing."""
    alike = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), 1)
    return f"; did you mean '{alike[0]}'?" if alike else ""


def arguments(options: DataclassInstance) -> list[str]:
    """The command line that asks for `options`; what is as by default is left out."""
    words: list[str] = []
    for name, part in _parts(type(options)).items():
        value = getattr(options, name)
        if not isinstance(part, Declared):
            words += arguments(value)
        elif value is not None and value != part.default:
            words += part.arguments(value)
    return words


def check(options: DataclassInstance) -> None:
    """Refuse values out of the bounds that are declared.

    Raises:
        BadOption: the first of them, by the name that users know it by.
    """
    parts = _parts(type(options))
    refused = first_refusal(options)
    if refused is not None:
        field, words = refused
        raise BadOption(f"{_called(field, parts.get(field))}: {words}")
    for field, part in parts.items():
        if isinstance(part, Declared) and part.choices:
            _check_choice(part, getattr(options, field))


def _check_choice(one: Declared, value: object) -> None:
    if value not in one.choices.values() and (value is not None or one.default is not None):
        raise BadOption(f"{one.flag}: expected {OneOf(tuple(one.choices))}, got {value!a:.80}")


def _called(field: str, part: Part | None) -> str:
    if isinstance(part, Declared):
        return part.flag
    return field.replace("num_", "number of ").replace("_", " ")


Part = Declared | type["DataclassInstance"]


@functools.cache
def _parts(of: type[DataclassInstance]) -> Mapping[str, Part]:
    """The fields of a dataclass that are options, or dataclasses that have some."""
    parts: dict[str, Part] = {}
    for field in fields(of):
        kind, notes = _kind_and_notes(field_hints(of)[field.name])
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is not None:
            parts[field.name] = Declared(field.name, kind, option, field.default, notes)
        elif is_dataclass(kind):
            parts[field.name] = kind
    return parts


def _kind_and_notes(hint: object) -> tuple[type, tuple[Any, ...]]:
    """`X` of `Annotated[Annotated[X, ...] | None, ...]`, and what all of it is annotated with."""
    if get_origin(hint) is Annotated:
        kind, notes = _kind_and_notes(get_args(hint)[0])
        return kind, (*notes, *metadata(hint))
    if get_origin(hint) is tuple:
        return tuple, ()
    if get_origin(hint) in (Union, UnionType):
        return _kind_and_notes(next(one for one in get_args(hint) if one is not NoneType))
    return cast(type, hint), ()
