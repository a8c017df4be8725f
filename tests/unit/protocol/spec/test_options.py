"""Declared options: facts of a field, building from values, errors with the option's name."""

from dataclasses import MISSING, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import pytest

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Length, OneOf, Range
from swarm_ft.protocol.spec.options import (
    Option,
    OptionField,
    arguments,
    build,
    check,
    option_fields,
)


class Colour(IntEnum):
    RED = 1
    DEEP_BLUE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Paint:
    colour: Annotated[Colour, Option("Which one.")] = Colour.DEEP_BLUE
    coats: Annotated[int, Range(1, 3), Option("How often.", name="n")] = 2
    is_matt: Annotated[bool, Option("How it shines.", name="finish", words=("gloss", "matt"))] = (
        True
    )
    bits: Annotated[int, OneOf((8, 4)), Option("Of a shade.")] = 4
    num_doors: Annotated[int, Range(1, 9)] = 1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    what: Annotated[str, Length(5), Option("What to paint.", metavar="NAME")]
    paint: Paint = field(default_factory=Paint)
    hours: Annotated[Annotated[int, Range(1)] | None, Option("At most.", default="all day")] = None
    dry: Annotated[bool, Option("Wait.")] = False
    sand: Annotated[bool, Option("First.", has_no=False)] = False
    out: Annotated[Path, Option("Where it goes.")] = Path("wall")

    def __post_init__(self) -> None:
        check(self)


def option(flag: str) -> OptionField:
    return next(one for one in option_fields(Job) if one.flag == flag)


def test_options_come_in_the_order_of_fields_with_those_of_parts_in_their_place() -> None:
    flags = [one.flag for one in option_fields(Job)]
    assert flags == [
        *("--what", "--colour", "--n", "--finish", "--bits"),
        *("--hours", "--dry", "--sand", "--out"),
    ]


def test_kinds_are_bare_types() -> None:
    kinds = {one.field: one.kind for one in option_fields(Job)}
    assert (kinds["what"], kinds["hours"], kinds["out"]) == (str, int, Path)
    assert kinds["colour"] is Colour


def test_bounds_lie_at_any_depth() -> None:
    assert option("--hours").bounds == (Range(1),)
    assert option("--n").bounds == (Range(1, 3),)
    assert option("--dry").bounds == ()


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--what", ""),
        ("--colour", "deep-blue"),
        ("--n", "2"),
        ("--finish", "matt"),
        ("--bits", "4"),
        ("--hours", "all day"),
        ("--dry", "no-dry"),
        ("--sand", ""),
        ("--out", "wall"),
    ],
)
def test_defaults_are_told_as_users_know_them(flag: str, word: str) -> None:
    assert option(flag).default_word == word


def test_choices_are_values_by_their_words() -> None:
    assert option("--colour").choices == {"red": Colour.RED, "deep-blue": Colour.DEEP_BLUE}
    assert option("--finish").choices == {"gloss": False, "matt": True}
    assert option("--bits").choices == {"8": 8, "4": 4}
    assert not option("--n").choices
    assert not option("--dry").choices


def test_only_a_bool_without_words_is_a_switch() -> None:
    assert [one.flag for one in option_fields(Job) if one.is_switch] == ["--dry", "--sand"]


def test_what_must_be_given_has_no_default() -> None:
    assert [one.flag for one in option_fields(Job) if one.default is MISSING] == ["--what"]


def test_values_go_to_the_parts_that_declare_them() -> None:
    values = {"what": "door", "coats": 3, "dry": True, "hours": None, "of others": 1}
    assert build(Job, values) == Job(what="door", paint=Paint(coats=3), dry=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"what": "window"}, "--what: expected at most 5 bytes of UTF-8, got 6"),
        ({"hours": 0}, "--hours: expected 1 or more, got 0"),
        ({"coats": 4}, "--n: expected 1 to 3, got 4"),
        ({"bits": 5}, "--bits: expected 8 or 4, got 5"),
        ({"colour": "green"}, "--colour: expected red or deep-blue, got 'green'"),
        ({"is_matt": "no"}, "--finish: expected gloss or matt, got 'no'"),
    ],
)
def test_what_is_out_of_bounds_is_named_as_users_know_it(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(BadOption) as raised:
        build(Job, {"what": "door", **values})
    assert raised.value.message == message


def test_what_is_no_option_is_named_in_words() -> None:
    with pytest.raises(BadOption, match="number of doors: expected 1 to 9, got 0"):
        Paint(num_doors=0)


def test_only_what_is_not_as_by_default_is_asked_for() -> None:
    paint = Paint(colour=Colour.RED, coats=3, is_matt=False, bits=8)
    job = Job(what="door", paint=paint, hours=2, dry=True, sand=True, out=Path("a b"))
    assert arguments(Job(what="door")) == ["--what", "door"]
    assert arguments(job) == [
        *("--what", "door", "--colour", "red", "--n", "3", "--finish", "gloss", "--bits", "8"),
        *("--hours", "2", "--dry", "--sand", "--out", "a b"),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Roof:
    colour: Annotated[Colour | None, Option("Which one.", default="as the walls")] = None

    def __post_init__(self) -> None:
        check(self)


def test_a_choice_may_be_left_open_only_if_that_is_its_default() -> None:
    assert build(Roof, {"colour": None}) == build(Roof, {}) == Roof(colour=None)
    assert Roof(colour=Colour.RED).colour is Colour.RED
    with pytest.raises(BadOption, match="--colour: expected red or deep-blue, got None"):
        Paint(colour=None)  # type: ignore[arg-type]
