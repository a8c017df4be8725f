"""`python -m tests.hostile`: attack a swarm in every known way, and print the results."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import click

from tests.hostile import outside, suite
from tests.hostile.cells import Outcome, as_dict, as_line, chosen, verdict
from tests.hostile.mutations import run_mutations

Outcomes = AsyncGenerator[Outcome, None]


def names() -> tuple[str, ...]:
    """All cells, in their order."""
    return (*suite.names(), *outside.ATTACKS)


@click.command()
@click.option(
    "--cells",
    default="",
    metavar="CELL,...",
    help="Only these; * stands for anything, as in 'Cancel:*' or '15-*'.",
)
@click.option("--list", "is_list", is_flag=True, help="Name the cells and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a cell.")
@click.option("--mutate", is_flag=True, help="Take rules away, and see that some cell notices.")
@click.option("--minutes", type=float, help="Attack for so long, in drawn order.")
def hostile(
    cells: str, *, is_list: bool, as_json: bool, mutate: bool, minutes: float | None
) -> None:
    """Attack swarms, and see that what must hold does; their runs end as a quiet one does."""
    wanted = chosen(names(), filter(None, cells.split(",")))
    if is_list:
        click.echo("\n".join(wanted))
        return
    logging.disable(logging.CRITICAL)  # the victim logs much
    work_dir = Path(tempfile.mkdtemp(prefix="swarm-ft-hostile-"))
    try:
        if mutate:
            outcomes = run_mutations(work_dir)  # a cell is a change, and holds if it is noticed
        elif minutes is not None:
            within = [cell for cell in wanted if cell in suite.names()]
            outcomes = suite.attack_for(minutes, within, work_dir)
        else:
            outcomes = _all(wanted, work_dir)
        found = asyncio.run(_shown(outcomes, as_json=as_json))
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    click.echo(verdict(found), err=as_json)
    sys.stdout.flush()
    sys.exit(1 if any(outcome.problem for outcome in found) else 0)


async def _all(cells: tuple[str, ...], work_dir: Path) -> Outcomes:
    within = [cell for cell in cells if cell in suite.names()]
    of_processes = [cell for cell in cells if cell in outside.ATTACKS]
    if within:
        async for outcome in suite.run_cells(within, work_dir / "within"):
            yield outcome
    if of_processes:
        async for outcome in outside.run_cells(of_processes, work_dir / "outside"):
            yield outcome


async def _shown(outcomes: Outcomes, *, as_json: bool) -> list[Outcome]:
    found = []
    async for outcome in outcomes:
        found.append(outcome)
        click.echo(json.dumps(as_dict(outcome)) if as_json else as_line(outcome))
    return found


if __name__ == "__main__":
    os.umask(0)  # nothing but the code itself keeps others out of its files
    hostile()
