"""`swarm-ft status`: who is there and what they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.client import connected, swarm_options
from swarm_ft.cli.options import examples, json_flag
from swarm_ft.cli.running import run_async

if TYPE_CHECKING:
    from swarm_ft.protocol.status import SwarmStatus


@click.command(epilog=examples("swarm-ft status --initial-peers /ip4/..."))
@swarm_options
@json_flag
def status(initial_peers: tuple[str, ...], dht_prefix: str, as_json: bool) -> None:
    """Show the swarm's peers and runs."""

    async def work() -> None:
        async with connected(initial_peers, dht_prefix) as swarm:
            found = await swarm.status()
        if as_json:
            click.echo(json.dumps(_document(found)))
        else:
            for line in _lines(found):
                click.echo(line)

    run_async(work)


def _document(found: SwarmStatus) -> dict[str, object]:
    from swarm_ft.client.report import kind_fields

    peers = [{"peer": m.peer_id, "layers": str(m.layers or "auto")} for m in found.members]
    runs = [
        {
            "run": run.run_id,
            "phase": run.phase.name.lower(),
            "detail": run.detail,
            "steps": run.committed_steps,
            "num_steps": run.spec.train.num_steps,
            "bytes": kind_fields(run.sent),
            "stages": [
                {"peer": s.peer_id, "layers": str(s.layers), "joining": s.peer_id in run.joining}
                for s in run.stages
            ],
        }
        for run in found.runs
    ]
    return {"peers": peers, "runs": runs}


def _lines(found: SwarmStatus) -> Iterator[str]:
    from swarm_ft.client.report import kind_lines
    from swarm_ft.protocol.coordinator_messages import stages_of

    for member in found.members:
        yield f"peer {member.peer_id}  layers {member.layers or 'auto'}"
    if not found.members:
        yield "no peer is there; start some with 'swarm-ft serve-stage'"
    for run in found.runs:
        counted = f"step {run.committed_steps}/{run.spec.train.num_steps}"
        yield f"run {run.run_id}  {run.phase.name.lower()}  {counted}  {run.detail}".rstrip()
        for stage in stages_of(run.stages):
            names = (f"{p} (joining)" if p in run.joining else p for p in stage.peers)
            yield f"  layers {stage.layers}  {', '.join(names)}"
        yield from (f"  {line}" for line in kind_lines(run.sent))
