"""`swarm-ft plan`: what a job would take, before anything begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.joining import WayIn, connected
from swarm_ft.cli.help_groups import GroupedCommand
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.options import examples, json_flag, log_option, takes
from swarm_ft.cli.running import load, run_async, show_start
from swarm_ft.client.options import PlanOptions

if TYPE_CHECKING:
    from swarm_ft.client.forecast import Forecast, PeerMemory, StageForecast


@click.command(
    cls=GroupedCommand,
    short_help="Forecast a job's time, traffic and memory.",
    epilog=examples(
        "swarm-ft plan --model gpt2 --invite @invitation.txt",
        "swarm-ft plan --model ./qwen2 --num-samples 20000 --fw aq2 --invite @invitation.txt",
    ),
)
@takes("options", PlanOptions)
@way_in()
@json_flag
@log_option
def plan(options: PlanOptions, way: WayIn, as_json: bool) -> None:
    """Say how long a job would take, what it sends and costs; nothing begins."""
    from swarm_ft.stage.names import check_model_place

    check_model_place(options.model)
    show_start("reading the model's config; libraries take some seconds", as_json=as_json)
    load("swarm_ft.api.planning", "swarm_ft.discovery.dht")

    async def work() -> None:
        import asyncio

        from swarm_ft.api.planning import forecast_in, read_model

        checkpoint, spec = await asyncio.to_thread(read_model, options)
        async with connected(way) as swarm:
            found, placed = await forecast_in(swarm, checkpoint, spec)
        if as_json:
            fields = {**forecast_fields(found), "relayed_percent": placed.relayed_percent}
            click.echo(json.dumps(fields))
            return
        for line in forecast_lines(found):
            click.echo(line)
        if placed.relayed_percent:
            click.echo(f"relayed   about {placed.relayed_percent} % of what peers send each other")

    run_async(work)


def forecast_fields(found: Forecast) -> dict[str, Any]:
    """What `--json` prints."""
    fields = asdict(found)
    for stage in fields["stages"]:
        stage["layers"] = f"{stage['layers']['start']}-{stage['layers']['stop']}"
    return fields


def forecast_lines(found: Forecast) -> Iterator[str]:
    """What people read."""
    for stage in found.stages:
        yield _stage_line(stage)
        if stage.memory is not None:
            yield _memory_line(stage.memory)
    yield from found.lines()
    if found.kwh:
        yield f"energy    {found.kwh:.2f} kWh, as volunteers stated their watts"
    for words in found.unknown:
        yield f"not known {words}; the forecast leaves it out"


def _stage_line(stage: StageForecast) -> str:
    from rich.filesize import decimal

    names = ", ".join(stage.names or stage.peers)
    takes = _size(stage.memory.total) if stage.memory else "?"
    computes = f"{1000 * stage.compute_s:.0f} ms a microbatch" if stage.compute_s else "?"
    return (
        f"layers {stage.layers!s:<8} {names}: {takes}, {computes}, "
        f"sends {decimal(round(stage.up_bytes))}, receives {decimal(round(stage.down_bytes))}"
    )


def _memory_line(memory: PeerMemory) -> str:
    count = memory.microbatches
    each = f"{count} microbatch{'es' if count > 1 else ''} of {_size(memory.microbatch)}"
    return (
        f"          holds {_size(memory.held)}, {each}, temporaries {_size(memory.temporaries)}: "
        f"{_size(memory.total)}"
    )


def _size(num_bytes: int) -> str:
    """Return a size in GiB, or in MiB where that would be next to nothing."""
    mebibytes = num_bytes / (1 << 20)
    return f"{mebibytes / 1024:.2f} GiB" if mebibytes >= 102.4 else f"{mebibytes:.3g} MiB"
