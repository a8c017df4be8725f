"""The command `swarm-ft replay`, which shows a recorded moment of a swarm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.options import examples, json_flag, log_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarm_ft.api.what_if import Comparison
    from swarm_ft.coordinator.member_names import MemberNames
    from swarm_ft.coordinator.recording.files import RecordingFile
    from swarm_ft.coordinator.replay import Moment
    from swarm_ft.ids import RunId
    from swarm_ft.protocol.messages.client import SwarmStatus


def _time(_context: object, _option: object, text: str | None) -> float | None:
    """Parse a time to Unix seconds.

    Raises:
        BadOption: The text is no time.
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
    short_help="Show the swarm at any recorded moment.",
    epilog=examples(
        "swarm-ft replay swarm-ft-coordinator.db",
        "swarm-ft replay swarm-ft-coordinator.db --run run-1a2b3c4d --at 120",
        "swarm-ft replay swarm-ft-coordinator.db --at-time '2026-11-25 13:05:07' --json",
        "swarm-ft replay swarm-ft-coordinator.db --at 120 --what-if 'peer ada-3090: 20 Mbps'",
    ),
)
@click.argument("journal", type=click.Path(path_type=Path))
@click.option(
    "--at",
    "step",
    type=click.IntRange(0),
    metavar="STEP",
    help="Show the last moment at which the run had STEP steps.  [default: the end]",
)
@click.option(
    "--at-time",
    "unix_s",
    metavar="TIME",
    callback=_time,
    help="Show this moment: a local time as 'swarm-ft events' prints it, or seconds since 1970.",
)
@click.option(
    "--run",
    "run_name",
    metavar="ID",
    help="Id of the run for --at, --what-if and --trace.  [default: the only run]",
)
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="CHANGE",
    help="Simulate the rest of the run with this change and without it, and compare: "
    "'peer NAME: 20 Mbps', '... 20 Mbps up', '... 2x compute', '... gone'. May be repeated.",
)
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for a trace of each peer's steps until that moment, for ui.perfetto.dev.",
)
@click.option(
    "--page",
    "has_page",
    is_flag=True,
    help="Serve the coordinator's web page of that moment on this machine, until Ctrl-C.",
)
@click.option(
    "--encrypt-at-rest",
    "key_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Key file of the coordinator, if it encrypts its files.",
)
@log_option
@json_flag
def replay(
    journal: Path,
    step: int | None,
    unix_s: float | None,
    run_name: str | None,
    what_ifs: tuple[str, ...],
    trace_file: Path | None,
    has_page: bool,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Show the swarm at a moment that a coordinator recorded beside its JOURNAL.

    The command repeats every decision with the coordinator's code, and changes nothing. The
    coordinator may be running.
    """
    import json

    from swarm_ft.api.documents import status_fields
    from swarm_ft.cli.status_text import verbose_lines
    from swarm_ft.coordinator.recording.files import files_of
    from swarm_ft.errors import BadOption
    from swarm_ft.ids import RunId

    if step is not None and unix_s is not None:
        raise BadOption("--at, --at-time: expected one of the two, got both")
    files = files_of(journal, _key(key_file))
    run_id = RunId(run_name) if run_name else None
    moment = _chosen(files, step, unix_s, run_id)
    moment = replace(moment, names=_names(journal, moment))
    click.echo(_headline(moment), err=True)
    if trace_file is not None:
        _trace(_until(files, moment), _only_run(moment, run_id), trace_file)
    if has_page:
        _serve(moment, _until(files, moment), as_json=as_json)
        return
    if what_ifs:
        _show_what_if(moment, run_id, what_ifs, as_json=as_json)
        return
    found = _whole_status(moment)
    click.echo(json.dumps(status_fields(found)) if as_json else "\n".join(verbose_lines(found)))


def _names(journal: Path, moment: Moment) -> MemberNames:
    """Return the names that members have now.

    Members whose name is not in the registry beside the journal have the name of their id.
    """
    from swarm_ft.api.swarm_keys import keys_folder
    from swarm_ft.coordinator.journal.registry import recorded_names
    from swarm_ft.coordinator.member_names import MemberNames

    names = MemberNames()
    names.replace(*recorded_names(keys_folder(str(journal))))
    for peer in moment.state.members:
        names.add(peer)
    return names


def _key(path: Path | None) -> bytes | None:
    from swarm_ft.base.sealing import sealing_key_at
    from swarm_ft.errors import BadOption

    if path is None:
        return None
    if not path.is_file():
        raise BadOption(f"--encrypt-at-rest {path}: no such file")
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
    """Drop the files that end before this time."""
    begins = [file.begins() for file in files]
    earlier = [i for i, batch in enumerate(begins) if batch and batch.unix_s <= unix_s]
    return files[earlier[-1] if earlier else 0 :]


def _headline(moment: Moment) -> str:
    when = datetime.fromtimestamp(moment.unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    runs = (f"{name} at step {run.past.all_steps}" for name, run in moment.state.runs.items())
    return f"as of {when}, " + (", ".join(runs) or "no runs")


def _whole_status(moment: Moment) -> SwarmStatus:
    """Join all pages of the status, as a client does."""
    from swarm_ft.protocol.messages.client import StatusRequest

    first = moment.status(StatusRequest())
    members, runs, names = list(first.members), list(first.runs), dict.fromkeys(first.names)
    while len(members) < first.num_members or len(runs) < first.num_runs:
        page = moment.status(StatusRequest(first_member=len(members), first_run=len(runs)))
        members += page.members
        runs += page.runs
        names |= dict.fromkeys(page.names)
    return replace(first, members=tuple(members), runs=tuple(runs), names=tuple(names))


# ---- the way to that moment


def _until(files: Sequence[RecordingFile], moment: Moment) -> Iterator[Moment]:
    from itertools import takewhile

    return takewhile(lambda one: one.unix_s <= moment.unix_s, _moments(files))


def _only_run(moment: Moment, run_id: RunId | None) -> RunId:
    """Return the chosen run, or the only one.

    Raises:
        BadOption: There is no such run, or there are several and none is chosen.
    """
    from swarm_ft.errors import BadOption

    known = list(moment.state.runs)
    if run_id is None and len(known) == 1:
        return known[0]
    if run_id is None or run_id not in known:
        raise BadOption(f"--run: expected a run of that moment: {', '.join(known) or 'none'}")
    return run_id


def _trace(until: Iterator[Moment], run_id: RunId, path: Path) -> None:
    from swarm_ft.client.trace import open_trace
    from swarm_ft.coordinator.recorded_history import timelines

    with open_trace(path, lambda words: click.echo(f"swarm-ft: {words}", err=True)) as trace:
        for timeline in timelines(until, run_id):
            if trace is not None:
                trace.add(timeline)


def _serve(moment: Moment, until: Iterator[Moment], *, as_json: bool) -> None:
    import asyncio
    import json

    from swarm_ft.api.coordinator_process import DOCUMENTS
    from swarm_ft.base.clock import SystemClock
    from swarm_ft.cli.running import run_until_stopped
    from swarm_ft.coordinator.recorded_history import RecordedHistory, ReplayView
    from swarm_ft.page.server import HttpOptions, serve_http

    retold = RecordedHistory(moment.names)
    for one in until:
        retold.take(one)

    async def work() -> None:
        source = ReplayView(moment, retold)
        async with serve_http(source, SystemClock(), DOCUMENTS, HttpOptions(page_port=0)) as found:
            line = json.dumps({"page": found.address}) if as_json else f"web page: {found.address}"
            click.echo(line)
            await asyncio.Event().wait()

    run_until_stopped(work)


# ---- what if


def _show_what_if(
    moment: Moment, run_id: RunId | None, what_ifs: Sequence[str], *, as_json: bool
) -> None:
    import json

    from swarm_ft.api.what_if import compare, parse_change

    changes = [parse_change(words, moment.state, moment.names) for words in what_ifs]
    found = compare(moment, _going(moment, run_id), changes)
    click.echo(json.dumps(asdict(found)) if as_json else "\n".join(_what_if_lines(found)))


def _going(moment: Moment, run_id: RunId | None) -> RunId:
    """Return the chosen run, or the only active one.

    Raises:
        BadOption: There is no such run, or there are several and none is chosen.
    """
    from swarm_ft.errors import BadOption

    going = [run.run_id for run in moment.state.going_runs]
    if run_id is None and len(going) == 1:
        return going[0]
    if run_id not in going or run_id is None:
        known = ", ".join(going) or "none"
        raise BadOption(f"--run: expected a run that was active then, for --what-if: {known}")
    return run_id


def _what_if_lines(found: Comparison) -> Iterator[str]:
    from swarm_ft.client.formatting import clock_time

    both = (found.baseline, found.changed)
    changes = ", ".join(found.changes)
    yield f"{found.run_id}, step {found.step}/{found.num_steps}, what if {changes}"
    yield f"{'':<18}{'without':<14}{'with it':<14}"
    seconds = [f"{o.step_s:.3g}" if o.step_s is not None else "no step" for o in both]
    yield f"{'seconds per step':<18}{seconds[0]:<14}{seconds[1]:<14}".rstrip()
    times = [clock_time(outlook.eta_s) for outlook in both]
    yield f"{'ETA':<18}{times[0]:<14}{times[1]:<14}".rstrip()
    decisions = [{words for _, words in outlook.plans} for outlook in both]
    common = decisions[0] & decisions[1]
    for name, outlook in zip(("without", "with it"), both, strict=True):
        if outlook.bound_by:
            yield f"{name}, limited by {outlook.bound_by}"
        for after_s, words in outlook.plans:
            if words in common:
                continue
            yield f"{name}, after {after_s:.0f} s: {words}"
        if found.baseline.pipeline != found.changed.pipeline:
            yield f"{name}: {outlook.pipeline}"
    for words in found.unknown:
        yield f"unknown: {words}; the simulation ignores it"
