"""Write the tables of options in docs/reference: `python -m deploy.option_reference`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.pages import with_part
from swarm_ft.api.coordinator_options import CoordinatorOptions
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import OptionField, option_fields, option_parts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PAGE = Path("docs/reference/options.md")
MEMBERS_PAGE = Path("docs/reference/member-options.md")
BEGIN = "<!-- from the declarations, by `make reference`: begin -->\n"
MEMBERS = {
    "<!-- options of a peer, by `make reference`: begin -->\n": ServeOptions,
    "<!-- options of a coordinator, by `make reference`: begin -->\n": CoordinatorOptions,
}
"""Declarations of the tables in `MEMBERS_PAGE`, by the lines in front of them."""


def with_table(page: str) -> str:
    """Return the page with an up-to-date table.

    Raises:
        ValueError: The page lacks the lines around the table.
    """
    rows = map(_row, option_fields(JobOptions))
    return with_part(page, BEGIN, _table(("option", "values", "default", "what"), rows))


def with_member_tables(page: str) -> str:
    """Return the page of `MEMBERS_PAGE` with up-to-date tables.

    Raises:
        ValueError: The page lacks the lines around a table.
    """
    head = ("option", "in Python", "values", "default", "what")
    for begin, of in MEMBERS.items():
        page = with_part(page, begin, _table(head, _member_rows(of)))
    return page


def _member_rows(of: type[DataclassInstance], prefix: str = "") -> Iterator[tuple[str, ...]]:
    for name, part in option_parts(of).items():
        if isinstance(part, OptionField):
            flags, *others = _row(part)
            yield (flags, f"`{prefix}{name}`", *others)
        else:
            yield from _member_rows(part, f"{name}.")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(one: OptionField) -> tuple[str, str, str, str]:
    flags = ", ".join(f"`{flag}`" for flag in (one.flag, one.no_flag, one.long_flag) if flag)
    return flags, _values(one), _default(one), one.option.help


def _default(one: OptionField) -> str:
    if one.default is MISSING:
        return "required"
    word = one.default_word
    return word if one.option.default or not word else f"`{word}`"


def _values(one: OptionField) -> str:
    if one.choices:
        return ", ".join(f"`{word}`" for word in one.choices)
    ranges = [str(bound) for bound in one.bounds if isinstance(bound, Range) and not one.is_size]
    named = (one.option.metavar or "SIZE" * one.is_size).replace("|", r"\|")
    return ", ".join([f"`{named}`"] * bool(named) + ranges)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    written = with_member_tables(MEMBERS_PAGE.read_text(encoding="utf-8"))
    MEMBERS_PAGE.write_text(written, encoding="utf-8")
