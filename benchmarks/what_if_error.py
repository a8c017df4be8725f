"""The error of `swarm-ft replay --what-if` about a cap, against the run with that cap.

    python -m benchmarks.what_if_error --up-mbps 0.5,1,2,4

Two peers train, with nothing between them but loopback; all are processes, as in `benchmarks.day`.
From the coordinator's recording `--what-if` computes how long a step of the same run takes
if the first peer has an uplink of so many Mbps. Then it gets that (`--upload-mbps`), and the run is
made again. Both figures are means of steps: of those that were simulated, and of the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.day.__main__ import opened
from benchmarks.day.processes import run_command
from benchmarks.day.swarm import Swarm

STEPS = 24
FREE, CAPPED = "ann", "ben"
"""Owners, as folders for what their clients write."""
PEER, LAYERS = "owner-1", "0-2"
JOURNAL = "swarm-ft-coordinator.db"


def main() -> None:
    """Foretell and measure, and print a line of each cap."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--up-mbps", default="0.5,1,2,4", help="of the first peer, with commas")
    options = parser.parse_args()
    rates = [float(text) for text in options.up_mbps.split(",")]
    with tempfile.TemporaryDirectory(prefix="what-if-") as folder:
        asyncio.run(_compare(Path(folder), rates))


async def _compare(folder: Path, rates: list[float]) -> None:
    async with opened(Swarm(folder, STEPS, is_quiet=True)) as swarm:
        free_s = await _step_s(swarm, FREE)
        forecasts = [await _forecast_s(swarm, rate) for rate in rates]
        sys.stdout.write("up Mbps  foretold s a step  measured  ratio\n")
        for rate, forecast_s in zip(rates, forecasts, strict=True):
            await swarm.leaves(PEER)
            await swarm.comes(PEER, LAYERS, "--upload-mbps", rate)
            found_s = await _step_s(swarm, CAPPED)
            numbers = f"{forecast_s:18.2f}  {found_s:8.2f}  {found_s / forecast_s:5.2f}"
            sys.stdout.write(f"{rate:7g}  {numbers}\n")
            sys.stdout.flush()
        sys.stdout.write(f"without a cap a step took {free_s:.2f} s\n")


async def _step_s(swarm: Swarm, owner: str) -> float:
    """Return the mean seconds of a step in the second half of a run."""
    sizes = ("--batch-size", 4, "--micro-batch-size", 1, "--max-eval-samples", 1)
    client = await swarm.trains(owner, *sizes, "--eval-steps", STEPS)
    await client.ends(timeout_s=60.0 * STEPS)
    losses = await run_command(f"losses-{owner}", swarm.home(owner), "losses", *swarm.way)
    seconds = [one["seconds"] for one in losses if "seconds" in one]
    return fmean(seconds[-STEPS // 2 :])


async def _forecast_s(swarm: Swarm, rate: float) -> float:
    home, name = swarm.home("coordinator"), swarm.names[PEER]
    what_if = ("--what-if", f"peer {name}: {rate:g} Mbps up", "--at", STEPS // 2)
    (forecast,) = await run_command("replay", home, "replay", JOURNAL, *what_if)
    return float(forecast["changed"]["step_s"])


if __name__ == "__main__":
    main()
