"""The command `swarm-ft status`, which shows the swarm's runs and peers."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sys
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import SwarmAddress
from swarm_ft.api.documents import status_fields
from swarm_ft.cli.options import examples, json_flag
from swarm_ft.cli.status_text import WATCH_S, connect_to_coordinator, look_options, verbose_lines

if TYPE_CHECKING:
    from swarm_ft.protocol.messages.client import SwarmStatus


@click.command(
    short_help="Show the swarm's runs and peers.",
    epilog=examples(
        "swarm-ft status --invite @invitation.txt",
        "swarm-ft status --invite @invitation.txt --watch",
        "swarm-ft status --insecure --coordinator 127.0.0.1:7000 --json",
    ),
)
@click.option("--watch", "watches", is_flag=True, help="Refresh every second, until Ctrl-C.")
@click.option(
    "--verbose",
    "is_verbose",
    is_flag=True,
    help="Show stages, links, buffers and contributions too, on several lines per run and peer.",
)
@look_options
@json_flag
def status(way: SwarmAddress, watches: bool, is_verbose: bool, as_json: bool) -> None:
    """Show the swarm's runs and peers, one line each."""
    from swarm_ft.cli.running import run_async, run_until_stopped

    if not watches:
        gc.disable()  # A collection would find nothing, and takes a tenth of the time.

    def show(found: SwarmStatus, *, clears: bool = False) -> None:
        if clears:
            click.clear()  # Does nothing without a terminal.
        click.echo(json.dumps(status_fields(found)) if as_json else _text(found, is_verbose))

    async def work() -> None:
        async with connect_to_coordinator(way) as swarm:
            show(await swarm.status())
            while watches:
                await asyncio.sleep(WATCH_S)
                show(await swarm.status(), clears=not as_json)

    (run_until_stopped if watches else run_async)(work)


def _text(found: SwarmStatus, is_verbose: bool) -> str:
    from swarm_ft.cli.overview import overview_lines

    if is_verbose:
        return "\n".join(verbose_lines(found))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return "\n".join(overview_lines(found, width))
