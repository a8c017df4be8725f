"""Commits a second of an honest run while a client and a peer flood the coordinator.

    python -m benchmarks.beside_floods [--seconds S] [--rounds N] [--floods NAME,...] [--json]

A swarm of real processes on loopback, with keys and TLS: a coordinator, two peers, and an honest
client that trains one job after the other. The attacker is a process of its own: bare gRPC, with
the certificates of one client and one peer. Windows without and with its floods alternate
(`tests.hostile.flood` lists them).

It prints, for each kind of window: commits a second, and the processor time of the coordinator and
of the attacker as a share of one core. All processes share this machine's cores, so the attacker
runs at the lowest priority; `idle-attacker` windows show what its own work costs the run. In them
the attacker is busy for as much processor time as its floods took, and sends nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.hostile.flood import FLOODS, attacking
from tests.hostile.processes import Processes, cpu_s, opened

KINDS = ("quiet", "floods", "idle-attacker")


def _commits(swarm: Processes) -> int:
    return swarm.honest_client.commits_between(-math.inf, math.inf)


async def window(
    swarm: Processes, seconds: float, floods: list[str], burns: float = 0.0
) -> dict[str, Any]:
    """Measure commits a second and shares of a core for some seconds while floods run."""
    async with AsyncExitStack() as stack:
        process = None
        if floods or burns:
            process = await stack.enter_async_context(
                attacking(
                    *(
                        swarm.at,
                        swarm.client,
                        swarm.peer,
                        swarm.honest_client.job.spec,
                        seconds + 1.0,
                    ),
                    floods=floods,
                    burns=burns,
                )
            )
        commits, used_s = _commits(swarm), cpu_s(swarm.coordinator.pid)
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began_s
        found: dict[str, Any] = {
            "commits_per_s": (_commits(swarm) - commits) / took_s,
            "coordinator_cpu": (cpu_s(swarm.coordinator.pid) - used_s) / took_s,
            "attacker_cpu": 0.0,
        }
        if process is not None:
            answer = json.loads((await process.communicate())[0])
            found |= {"attacker_cpu": answer["cpu"], "counts": answer["counts"]}
        swarm.check_alive()
        return found


async def measure(seconds: float, rounds: int, floods: list[str]) -> dict[str, Any]:
    """Windows of each kind in turns, and their means."""
    with tempfile.TemporaryDirectory() as folder:
        async with opened(Path(folder)) as swarm:
            found: dict[str, list[dict[str, Any]]] = {
                "quiet": [],
                "floods": [],
                "idle-attacker": [],
            }
            for _ in range(rounds):
                found["quiet"].append(await window(swarm, seconds, []))
                found["floods"].append(await window(swarm, seconds, floods))
                burns = min(1.0, found["floods"][-1]["attacker_cpu"])
                found["idle-attacker"].append(await window(swarm, seconds, [], burns))
            means = {kind: _means(windows) for kind, windows in found.items()}
            rate = means["floods"]["commits_per_s"]
            return {
                **means,
                "of_quiet": rate / means["quiet"]["commits_per_s"],
                "of_idle_attacker": rate / means["idle-attacker"]["commits_per_s"],
                "counts": [one["counts"] for one in found["floods"]],
            }


def _means(windows: list[dict[str, Any]]) -> dict[str, float]:
    names = ("commits_per_s", "coordinator_cpu", "attacker_cpu")
    return {name: sum(one[name] for one in windows) / len(windows) for name in names}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floods", default=",".join(FLOODS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options.seconds, options.rounds, options.floods.split(",")))
    if options.json:
        print(json.dumps(found))  # noqa: T201
        return
    for kind in KINDS:
        print(kind, *(f"{name}={value:.2f}" for name, value in found[kind].items()))  # noqa: T201
    print(f"floods / quiet = {found['of_quiet']:.2f}")  # noqa: T201
    print(f"floods / idle-attacker = {found['of_idle_attacker']:.2f}")  # noqa: T201
    print("attacks:", json.dumps(found["counts"]))  # noqa: T201


if __name__ == "__main__":
    main()
