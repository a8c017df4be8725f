"""`swarm-ft replay`: the swarm as it was, by what the coordinator recorded, decided again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.options import examples, json_flag, log_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarm_ft.coordinator.recording.files import RecordingFile
    from swarm_ft.coordinator.replay import Moment
    from swarm_ft.ids import RunId
    from swarm_ft.protocol.messages.client import SwarmStatus


def _time(_context: object, _option: object, text: str | None) -> float | None:
    """Unix seconds of what people write.

    Raises:
        BadOption: it is no time.
    """
    from swarm_ft.errors import BadOption

    if text is None:
        return None
    try:
        return float(text) if _is_number(text) else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise BadOption(
            f"--at-time {ascii(text)[:80]}: expected a time such as '2026-11-25 13:05:07' or "
            "seconds since 1970"
        ) from None


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


@click.command(
    epilog=examples(
        "swarm-ft replay swarm.journal",
        "swarm-ft replay swarm.journal --run run-1a2b3c4d --at 120",
        "swarm-ft replay swarm.journal --at-time '2026-11-25 13:05:07' --json",
    )
)
@click.argument("journal", type=click.Path(path_type=Path))
@click.option(
    "--at",
    "step",
    type=click.IntRange(0),
    metavar="STEP",
    help="When so many steps of the run were committed, the last time.  [default: the end]",
)
@click.option(
    "--at-time",
    "unix_s",
    metavar="TIME",
    callback=_time,
    help="At this local time, as 'swarm-ft events' prints it, or at these seconds since 1970.",
)
@click.option("--run", "run_name", metavar="ID", help="The run of --at.  [default: the only one]")
@click.option(
    "--encrypt-at-rest",
    "key_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The key file of the coordinator, if it has one.",
)
@log_option
@json_flag
def replay(
    journal: Path,
    step: int | None,
    unix_s: float | None,
    run_name: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Show the swarm as it was, at any moment that a coordinator recorded beside its JOURNAL.

    The coordinator may run meanwhile, and nothing is changed. Every decision is made again, by the
    same code.
    """
    import json

    from swarm_ft.api.documents import status_fields
    from swarm_ft.cli.watching import status_lines
    from swarm_ft.coordinator.recording.files import files_of
    from swarm_ft.errors import BadOption
    from swarm_ft.ids import RunId

    if step is not None and unix_s is not None:
        raise BadOption("--at, --at-time: give one of the two")
    files = files_of(journal, _key(key_file))
    run_id = RunId(run_name) if run_name else None
    moment = _chosen(files, step, unix_s, run_id)
    click.echo(_headline(moment), err=True)
    found = _whole_status(moment)
    click.echo(json.dumps(status_fields(found)) if as_json else "\n".join(status_lines(found)))


def _key(path: Path | None) -> bytes | None:
    from swarm_ft.errors import BadOption
    from swarm_ft.sealing import sealing_key_at

    if path is None:
        return None
    if not path.is_file():
        raise BadOption(f"--encrypt-at-rest {path}: there is no such file")
    return sealing_key_at(path)


def _chosen(
    files: Sequence[RecordingFile], step: int | None, unix_s: float | None, run_id: RunId | None
) -> Moment:
    from swarm_ft.coordinator.replay import at_end, at_step, at_time

    if step is not None:
        return at_step(_moments(files), step, run_id)
    if unix_s is not None:
        return at_time(_moments(_from(files, unix_s)), unix_s)
    return at_end(_moments(files[-1:]))


def _moments(files: Sequence[RecordingFile]) -> Iterator[Moment]:
    from swarm_ft.coordinator.replay import moments

    return moments(batch for file in files for batch in file.batches())


def _from(files: Sequence[RecordingFile], unix_s: float) -> Sequence[RecordingFile]:
    """Without those that end before."""
    begins = [file.begins() for file in files]
    earlier = [i for i, batch in enumerate(begins) if batch and batch.unix_s <= unix_s]
    return files[earlier[-1] if earlier else 0 :]


def _headline(moment: Moment) -> str:
    when = datetime.fromtimestamp(moment.unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    runs = (f"{name} at step {run.past.all_steps}" for name, run in moment.state.runs.items())
    return f"as of {when}, " + (", ".join(runs) or "no runs")


def _whole_status(moment: Moment) -> SwarmStatus:
    """All pages of it, as a client puts them together."""
    from dataclasses import replace

    from swarm_ft.protocol.messages.client import StatusRequest

    first = moment.status(StatusRequest())
    members, runs = list(first.members), list(first.runs)
    while len(members) < first.num_members or len(runs) < first.num_runs:
        page = moment.status(StatusRequest(first_member=len(members), first_run=len(runs)))
        members += page.members
        runs += page.runs
    return replace(first, members=tuple(members), runs=tuple(runs))
