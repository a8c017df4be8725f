"""`swarm-ft client` and `swarm-ft status`: submit a job, come back to it, end it; who is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.joining import WayIn, connected
from swarm_ft.cli.generate import generate
from swarm_ft.cli.job_file import takes_job
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.keys import grant_fields
from swarm_ft.cli.options import examples, json_flag, log_option, run_option, stack, takes
from swarm_ft.cli.running import on_stop_signal, reading_bar, run_async
from swarm_ft.client.options import JobOptions, Outputs

if TYPE_CHECKING:
    from swarm_ft.client.report import RunReport
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.client.train import WatchedRun
    from swarm_ft.protocol.messages.client import BoundaryStatus, SwarmStatus

swarm_options = stack(way_in(), log_option)


class _InOrder(click.Group):
    """Lists its commands as they were defined: in the order in which they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder)
def client() -> None:
    """Submit a job to a swarm, watch it, try and fetch its result."""


@client.command(
    epilog=examples(
        "swarm-ft client train --model gpt2 --dataset notes.txt --invite swarm1...",
        "swarm-ft client train --model ./qwen2 --dataset chats.jsonl --invite swarm1...",
        "swarm-ft client train --model ./llama --dataset texts/ --eval-dataset held-out.txt \\",
        "    --epochs 3 --fw aq3 --bw q6 --out ./tuned --invite @invitation.txt",
        "swarm-ft client train job.yaml --lr 1e-4 --print-config > other.yaml",
    )
)
@takes_job("options")
@click.option(
    "--detach",
    "detaches",
    is_flag=True,
    help="Leave when the job is submitted; `client attach` fetches what comes of it.",
)
@swarm_options
def train(options: JobOptions, detaches: bool, way: WayIn) -> None:
    """Fine-tune a model; Ctrl-C detaches, and the run goes on.

    JOB.yaml holds options by their names, or by axolotl's (base_model, datasets, sequence_len,
    ...); options given here override it.
    """

    async def begin(swarm: SwarmClient) -> WatchedRun:
        with reading_bar() as listener:  # its words come before what is imported now
            from swarm_ft.api.training import begun, read

            job = await read(options, listener)
        told = who_sees(is_encrypted=way.invite is not None)
        return await begun(swarm, job, options, told=told)

    run_async(lambda: _see_through(begin, options.outputs, way, detaches=detaches))


def who_sees(*, is_encrypted: bool) -> tuple[str, ...]:
    """What becomes of a job's data, in words."""
    others = "nobody else, for links are encrypted" if is_encrypted else "whoever sees the network"
    return (
        "who sees your text: the coordinator, which keeps it until the run is over, and whoever "
        "hosts the first or the last stage",
        "peers see activations, which tell the text too to who has the model, and their layers' "
        f"weights; {others}",
    )


@client.command(
    epilog=examples(
        "swarm-ft client attach --run run-1a2b3c4d --invite swarm1...",
    )
)
@run_option
@click.option("--model", metavar="DIR|HUB_ID", help="The model, if not where the run says.")
@takes("outputs", Outputs)
@swarm_options
def attach(
    run_name: str | None,
    model: str | None,
    outputs: Outputs,
    way: WayIn,
) -> None:
    """Come back to a run: watch it to its end and fetch the result."""

    async def begin(swarm: SwarmClient) -> WatchedRun:
        from swarm_ft.client.train import attach_to

        return await attach_to(swarm, run_name, model)

    run_async(lambda: _see_through(begin, outputs, way))


client.add_command(generate)


@client.command(epilog=examples("swarm-ft client cancel --run run-1a2b3c4d --invite swarm1..."))
@run_option
@swarm_options
def cancel(run_name: str | None, way: WayIn) -> None:
    """End a run; what it trained is lost."""

    async def work() -> None:
        from swarm_ft.ids import RunId

        async with connected(way) as swarm:
            status = await swarm.cancel(RunId(run_name) if run_name else None)
        click.echo(f"{status.run_id}: {status.phase.name.lower()}, {status.detail}")

    run_async(work)


@click.command(
    epilog=examples(
        "swarm-ft status --invite swarm1...",
        "swarm-ft status --insecure --initial-peers /ip4/127.0.0.1/tcp/31337/p2p/...",
    )
)
@swarm_options
@json_flag
def status(way: WayIn, as_json: bool) -> None:
    """Show the swarm's peers and runs."""

    async def work() -> None:
        async with connected(way) as swarm:
            found = await swarm.status()
        if as_json:
            click.echo(json.dumps(status_fields(found)))
        else:
            for line in status_lines(found):
                click.echo(line)

    run_async(work)


