"""The command `swarm-ft backup`, which copies a coordinator's files while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarm_ft.api.swarm_keys import keys_folder
from swarm_ft.cli.keys import journal_option
from swarm_ft.cli.options import examples, json_flag, log_option
from swarm_ft.protocol.spec.sizes import format_size


@click.command(
    short_help="Copy a coordinator's files while it runs.",
    epilog=examples(
        "swarm-ft backup /backups/swarm-2026-11-28",
        "swarm-ft coordinator --journal /backups/swarm-2026-11-28/swarm-ft-coordinator.db",
    ),
)
@click.argument("folder", type=click.Path(path_type=Path))
@journal_option
@json_flag
@log_option
def backup(folder: Path, journal: str, as_json: bool) -> None:
    """Copy a coordinator's journal, tokens, keys and members to a new FOLDER.

    A coordinator can start from the copy without changes. FOLDER holds the swarm's private keys,
    so keep it where nobody else can read it.
    """
    from swarm_ft.coordinator.journal.backup import back_up

    made = back_up(Path(journal), keys_folder(journal), folder)
    if as_json:
        fields = {
            "journal": str(made.journal),
            "version": made.version,
            "runs": made.num_runs,
            "members": made.num_members,
            "bytes": made.total_bytes,
        }
        click.echo(json.dumps(fields))
        return
    members = made.num_members
    keys = "" if members is None else f", keys and {_count(members, 'member')}"
    runs, size = _count(made.num_runs, "run"), format_size(made.total_bytes)
    click.echo(f"copied {runs}{keys}, {size}, to {folder}")
    click.echo(f"to start from the copy: swarm-ft coordinator --journal {made.journal}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
