"""Options: fields that users set, declared once with their type, their bounds and their default.

    batch_size: Annotated[int, Range(1, 65536), Option("Samples a step.")] = 8

The command line, the keywords of calls, the checks of values and the tables in docs/reference
follow from that.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Bound, OneOf, Range, field_hints, first_refusal, metadata
from swarm_ft.protocol.spec.sizes import parse_size, size_word

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Option:
    """Metadata that makes a dataclass's field an option of the commands that use the dataclass.

    Attributes:
        help: Sentence on the purpose of the option.
        name: Name on the command line, without dashes; empty: that of the field.
        long_name: Second, longer name.
        metavar: Placeholder of the value in help; empty: by the type.
        default: Text of the default, if the field's own is not clear.
        words: Words for False and for True, of a bool that is no switch.
        has_no: Whether a switch has a `--no-NAME` beside it.
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
    """Metadata beside an `Option` of a number of bytes, which may be written as 2GiB or 500MB."""


NumBytes = Annotated[int, Range(0), Size()]


@dataclass(frozen=True)
class OptionField:
    """A declared option.

    Attributes:
        field: Name in Python, and as the parameter of a command.
        kind: Type of the value, without None and metadata; of a repeated option, of one entry.
        option: The declaration.
        default: A value of `kind`, or None; MISSING for a required option.
        notes: Metadata of its type: bounds, and notes of other modules.
        is_repeated: Whether it may occur several times, so that its value is a tuple.
    """

    field: str
    kind: type
    option: Option
    default: object
    notes: tuple[Any, ...]
    is_repeated: bool = False

    @property
    def flag(self) -> str:
        """Name on the command line, with dashes."""
        return f"--{self.option.name or self.field.replace('_', '-')}"

    @property
    def long_flag(self) -> str:
        """Second name on the command line; empty without one."""
        return self.option.long_name and f"--{self.option.long_name}"

    @property
    def no_flag(self) -> str:
        """Name that turns a switch off; empty without one."""
        has_one = self.is_switch and self.option.has_no
        return f"--no-{self.flag[2:]}" if has_one else ""

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """Bounds of its values."""
        return tuple(note for note in self.notes if isinstance(note, Bound))

    @functools.cached_property
    def choices(self) -> Mapping[str, object]:
        """Values by their words, if there are only a few; otherwise empty."""
        if self.option.words is not None:
            return dict(zip(self.option.words, (False, True), strict=True))
        if issubclass(self.kind, Enum):
            return {one.name.lower().replace("_", "-"): one for one in self.kind}
        few = next((bound.values for bound in self.bounds if isinstance(bound, OneOf)), ())
        return {str(value): value for value in few}

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value."""
        return self.kind is bool and self.option.words is None and not self.is_repeated

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, which people write with a unit."""
        return any(isinstance(note, Size) for note in self.notes)

    @property
    def default_word(self) -> str:
        """Text of the default for users; empty without one."""
        if self.option.default or self.default in (None, MISSING, ()):
            return self.option.default
        if self.is_switch:
            return (self.flag if self.default else self.no_flag)[2:]
        return self.word_for(self.default)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in Python and in files, with underscores, the field's name first."""
        flags = (flag[2:].replace("-", "_") for flag in (self.flag, self.long_flag) if flag)
        return tuple(dict.fromkeys((self.field, *flags)))

    def value_of(self, value: object) -> object:
        """Return a program's or a file's value as a value of `kind`; it may be a word for it.

        Raises:
            BadOption: It is neither a value nor a word.
        """
        if self.is_repeated and value is not None:
            one = replace(self, is_repeated=False)
            return tuple(map(one.value_of, self._entries_of(value)))
        if value is None or (
            isinstance(value, self.kind) and not (isinstance(value, bool) and self.kind is not bool)
        ):
            return value
        if self.choices:
            word = self.word_of(value)
            if word not in self.choices:
                words = OneOf(tuple(self.choices))
                raise BadOption(f"{self.flag}: expected {words}, got {value!a:.80}")
            return self.choices[word]
        if self.is_size and isinstance(value, str):
            try:
                return parse_size(value)
            except ValueError as error:
                raise BadOption(f"{self.flag}: {error}") from None
        try:
            return self._converted(value)
        except (TypeError, ValueError):
            kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}
            expected = kind.get(self.kind.__name__, self.kind.__name__)
            raise BadOption(f"{self.flag}: expected {expected}, got {value!a:.80}") from None

    def _entries_of(self, value: object) -> Sequence[object]:
        """Return a repeated option's entries, from a list, one entry, or a mapping as `key=value`.

        Raises:
            BadOption: An entry is neither a text nor of `kind`.
        """
        if isinstance(value, Mapping):
            value = [f"{key}={one}" for key, one in value.items()]
        entries = (value,) if isinstance(value, (str, self.kind)) else value
        if not isinstance(entries, (list, tuple)) or not all(
            isinstance(one, (str, self.kind)) for one in entries
        ):
            raise BadOption(f"{self.flag}: expected texts, got {value!a:.80}")
        return entries

    def word_of(self, value: object) -> str:
        """Return a program's or a file's value as the command line would write it.

        YAML reads no, off and on as truth values.
        """
        if isinstance(value, bool):
            words = ("on", "yes", "true") if value else ("no", "off", "false")
            return next((word for word in words if word in self.choices), words[-1])
        if isinstance(value, (list, tuple)):
            return ",".join(str(one) for one in value)
        return str(value).lower().replace("_", "-") if self.choices else str(value)

    def _converted(self, value: object) -> object:
        """Return the value as `kind`, if the conversion loses nothing."""
        if self.kind is str and isinstance(value, (list, tuple)):
            return self.word_of(value)
        if isinstance(value, (bool, list, tuple, Mapping)) or self.kind is bool:
            raise TypeError
        converted = self.kind(value)  # such as a path, or 1e-4, which YAML reads as a text
        if self.kind is int and float(str(value)) != converted:
            raise ValueError
        return converted

    def arguments(self, value: object) -> list[str]:
        """Return the words of the command line for a value."""
        if self.is_switch:
            return [self.flag if value else self.no_flag]
        if isinstance(value, tuple):
            return [word for one in value for word in (self.flag, self.word_for(one))]
        return [self.flag, self.word_for(value)]

    def word_for(self, value: object) -> str:
        """Return a value as the command line writes it."""
        if self.is_size and isinstance(value, int):
            return size_word(value)
        words = (word for word, choice in self.choices.items() if choice == value)
        return next(words, str(value))


