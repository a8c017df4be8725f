"""The time from a client's way in to the coordinator's answer, with keys and without.

    sudo python -m benchmarks.join_time --delay-ms 50

Both swarms run side by side on a lab's hosts, and one process joins and leaves each in turn. With
keys it has to be certified before all else; without, it only looks the coordinator up in the DHT.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.lab import Lab, LabSwarm, Link
from benchmarks.slow_network.way import add_way, way_of
from swarm_ft.api.connections import SwarmAddress, connect
from swarm_ft.cli.running import run_async

JOINER = "benchmarks.join_time"


def main() -> None:
    """Build both swarms and let a third host join them; or, with two ways in, be that host."""
    options = _parser().parse_args()
    if options.ways:
        run_async(lambda: _join(options.ways, options.joins))
        return
    for name, took_s in _measured(options).items():
        spread = f"{1000 * min(took_s):.0f} to {1000 * max(took_s):.0f}"
        sys.stdout.write(f"{name:9} {1000 * median(took_s):5.0f} ms, {spread}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from one host to another")
    parser.add_argument("--joins", type=int, default=10, help="of each swarm")
    parser.add_argument("ways", nargs="*", type=_way, help=argparse.SUPPRESS)
    return parser


def _way(text: str) -> SwarmAddress:
    parser = argparse.ArgumentParser()
    add_way(parser)
    return way_of(parser.parse_args(json.loads(text)))


def _measured(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each join, by the kind of its swarm."""
    link = Link(delay_ms=options.delay_ms)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="join-time-")))
        lab = stack.enter_context(Lab())
        swarms = {
            name: stack.enter_context(LabSwarm(folder / name, lab.host(link), tls=name == "TLS"))
            for name in ("TLS", "plaintext")
        }
        ways = (json.dumps(swarm.client_way) for swarm in swarms.values())
        arguments = ("--joins", str(options.joins), "--", *ways)
        joined = swarms["TLS"].start("joiner", lab.host(link), arguments, module=JOINER)
        return dict(zip(swarms, joined["seconds"], strict=True))


async def _join(ways: Sequence[SwarmAddress], joins: int) -> None:
    """Print what the joins took, those of the first one left out: it imports what all need."""
    took_s: list[list[float]] = [[] for _ in ways]
    for _ in range(joins + 1):
        for way, taken_s in zip(ways, took_s, strict=True):
            began_s = time.monotonic()
            async with connect(way) as swarm:
                await swarm.status()
                taken_s.append(time.monotonic() - began_s)
    sys.stdout.write(json.dumps({"seconds": [taken_s[1:] for taken_s in took_s]}) + "\n")


if __name__ == "__main__":
    main()
