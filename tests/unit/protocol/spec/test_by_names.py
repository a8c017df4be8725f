"""Options that programs and files give by their names."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import OneOf
from swarm_ft.protocol.spec.options import (
    NumBytes,
    Option,
    build,
    by_names,
    check,
    from_keywords,
)


class Shade(Enum):
    NO = "none"
    DARK_BLUE = "dark blue"


@dataclass(frozen=True, kw_only=True)
class Paint:
    learning_rate: Annotated[float, Option("How fast.", name="lr")] = 1.0
    coats: Annotated[int, Option("How often.")] = 1
    shade: Annotated[Shade, Option("Which.", long_name="hue")] = Shade.NO
    bits: Annotated[int, OneOf((4, 8)), Option("How fine.")] = 8
    is_tied: Annotated[bool, Option("Whether.", name="tied", words=("untie", "sync"))] = False
    is_wet: Annotated[bool, Option("Whether it is.")] = False
    names: Annotated[str, Option("Of whom.")] = ""
    where: Annotated[Path | None, Option("Where to.")] = None

    def __post_init__(self) -> None:
        check(self)


TAKEN: dict[str, tuple[dict[str, object], Paint]] = {
    "values": (
        {"learning_rate": 2.5, "shade": Shade.DARK_BLUE},
        Paint(learning_rate=2.5, shade=Shade.DARK_BLUE),
    ),
    "another name": (
        {"lr": 3, "hue": "dark-blue"},
        Paint(learning_rate=3.0, shade=Shade.DARK_BLUE),
    ),
    "words": (
        {"shade": "Dark_Blue", "bits": 4, "tied": "sync"},
        Paint(shade=Shade.DARK_BLUE, bits=4, is_tied=True),
    ),
    "dashes": ({"is-wet": True}, Paint(is_wet=True)),
    "what YAML makes of words": ({"shade": False, "lr": "1e-4"}, Paint(learning_rate=1e-4)),
    "lists": ({"names": ["ann", "bob"]}, Paint(names="ann,bob")),
    "paths": ({"where": "a/b"}, Paint(where=Path("a/b"))),
    "nothing": ({"where": None, "coats": 2.0}, Paint(coats=2)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_means_a_value_is_one(name: str) -> None:
    arguments, expected = TAKEN[name]
    assert build(Paint, by_names(Paint, arguments)) == expected


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "unknown": ({"coat": 1}, "'coat': there is no such option; did you mean 'coats'?"),
    "far off": ({"zebra": 1}, "'zebra': there is no such option"),
    "twice": ({"lr": 1.0, "learning_rate": 1.0}, "--lr: given twice"),
    "half": ({"coats": 1.5}, "--coats: expected a whole number, got 1.5"),
    "truth": ({"coats": True}, "--coats: expected a whole number, got True"),
    "no truth": ({"is_wet": "maybe"}, "--is-wet: expected true or false, got 'maybe'"),
    "no word": ({"shade": "red"}, "--shade: expected no or dark-blue, got 'red'"),
    "no number": ({"bits": 5}, "--bits: expected 4 or 8, got 5"),
    "no text": ({"learning_rate": {}}, "--lr: expected a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_none_is_told(name: str) -> None:
    arguments, words = REFUSED[name]
    with pytest.raises(BadOption) as refused:
        build(Paint, by_names(Paint, arguments))
    assert refused.value.message.startswith(words)


class Room(Enum):
    HALL = "hall"
    LIVING_ROOM = "living room"


@dataclass(frozen=True, kw_only=True)
class House:
    paint: Paint = field(default_factory=Paint)
    rooms: Annotated[tuple[Room, ...], Option("Which.")] = ()
    keys: Annotated[tuple[Path, ...], Option("Where they lie.", name="key")] = ()
    garden_bytes: Annotated[NumBytes | None, Option("How large.", name="garden")] = None

    def __post_init__(self) -> None:
        check(self)


KEYWORDS: dict[str, tuple[dict[str, object], House]] = {
    "nothing": ({"garden_bytes": None, "paint": None}, House()),
    "a part": ({"paint": Paint(coats=2)}, House(paint=Paint(coats=2))),
    "words of a list": (
        {"rooms": ["living-room", Room.HALL]},
        House(rooms=(Room.LIVING_ROOM, Room.HALL)),
    ),
    "one word": ({"rooms": "hall"}, House(rooms=(Room.HALL,))),
    "a path and a text": ({"key": [Path("a"), "b"]}, House(keys=(Path("a"), Path("b")))),
    "one path": ({"keys": Path("a")}, House(keys=(Path("a"),))),
    "a size": ({"garden": "2KiB"}, House(garden_bytes=2048)),
    "a number of bytes": ({"garden_bytes": 5}, House(garden_bytes=5)),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_are_options_and_parts(name: str) -> None:
    keywords, expected = KEYWORDS[name]
    assert from_keywords(House, keywords) == expected


REFUSED_KEYWORDS: dict[str, tuple[dict[str, object], str]] = {
    "an option of a part": ({"coats": 2}, "'coats': there is no such option"),
    "another part": ({"paint": "red"}, "paint: expected Paint(...), got 'red'"),
    "no word": ({"rooms": ["attic"]}, "--rooms: expected hall or living-room, got 'attic'"),
    "no list": ({"rooms": 3}, "--rooms: expected texts, got 3"),
    "no size": ({"garden": "5"}, "--garden: expected a size"),
    "less than none": ({"garden_bytes": -1}, "--garden: expected 0 or more, got -1"),
}


@pytest.mark.parametrize("name", REFUSED_KEYWORDS)
def test_keywords_that_mean_nothing_are_refused(name: str) -> None:
    keywords, words = REFUSED_KEYWORDS[name]
    with pytest.raises(BadOption) as refused:
        from_keywords(House, keywords)
    assert refused.value.message.startswith(words)


def test_a_choice_in_a_list_is_checked_where_a_program_builds_the_options() -> None:
    with pytest.raises(BadOption, match="--rooms: expected hall or living-room, got 'attic'"):
        House(rooms=("attic",))  # type: ignore[arg-type]
