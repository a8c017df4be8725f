"""Options of commands: those that dataclasses declare, and those that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, TypeVar

import click

from swarm_ft.base import log
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import OptionField, build, option_fields
from swarm_ft.protocol.spec.sizes import parse_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])


def stack(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine option decorators into one; the help shows the options in this order."""

    def apply(command: Command) -> Command:
        return functools.reduce(lambda done, one: one(done), reversed(decorators), command)

    return apply


def examples(*lines: str) -> str:
    """Return a command's epilog with these lines, which click would otherwise rewrap."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


# ---- declared options (`protocol.spec.options`) as those of a click command


def takes(
    parameter: str, of: type[DataclassInstance], instead: Mapping[str, str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a dataclass to a command, which gets the dataclass as `parameter`.

    The dataclass itself refuses values out of bounds, with `BadInput`.

    Args:
        parameter: Name of the command's parameter.
        of: Dataclass that declares the options.
        instead: Defaults as this command's help shows them, by field.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(**values: Any) -> Any:
            own = {one.field: values.pop(one.field) for one in option_fields(of)}
            return command(**{parameter: build(of, own)}, **values)

        return declared_options(of, instead)(with_options)

    return decorate


def shows_first(field: str) -> Callable[[Command], Command]:
    """Move a declared option to the front of the help, before those that stand above it."""

    def decorate(command: Command) -> Command:
        params: list[click.Parameter] = vars(command)["__click_params__"]  # The last one first.
        params.sort(key=lambda one: one.name == field)
        return command

    return decorate


def declared_options(
    of: type[DataclassInstance],
    instead: Mapping[str, str] | None = None,
    without: Container[str] = (),
) -> Callable[[Command], Command]:
    """Add the options of a dataclass to a command, which gets their values by field.

    Args:
        of: Dataclass that declares the options.
        instead: Defaults as this command's help shows them, by field. A required option with
            such a default is optional here.
        without: Fields that get no option.
    """
    others = instead or {}
    options = [one for one in option_fields(of) if one.field not in without]
    return stack(*(_option(one, others.get(one.field)) for one in options))


def _option(one: OptionField, instead: str | None) -> Callable[[Command], Command]:
    shape: dict[str, Any] = {"type": ByteSize() if one.is_size else one.kind}
    if one.choices:
        shape = {"type": click.Choice(list(one.choices)), "callback": _value_of(one)}
    elif one.is_switch:
        shape = {"is_flag": True}
    if one.is_repeated:
        shape["multiple"] = True
    is_open = one.default is MISSING or one.option.default or one.is_repeated
    if not is_open:
        shape["default"] = one.default_word if one.choices else one.default
    return click.option(
        one.field,
        "/".join(filter(None, (one.flag, one.no_flag))),
        *([one.long_flag] if one.long_flag else []),
        required=one.default is MISSING and not instead,
        metavar=one.option.metavar or None,
        help=f"{one.option.help}{_default_and_bounds(one, instead)}",
        **shape,
    )


def _value_of(one: OptionField) -> Callable[..., object]:
    return lambda _context, _option, words: one.value_of(words)


MAX_SHOWN = 100
"""Largest maximum that help shows; larger ones are technical limits, which nobody reaches."""


def _default_and_bounds(one: OptionField, instead: str | None) -> str:
    """Return the end of an option's help, such as `  [default: 8; x>=1]`."""
    default = instead or one.default_word
    notes = [f"default: {default}"] if default else []
    if not one.is_size:
        notes += [_range_text(bound) for bound in one.bounds if isinstance(bound, Range)]
    return f"  [{'; '.join(notes)}]" if notes else ""


def _range_text(bound: Range) -> str:
    """Return a range as click writes it: `x>=1`, `x>0` or `1<=x<=4`."""
    sign = "<" if bound.is_open else "<="
    if bound.maximum <= MAX_SHOWN:
        return f"{bound.minimum:g}{sign}x<={bound.maximum:g}"
    return f"x{sign.replace('<', '>')}{bound.minimum:g}"


# ---- options that several commands share


class ByteSize(click.ParamType):  # type: ignore[type-arg] # not generic in click 8.1
    """The type of an option that is a size, such as `2GiB`, `500MB`, `4096B` or 0."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


log_option = click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    expose_value=False,
    callback=lambda _context, _option, value: log.configure(value.upper()),
    help="Lowest level of the log on standard error.",
)
log_format_option = click.option(
    "--log-format",
    default="text",
    show_default=True,
    type=click.Choice(log.FORMATS),
    expose_value=False,
    callback=lambda _context, _option, value: log.use_format(value),
    help="Format of the log: dated lines of text, or one JSON object per line. --json has the same "
    "effect on standard output.",
)
run_option = click.option(
    "--run", "run_name", metavar="ID", help="Id of the run.  [default: your only run]"
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def _checked_endpoint(_context: object, _option: object, text: str | None) -> str | None:
    from swarm_ft.errors import BadOption
    from swarm_ft.protocol.spec.bounds import is_endpoint

    if text is not None and not is_endpoint(text):
        raise BadOption(f"--coordinator {ascii(text)[:80]}: expected HOST:PORT")
    return text


coordinator_option = click.option(
    "--coordinator",
    metavar="HOST:PORT",
    callback=_checked_endpoint,
    help="Address of the coordinator.  [default: the invitation's, or the DHT's]",
)