def option_fields(of: type[DataclassInstance]) -> tuple[OptionField, ...]:
    """Return the options of a dataclass in order, with those of nested dataclasses in place."""
    found: list[OptionField] = []
    for part in option_parts(of).values():
        found += [part] if isinstance(part, OptionField) else option_fields(part)
    return tuple(found)


def build(of: type[Options], values: Mapping[str, object]) -> Options:
    """Build a dataclass, with its nested dataclasses, from its options.

    Args:
        of: Dataclass to build.
        values: Values by `Declared.field`; None or no entry leaves the default.

    Raises:
        BadInput: The dataclass refuses a value.
    """
    found: dict[str, Any] = {}
    for name, part in option_parts(of).items():
        if not isinstance(part, OptionField):
            found[name] = build(part, values)
        elif values.get(name) is not None:
            found[name] = values[name]
    return of(**found)


def from_keywords(of: type[Options], keywords: Mapping[str, object]) -> Options:
    """Build a dataclass from the keywords of a call.

    Args:
        of: Dataclass to build.
        keywords: Values of options, see `by_names`, and nested dataclasses by their fields. The
            options of a nested dataclass are no keywords. None leaves the default.

    Raises:
        BadInput: A keyword is unknown, or a value is refused.
    """
    parts = option_parts(of)
    found: dict[str, Any] = {}
    values: dict[str, object] = {}
    for name, value in keywords.items():
        part = parts.get(name)
        if not isinstance(part, type):
            values[name] = value
        elif isinstance(value, part):
            found[name] = value
        elif value is not None:
            raise BadOption(f"{name}: expected {part.__name__}(...), got {value!a:.80}")
    options = (part for part in parts.values() if isinstance(part, OptionField))
    set_values = _by_names(options, values).items()
    return of(**found, **{name: value for name, value in set_values if value is not None})


