"""`swarm-ft status`: who is there and what they do."""

from __future__ import annotations

import json

import click

from swarm_ft.cli.client import connected, swarm_options
from swarm_ft.cli.options import json_flag
from swarm_ft.cli.running import run_async


@click.command()
@swarm_options
@json_flag
def status(initial_peers: tuple[str, ...], dht_prefix: str, as_json: bool) -> int:
    r"""Show the swarm's peers and runs.

    \b
    Example:
      swarm-ft status --initial-peers /ip4/...
    """

    async def work() -> int:
        async with connected(initial_peers, dht_prefix) as swarm:
            found = await swarm.status()
        peers = [{"peer": m.peer_id, "layers": str(m.layers or "auto")} for m in found.members]
        runs = [
            {
                "run": run.run_id,
                "phase": run.phase.name.lower(),
                "detail": run.detail,
                "steps": run.committed_steps,
                "num_steps": run.spec.train.num_steps,
                "stages": [{"peer": s.peer_id, "layers": str(s.layers)} for s in run.stages],
            }
            for run in found.runs
        ]
        if as_json:
            click.echo(json.dumps({"peers": peers, "runs": runs}))
            return 0
        for peer in peers:
            click.echo(f"peer {peer['peer']}  layers {peer['layers']}")
        for run in runs:
            counted = f"step {run['steps']}/{run['num_steps']}"
            click.echo(f"run {run['run']}  {run['phase']}  {counted}  {run['detail']}".rstrip())
        return 0

    return run_async(work)
