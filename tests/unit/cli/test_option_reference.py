"""docs/reference/options.md lists the declared options."""

from pathlib import Path

import pytest

from deploy.option_reference import (
    BEGIN,
    MEMBERS,
    MEMBERS_PAGE,
    PAGE,
    with_member_tables,
    with_table,
)
from deploy.pages import END
from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.options import option_fields

ROOT = Path(__file__).parents[3]
PAGE_HERE, MEMBERS_PAGE_HERE = ROOT / PAGE, ROOT / MEMBERS_PAGE


def test_the_page_is_not_stale() -> None:
    page = PAGE_HERE.read_text(encoding="utf-8")
    assert page == with_table(page), "run `make reference`"


def test_the_page_of_members_is_not_stale() -> None:
    page = MEMBERS_PAGE_HERE.read_text(encoding="utf-8")
    assert page == with_member_tables(page), "run `make reference`"


def test_every_option_of_a_member_has_a_row_with_its_keyword() -> None:
    written = with_member_tables("".join(begin + END for begin in MEMBERS))
    for begin, of in MEMBERS.items():
        rows = written.partition(begin)[2].partition(END)[0].splitlines()
        for one in option_fields(of):
            (row,) = (row for row in rows if row.startswith(f"| `{one.flag}`"))
            assert row.endswith(f"| {one.option.help} |")
            assert f"{one.field}`" in row.split(" | ")[1]


def test_every_option_of_a_job_has_a_row() -> None:
    rows = with_table(BEGIN + END).splitlines()
    for one in option_fields(JobOptions):
        (row,) = (row for row in rows if row.startswith(f"| `{one.flag}`"))
        assert row.endswith(f"| {one.option.help} |")
        assert row.replace(r"\|", "").count("|") == 5


def test_what_stands_around_the_table_is_kept() -> None:
    page = f"# Before\n{BEGIN}old\n{END}behind\n"
    written = with_table(page)
    assert written.startswith(f"# Before\n{BEGIN}\n| option |")
    assert written.endswith(f"|\n\n{END}behind\n")
    assert with_table(written) == written


@pytest.mark.parametrize("page", ["", BEGIN, END, END + BEGIN])
def test_a_page_without_a_place_for_the_table_is_told(page: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        with_table(page)
