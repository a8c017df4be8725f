"""Declared options as those of a click command."""

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.cli.options import declared_options, takes
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import OneOf, Range
from swarm_ft.protocol.spec.options import Option, arguments, check


class Pace(IntEnum):
    SLOW = 1
    FAST = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shoes:
    size: Annotated[int, Range(20, 50), Option("In Europe.")] = 40
    laced: Annotated[bool, Option("How they hold.", name="hold", words=("velcro", "laces"))] = True

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    goal: Annotated[str, Option("Where to.", metavar="PLACE")]
    shoes: Shoes = field(default_factory=Shoes)
    pace: Annotated[Pace, Option("How fast.")] = Pace.SLOW
    km: Annotated[float, Range(0.0), Option("How far.", default="till sunset")] = 12.5
    dogs: Annotated[int, OneOf((0, 1, 2)), Option("Who comes.")] = 0
    sing: Annotated[bool, Option("On the way.")] = True
    alone: Annotated[bool, Option("Meet nobody.", has_no=False)] = False
    log: Annotated[Path | None, Option("Write it down.", metavar="FILE")] = None


def walked(*arguments: str) -> tuple[str, Walk]:
    taken: list[tuple[str, Walk]] = []

    @click.command()
    @click.argument("who")
    @takes("walk", Walk)
    def command(name: str, walk: Walk) -> None:
        taken.append((name, walk))

    command.main(list(arguments), standalone_mode=False)
    return taken[0]


def test_what_is_left_out_has_the_declared_default() -> None:
    assert walked("anna", "--goal", "sea") == ("anna", Walk(goal="sea"))


def test_what_is_given_is_parsed_to_its_kind() -> None:
    words = "--goal sea --size 38 --hold velcro --pace fast --km 3 --dogs 2 --no-sing --alone"
    _, walk = walked("anna", *words.split(), "--log", "walk.txt")
    assert walk == Walk(
        goal="sea",
        shoes=Shoes(size=38, laced=False),
        pace=Pace.FAST,
        km=3.0,
        dogs=2,
        sing=False,
        alone=True,
        log=Path("walk.txt"),
    )
    assert type(walk.pace) is Pace
    assert type(walk.dogs) is int


def test_what_is_out_of_bounds_is_refused_by_what_declares_it() -> None:
    with pytest.raises(BadOption, match="--size: expected 20 to 50, got 51"):
        walked("anna", "--goal", "sea", "--size", "51")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--goal"),
        (("--goal", "sea", "--size", "large"), "--size"),
        (("--goal", "sea", "--pace", "idle"), "'slow', 'fast'"),
        (("--goal", "sea", "--dogs", "7"), "'0', '1', '2'"),
    ],
)
def test_what_does_not_parse_is_refused_by_click(arguments: tuple[str, ...], word: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        walked("anna", *arguments)
    assert word in raised.value.format_message()


@given(
    st.builds(
        Walk,
        goal=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        shoes=st.builds(Shoes, size=st.integers(20, 50), laced=st.booleans()),
        pace=st.sampled_from(Pace),
        km=st.floats(0, 1e9),
        dogs=st.sampled_from((0, 1, 2)),
        sing=st.booleans(),
        alone=st.booleans(),
        log=st.none() | st.just(Path("walk.txt")),
    )
)
def test_a_command_line_made_of_options_asks_for_them(walk: Walk) -> None:
    assert walked("anna", *arguments(walk)) == ("anna", walk)


def help_of(command: click.Command) -> str:
    return " ".join(CliRunner().invoke(command, ["--help"]).output.split())


def test_help_says_defaults_choices_and_least_values() -> None:
    @click.command()
    @takes("walk", Walk)
    def command(walk: Walk) -> None: ...

    shown = help_of(command)
    for printed in (
        "--goal PLACE Where to. [required]",
        "--size INTEGER In Europe. [default: 40; 20<=x<=50]",
        "--hold [velcro|laces] How they hold. [default: laces]",
        "--pace [slow|fast] How fast. [default: slow]",
        "--km FLOAT How far. [default: till sunset; x>=0]",
        "--dogs [0|1|2] Who comes. [default: 0]",
        "--sing / --no-sing On the way. [default: sing]",
        "--alone Meet nobody. --log FILE Write it down. --help",
    ):
        assert printed in shown


def test_a_command_may_do_without_what_others_need() -> None:
    taken: dict[str, object] = {}

    @click.command()
    @declared_options(Walk, instead={"goal": "around the house"})
    def command(**values: object) -> None:
        taken.update(values)

    assert "--goal PLACE Where to. [default: around the house]" in help_of(command)
    command.main([], standalone_mode=False)
    assert taken["goal"] is None
    assert (taken["size"], taken["pace"], taken["km"]) == (40, Pace.SLOW, None)
