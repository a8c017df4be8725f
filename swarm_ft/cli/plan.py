"""The command `swarm-ft plan`, which forecasts a job before it is submitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.connections import SwarmAddress, connect
from swarm_ft.cli.help_groups import GroupedCommand
from swarm_ft.cli.options import examples, json_flag, log_option, takes
from swarm_ft.cli.running import load, run_async, show_start
from swarm_ft.cli.swarm_options import way_in
from swarm_ft.client.options import PlanOptions
from swarm_ft.protocol.spec.sizes import format_size, format_traffic

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
def plan(options: PlanOptions, way: SwarmAddress, as_json: bool) -> None:
    """Forecast how long a job would take and what it would send; submits nothing."""
    from swarm_ft.stage.names import check_model_place

    check_model_place(options.model)
    show_start("reading the model's config; libraries take some seconds to load", as_json=as_json)
    load("swarm_ft.api.forecasts", "swarm_ft.discovery.dht")

    async def work() -> None:
        import asyncio

        from swarm_ft.api.forecasts import forecast_in, read_model

        checkpoint, spec = await asyncio.to_thread(read_model, options)
        async with connect(way) as swarm:
            found, placed = await forecast_in(swarm, checkpoint, spec)
        if as_json:
            fields = {**forecast_fields(found), "relayed_percent": placed.relayed_percent}
            click.echo(json.dumps(fields))
            return
        for line in forecast_lines(found):
            click.echo(line)
        if placed.relayed_percent:
            click.echo(f"relayed   about {placed.relayed_percent} % of the traffic between peers")

    run_async(work)


def forecast_fields(found: Forecast) -> dict[str, Any]:
    """Return the document that `--json` prints."""
    fields = asdict(found)
    for stage in fields["stages"]:
        stage["layers"] = f"{stage['layers']['start']}-{stage['layers']['stop']}"
    return fields


def forecast_lines(found: Forecast) -> Iterator[str]:
    """Yield the lines for people."""
    for stage in found.stages:
        yield _stage_line(stage)
        if stage.memory is not None:
            yield _memory_line(stage.memory)
    yield from found.lines()
    if found.kwh:
        yield f"energy    {found.kwh:.2f} kWh, by the peers' --watts"
    for words in found.unknown:
        yield f"unknown   {words}; the forecast ignores it"


def _stage_line(stage: StageForecast) -> str:
    names = ", ".join(stage.names)
    takes = format_size(stage.memory.total) if stage.memory else "?"
    computes = f"{1000 * stage.compute_s:.0f} ms per microbatch" if stage.compute_s else "?"
    up, down = (format_traffic(round(count)) for count in (stage.up_bytes, stage.down_bytes))
    return f"layers {stage.layers!s:<8} {names}: {takes}, {computes}, sends {up}, receives {down}"


def _memory_line(memory: PeerMemory) -> str:
    count = memory.microbatches
    noun = "microbatch" if count == 1 else "microbatches"
    return (
        f"          memory: weights, gradients and optimizer {format_size(memory.static)}, "
        f"{count} {noun} of {format_size(memory.microbatch)}, "
        f"temporaries {format_size(memory.temporaries)}"
    )
