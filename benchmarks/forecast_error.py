"""The error of forecasts: peers train behind home routers, and the report has both durations.

    sudo python -m benchmarks.forecast_error --up-mbps 2,5,20,100

All is real: processes, routers, links of these rates, the model's arithmetic. Each peer has a core.
Nothing is evaluated: forecasts list evaluations apart, since part of them fills idle time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lab import LabSwarm, Link
from benchmarks.lab.homes import Home, Internet
from swarm_ft.client.demo_input import DemoInput, write_demo_input
from swarm_ft.identity.roles import Role

LAYERS = ("0-3", "3-6")
DELAY_MS = 20.0
GOAL = 0.2


def main() -> None:
    """Measure one rate after the other, and print a line of each."""
    options = _parser().parse_args()
    sys.stdout.write("up Mbps  forecast  measured  ratio  bound by\n")
    for up_mbps in map(float, options.up_mbps.split(",")):
        report = _measured(up_mbps, options)
        expected, found = report["forecast"], report["samples_per_second"]
        ratio = found / expected["samples_per_second"]
        mark = " " if abs(ratio - 1) <= GOAL else "*"
        numbers = f"{expected['samples_per_second']:8.2f}  {found:8.2f}  {ratio:5.2f}{mark}"
        sys.stdout.write(f"{up_mbps:7g}  {numbers}  {expected['bound_by']}\n")
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--up-mbps", default="2,5,20,100", help="of all peers, with commas")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--fw", default="aq4")
    parser.add_argument("--bw", default="q8")
    return parser


def _measured(up_mbps: float, options: argparse.Namespace) -> dict[str, Any]:
    """Train in a lab and return the client's report."""
    with tempfile.TemporaryDirectory(prefix="forecast-") as name, Internet() as internet:
        folder = Path(name)
        sample = write_demo_input(folder / "sample", seed=1, hidden_size=options.hidden_size)
        public = internet.household(Home("open", link=Link(delay_ms=DELAY_MS))).machines[0]
        home = Home("cone", link=Link(up_mbps, 4 * up_mbps, delay_ms=DELAY_MS))
        with LabSwarm(folder / "swarm", public) as swarm:
            word = swarm.ways[Role.PEER][1]
            for number, layers in enumerate(LAYERS):
                machine = internet.household(home).machines[0]
                models = ("--models", sample.model_dir)
                offer = ("--layers", layers, "--threads", "1", *models)
                command = ("serve-stage", word, *offer, "--json")
                swarm.start(f"peer-{number}", machine, command)
            return _trained(swarm, sample, folder, options)


def _trained(
    swarm: LabSwarm, sample: DemoInput, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    job = [
        *("--model", sample.model_dir, "--dataset", sample.train_file, "--max-samples", "64"),
        *("--seq-length", "128", "--batch-size", "16", "--steps", str(options.steps)),
        *("--fw", options.fw, "--bw", options.bw, "--key", "fp16"),
        *("--eval-strategy", "no"),
    ]
    return swarm.trained(folder, job)


if __name__ == "__main__":
    main()