def by_names(of: type[DataclassInstance], named: Mapping[str, object]) -> dict[str, object]:
    """Return values by `Declared.field`, for `build`, from values by any name of an option.

    Args:
        of: Dataclass with the options.
        named: Values, or words for them, by a field's name or by an option's, with dashes or
            underscores.

    Raises:
        BadOption: A name is no option (the message has the nearest one), an option occurs twice,
            or a word stands for no value.
    """
    return _by_names(option_fields(of), named)


def _by_names(options: Iterable[OptionField], named: Mapping[str, object]) -> dict[str, object]:
    known = {name: one for one in options for name in one.names}
    values: dict[str, object] = {}
    for name, value in named.items():
        one = known.get(name.replace("-", "_"))
        if one is None:
            raise BadOption(f"{name!a:.80}: there is no such option{suggestion(name, known)}")
        if one.field in values:
            raise BadOption(f"{one.flag}: given twice, as {name!a} too")
        values[one.field] = one.value_of(value)
    return values


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` with a similar known name, or an empty text."""
    alike = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), 1)
    return f"; did you mean '{alike[0]}'?" if alike else ""


def arguments(options: DataclassInstance) -> list[str]:
    """Return the command line of `options`, without values that are defaults."""
    words: list[str] = []
    for name, part in option_parts(type(options)).items():
        value = getattr(options, name)
        if not isinstance(part, OptionField):
            words += arguments(value)
        elif value is not None and value != part.default:
            words += part.arguments(value)
    return words


def check(options: DataclassInstance) -> None:
    """Refuse values out of the declared bounds.

    Raises:
        BadOption: A value is out of its bounds; the message has the option's name for users.
    """
    parts = option_parts(type(options))
    refused = first_refusal(options)
    if refused is not None:
        field, words = refused
        raise BadOption(f"{_called(field, parts.get(field))}: {words}")
    for field, part in parts.items():
        if isinstance(part, OptionField) and part.choices:
            _check_choice(part, getattr(options, field))


def _check_choice(one: OptionField, value: object) -> None:
    if one.is_repeated and isinstance(value, tuple):
        for entry in value:
            _check_choice(replace(one, is_repeated=False), entry)
    elif value not in one.choices.values() and (value is not None or one.default is not None):
        raise BadOption(f"{one.flag}: expected {OneOf(tuple(one.choices))}, got {value!a:.80}")


def _called(field: str, part: Part | None) -> str:
    if isinstance(part, OptionField):
        return part.flag
    return field.replace("num_", "number of ").replace("_", " ")


Part = OptionField | type["DataclassInstance"]


@functools.cache
def option_parts(of: type[DataclassInstance]) -> Mapping[str, Part]:
    """Return the fields of a dataclass that are options, or dataclasses with options."""
    parts: dict[str, Part] = {}
    for field in fields(of):
        kind, notes = _kind_and_notes(field_hints(of)[field.name])
        is_repeated = get_origin(kind) is tuple
        if is_repeated:
            kind, entry_notes = _kind_and_notes(get_args(kind)[0])
            notes += entry_notes
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is not None:
            parts[field.name] = OptionField(
                field.name, kind, option, field.default, notes, is_repeated
            )
        elif is_dataclass(kind) and not is_repeated:
            parts[field.name] = kind
    return parts


def _kind_and_notes(hint: object) -> tuple[type, tuple[Any, ...]]:
    """Return `X` of `Annotated[Annotated[X, ...] | None, ...]`, and all of its metadata.

    A tuple's type comes with those of its entries, which may have metadata of their own.
    """
    if get_origin(hint) is Annotated:
        kind, notes = _kind_and_notes(get_args(hint)[0])
        return kind, (*notes, *metadata(hint))
    if get_origin(hint) in (Union, UnionType):
        return _kind_and_notes(next(one for one in get_args(hint) if one is not NoneType))
    return cast(type, hint), ()
