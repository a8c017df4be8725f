"""Declared options (`protocol.options`) as those of a click command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, TypeVar

import click

from swarm_ft.cli.options import stack
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Declared, build, declared

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])


def takes(
    parameter: str, of: type[DataclassInstance]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of a dataclass, and the dataclass to its `parameter`.

    Values out of their bounds are refused by the dataclass, with `BadInput`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(**given: Any) -> Any:
            own = {one.field: given.pop(one.field) for one in declared(of)}
            return command(**{parameter: build(of, own)}, **given)

        return declared_options(of)(with_options)

    return decorate


def declared_options(
    of: type[DataclassInstance], instead: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """The options of a dataclass; the command gets their values by field.

    Args:
        of: what declares them.
        instead: by field, what this command does where a required option is left out.
    """
    others = instead or {}
    return stack(*(_option(one, others.get(one.field)) for one in declared(of)))


def _option(one: Declared, instead: str | None) -> Callable[[Command], Command]:
    parsers = (note for note in one.notes if isinstance(note, click.ParamType))
    shape: dict[str, Any] = {"type": next(parsers, one.kind)}
    if one.choices:
        shape = {"type": click.Choice(list(one.choices)), "callback": _value_of(one.choices)}
    elif one.is_switch:
        shape = {"is_flag": True}
    is_open = one.default is MISSING or one.option.default
    if not is_open:
        shape["default"] = one.default_word if one.choices else one.default
    return click.option(
        one.field,
        "/".join(filter(None, (one.flag, one.no_flag))),
        required=one.default is MISSING and not instead,
        metavar=one.option.metavar or None,
        help=f"{one.option.help}{_told(one, instead)}",
        **shape,
    )


def _value_of(choices: Mapping[str, object]) -> Callable[..., object]:
    return lambda _context, _option, word: None if word is None else choices[word]


def _told(one: Declared, instead: str | None) -> str:
    """What help says behind the sentence, as `  [default: 8; x>=1]`."""
    default = instead or one.default_word
    told = [f"default: {default}"] if default else []
    told += [f"x>={bound.minimum:g}" for bound in one.bounds if isinstance(bound, Range)]
    return f"  [{'; '.join(told)}]" if told else ""
