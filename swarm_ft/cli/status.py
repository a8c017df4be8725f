"""`swarm-ft status`: who is there and what they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.client import connected, swarm_options
from swarm_ft.cli.options import examples, json_flag
from swarm_ft.cli.running import run_async

if TYPE_CHECKING:
    from swarm_ft.protocol.messages.client import BoundaryStatus, SwarmStatus


@click.command(epilog=examples("swarm-ft status --initial-peers /ip4/..."))
@swarm_options
@json_flag
def status(initial_peers: tuple[str, ...], dht_prefix: str, as_json: bool) -> None:
    """Show the swarm's peers and runs."""

    async def work() -> None:
        async with connected(initial_peers, dht_prefix) as swarm:
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
        {"peer": m.peer_id, "layers": str(m.layers or "auto"), "idle": m.idle}
        for m in found.members
    ]
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
            "boundaries": [_boundary_fields(boundary) for boundary in run.boundaries],
        }
        for run in found.runs
    ]
    return {"peers": peers, "runs": runs}


def status_lines(found: SwarmStatus) -> Iterator[str]:
    """What people read."""
    from swarm_ft.client.report import kind_lines
    from swarm_ft.protocol.messages.control import stages_of

    for member in found.members:
        idle = f"  idle: {member.idle}" if member.idle else ""
        yield f"peer {member.peer_id}  layers {member.layers or 'auto'}{idle}"
    if not found.members:
        yield "no peer is there; start some with 'swarm-ft serve-stage'"
    for run in found.runs:
        counted = f"step {run.committed_steps}/{run.spec.train.num_steps}"
        yield f"run {run.run_id}  {run.phase.name.lower()}  {counted}  {run.detail}".rstrip()
        for stage in stages_of(run.stages):
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
