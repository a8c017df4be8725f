"""`python -m tests.fault_matrix`: runs the matrix and prints its table."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import click

from swarm_ft.protocol.spec.run_spec import Adapter
from tests.fault_matrix.cells import Role, chosen_cells
from tests.fault_matrix.homes import AWAY_S, why_no_homes
from tests.fault_matrix.matrix import run_matrix
from tests.fault_matrix.table import as_dict, as_line, as_markdown
from tests.fault_matrix.trial import Outcome


@click.command()
@click.option(
    "--cells",
    default="",
    metavar="ROLE:PHASE:FAULT,...",
    help="Only these; * stands for anything, as in 'middle:mid-*:kill'.",
)
@click.option("--list", "is_list", is_flag=True, help="Name the cells and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a cell.")
@click.option(
    "--away",
    "away_s",
    default=AWAY_S,
    show_default=True,
    metavar="SECONDS",
    help="How long home:coordinator:away lasts.",
)
@click.option(
    "--adapter",
    type=click.Choice([one.name.lower() for one in Adapter]),
    default="none",
    show_default=True,
    help="What trains in place of the model; homes train the model.",
)
@click.option("--logs", metavar="DIR", help="Where processes' logs go.  [default: a new one]")
def fault_matrix(
    cells: str, *, is_list: bool, as_json: bool, away_s: float, adapter: str, logs: str | None
) -> None:
    """Kill, freeze and cut off real processes of a swarm, and compare its losses."""
    chosen = chosen_cells(tuple(filter(None, cells.split(","))))
    if is_list:
        click.echo("\n".join(map(str, chosen)))
        return
    if reason := why_no_homes():
        chosen = tuple(cell for cell in chosen if cell.role is not Role.HOME)
        click.echo(f"home:* is left out: {reason}", err=True)
    directory = Path(logs or tempfile.mkdtemp(prefix="swarm-ft-faults-"))
    click.echo(f"{len(chosen)} cells; logs: {directory}", err=True)
    matrix = run_matrix(chosen, directory, away_s, Adapter[adapter.upper()])
    outcomes = asyncio.run(_print_outcomes(matrix, len(chosen), as_json=as_json))
    if not as_json:
        click.echo(as_markdown(outcomes))
    sys.exit(1 if any(outcome.problem for outcome in outcomes) else 0)


async def _print_outcomes(
    matrix: AsyncIterator[Outcome], num_cells: int, *, as_json: bool
) -> list[Outcome]:
    outcomes = []
    async for outcome in matrix:
        outcomes.append(outcome)
        click.echo(f"{len(outcomes):3}/{num_cells}  {as_line(outcome)}", err=True)
        if as_json:
            click.echo(json.dumps(as_dict(outcome)))
    return outcomes


if __name__ == "__main__":
    fault_matrix()
