"""Write the table of docs/reference/options.md: `python -m deploy.option_reference`."""

from __future__ import annotations

import sys
from dataclasses import MISSING
from pathlib import Path

from deploy.pages import with_part
from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import OptionField, option_fields

PAGE = Path("docs/reference/options.md")
BEGIN = "<!-- from the declarations, by `make reference`: begin -->\n"


def with_table(page: str) -> str:
    """Return the page with an up-to-date table.

    Raises:
        ValueError: The page lacks the lines around the table.
    """
    return with_part(page, BEGIN, _table())


def _table() -> str:
    rows = [("option", "values", "default", "what"), ("---",) * 4]
    rows += map(_row, option_fields(JobOptions))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


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
    ranges = [str(bound) for bound in one.bounds if isinstance(bound, Range)]
    named = one.option.metavar.replace("|", r"\|")
    return ", ".join([f"`{named}`"] * bool(named) + ranges)


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