def status_fields(found: SwarmStatus) -> dict[str, Any]:
    """What `--json` prints."""
    from swarm_ft.client.report import kind_fields

    peers = [
        {
            "peer": m.peer_id,
            "layers": str(m.layers or "auto"),
            "idle": m.idle,
            **grant_fields(m.grant),
        }
        for m in found.members
    ]
    runs = [
        {
            "run": run.run_id,
            "phase": run.phase.name.lower(),
            "detail": run.detail,
            "own": run.is_own,
            "steps": run.committed_steps,
            "num_steps": run.num_steps,
            "bytes": kind_fields(run.sent),
            "relayed_bytes": run.sent.relayed_bytes,
            "stages": [
                {"peer": s.peer_id, "layers": str(s.layers), "joining": s.peer_id in run.joining}
                for s in run.assignments
            ],
            "boundaries": [_boundary_fields(boundary) for boundary in run.boundaries],
        }
        for run in found.runs
    ]
    relays = [
        {"relay": r.name, "endpoint": r.endpoint, "links": r.links, "bytes": r.relayed_bytes}
        for r in found.relays
    ]
    return {"peers": peers, "runs": runs, "relays": relays}


def status_lines(found: SwarmStatus) -> Iterator[str]:
    """What people read."""
    from rich.filesize import decimal

    from swarm_ft.client.report import kind_lines
    from swarm_ft.protocol.messages.control import stages_of

    for member in found.members:
        granted = f"  ({member.grant})" if str(member.grant) else ""
        idle = f"  idle: {member.idle}" if member.idle else ""
        yield f"peer {member.peer_id}  layers {member.layers or 'auto'}{granted}{idle}"
    if not found.members:
        yield "no peer is there; start some with 'swarm-ft serve-stage'"
    for relay in found.relays:
        moved = decimal(relay.relayed_bytes)
        named = f"relay {relay.name or 'of the coordinator'} at {relay.endpoint}"
        yield f"{named}  {relay.links} links, {moved} so far"
    for run in found.runs:
        counted = f"step {run.committed_steps}/{run.num_steps}"
        about = run.detail if run.is_own else "(another client's)"
        yield f"run {run.run_id}  {run.phase.name.lower()}  {counted}  {about}".rstrip()
        for stage in stages_of(run.assignments):
            names = (f"{p} (joining)" if p in run.joining else p for p in stage.peers)
            yield f"  layers {stage.layers}  {', '.join(names)}"
        yield from (f"  {line}" for line in kind_lines(run.sent))
        yield from (f"  {line}" for boundary in run.boundaries for line in _about(boundary))


def _boundary_fields(status: BoundaryStatus) -> dict[str, object]:
    return {
        **asdict(status.kept),
        "samples": status.buffered_samples,
        "records": status.kept.samples,
        "key_frames": status.key_frames,
        "delta_frames": status.delta_frames,
        "hit_rate": status.hit_rate,
    }


def _about(status: BoundaryStatus) -> Iterator[str]:
    """What is kept at a boundary that keeps buffers, or sent frames that could build on some."""
    from rich.filesize import decimal

    kept = status.kept
    if status.hit_rate is not None and (status.delta_frames or kept.samples):
        yield (
            f"boundary {status.boundary:<11} {status.buffered_samples} samples buffered, hit rate "
            f"{status.hit_rate:.1%} ({status.key_frames} key, {status.delta_frames} delta frames)"
        )
    if kept.samples:
        yield (
            f"{'':<20} {decimal(kept.memory_bytes)} in memory, {decimal(kept.disk_bytes)} on disk; "
            f"read {kept.memory_hits} times from memory, {kept.disk_hits} from disk, "
            f"{kept.misses} not there; {kept.evictions} evicted, {kept.repairs} repaired"
        )


# ---- parts


async def _see_through(
    begin: Callable[[SwarmClient], Awaitable[WatchedRun]],
    outputs: Outputs,
    way: WayIn,
    *,
    detaches: bool = False,
) -> None:
    """Begin, or find, a run and watch it until it is reported on, or a stop signal detaches."""
    from swarm_ft.client.job import check_outputs

    check_outputs(outputs)
    async with connected(way) as swarm:
        run = await begin(swarm)
        report = None if detaches else await _report_of(run, outputs)
    if report is not None:
        conclude(report, outputs.json_file)
        return
    click.echo("detached; the run goes on. Come back by")
    click.echo(f"  swarm-ft client attach --run {run.run_id} {way}")


async def _report_of(run: WatchedRun, outputs: Outputs) -> RunReport | None:
    """The report; or None, once a stop signal detached this client from the run."""
    command = asyncio.current_task()
    fetching = asyncio.ensure_future(run.fetch(outputs))
    on_stop_signal(fetching.cancel)
    run.progress.message(f"watching {run.run_id}; Ctrl-C detaches, and the run goes on")
    await asyncio.wait([fetching])
    if fetching.cancelled():
        return None
    if command is not None:  # the run is over, and nothing is left to detach from
        on_stop_signal(command.cancel)
    fetching.result()
    return run.report(outputs)


def conclude(report: RunReport, json_file: Path | None) -> None:
    """Show the report and write it down."""
    from rich.console import Console

    report.print_summary(Console(highlight=False))
    if json_file is not None:
        report.write(json_file)
