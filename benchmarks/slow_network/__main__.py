"""Throughput over slow links: of swarm-ft, of others, and the limit. Needs root and Linux.

    sudo python -m benchmarks.slow_network --quick --json FILE
    sudo python -m benchmarks.slow_network --mbps 10000,100,50,25,10 --systems aq4/q8,none/none

Hosts are network namespaces, their links shaped; what runs in them is real, but for the compute,
which takes the time that it is stated to take. Everything is gone at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from benchmarks.slow_network.cases import HIVEMIND, TORCH, Row, System, run_case, system_named
from benchmarks.slow_network.table import cost_of_tls, describe, to_document, to_table
from benchmarks.slow_network.work import PRESETS, Network, Scale, Topology, Trial, Work
from swarm_ft.errors import BadInput
from swarm_ft.stage.checkpoint import open_checkpoint

QUICK = (("aq4~aq2/q8", 10_000.0), ("aq4~aq2/q8", 100.0), ("gpipe", 100.0))
"""Systems and Mbps: the same swarm on a fast and on a slow link, and what it is compared with."""
QUICK_DILATION = 3.0
"""Of the swarm: with it two cores are two thirds busy at 100 Mbps."""
_print_line = Console(stderr=True).print


def main() -> None:
    """Run the command."""
    parser = _parser()
    options = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root: run it with sudo")
    try:
        trials = list(_trials(options))
    except (ValueError, BadInput) as error:
        parser.error(str(error))
    rows = _measure(trials, keep=options.keep)
    Console(width=120).print(to_table(rows))
    for line in cost_of_tls(rows):
        _print_line(line, highlight=False, soft_wrap=True)
    document = {"cpus": os.cpu_count(), "preset": options.preset, "rows": to_document(rows)}
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    elif not sys.stdout.isatty():
        json.dump(document, sys.stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", default="gpt2-xl-v100", choices=PRESETS)
    parser.add_argument(
        "--mbps", type=_numbers, default=[100.0], help="rates, with commas; 0: unshaped"
    )
    parser.add_argument("--up-mbps", type=float, help="of all links, if it is another")
    parser.add_argument("--delay-ms", type=_numbers, default=[0.0], help="with commas")
    parser.add_argument("--congestion-control", default="cubic", help="of TCP: cubic, bbr ...")
    parser.add_argument(
        "--no-idle-restart",
        action="store_true",
        help="net.ipv4.tcp_slow_start_after_idle=0, as docker-compose.yml sets it",
    )
    parser.add_argument(
        "--links",
        type=Topology,
        default=Topology.PAIR,
        help="pair: one for each two neighbours; home: one for each peer",
    )
    parser.add_argument(
        "--nat",
        type=lambda text: text.split(","),
        default=[None],
        help="with commas: open, cone (punched), symmetric (relayed) ...: routers at the end of "
        "each peer's one link",
    )
    parser.add_argument(
        "--systems",
        default="aq4/q8",
        help="with commas: codecs FW[~FILL]/BW[/DP][@KEY] of swarm-ft, or "
        + ", ".join((*TORCH, *HIVEMIND)),
    )
    parser.add_argument(
        "--tls",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="encrypt links of swarm-ft",
    )
    parser.add_argument(
        "--turns",
        type=int,
        help="so many of each with TLS and in plaintext, one after the other: what TLS costs",
    )
    parser.add_argument("--stages", type=int, help="instead of the preset's; so too those below")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--steps", type=int, help="that count  [default: 2; quick: 1]")
    parser.add_argument("--dilation", type=float, help="how much slower it runs")
    parser.add_argument("--shrink", type=int, default=1, help="how much smaller tensors are")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="aq4~aq2/q8 at 10 Gbps and 100 Mbps, and GPipe, in under 5 minutes",
    )
    parser.add_argument("--model", help="directory of a GPT-2 to train instead of emulating one")
    parser.add_argument("--tokens", type=int, help="of a sample; so too")
    parser.add_argument("--trace", type=Path, help="of the last swarm-ft that runs")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--keep", action="store_true", help="the logs, and say where they are")
    return parser


def _measure(trials: Iterable[tuple[System, Trial]], *, keep: bool) -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="slow-network-"))
    try:
        return list(_run(trials, folder))
    except RuntimeError as error:
        raise SystemExit(f"{error}{'' if keep else '; --keep keeps the logs'}") from None
    finally:
        if keep:
            _print_line(f"logs: {folder}")
        else:
            shutil.rmtree(folder)


def _run(trials: Iterable[tuple[System, Trial]], folder: Path) -> Iterator[Row]:
    for number, (system, trial) in enumerate(trials):
        _print_line(f"{describe(trial.network)}: {system.name}", highlight=False)
        yield run_case(system, trial, folder / str(number))


def _trials(options: argparse.Namespace) -> Iterator[tuple[System, Trial]]:
    steps = (1 if options.quick else 2) if options.steps is None else options.steps
    turns = [True, False] * options.turns if options.turns else [options.tls]
    cases = _quick() if options.quick else _grid(options)
    for (name, network), tls in product(cases, turns):
        system = system_named(name, model=options.model, trace=options.trace, tls=tls)
        dilation = min(system.dilation, QUICK_DILATION) if options.quick else system.dilation
        scale = Scale(
            dilation=dilation if options.dilation is None else options.dilation,
            shrink=options.shrink,
        )
        yield system, Trial(work=_work(options), network=network, scale=scale, steps=steps)


def _quick() -> Iterator[tuple[str, Network]]:
    for name, mbps in QUICK:
        yield name, Network(up_mbps=mbps, down_mbps=mbps)


def _grid(options: argparse.Namespace) -> Iterator[tuple[str, Network]]:
    for delay_ms, mbps, nat in product(options.delay_ms, options.mbps, options.nat):
        network = Network(
            up_mbps=options.up_mbps or mbps or None,
            down_mbps=mbps or None,
            delay_ms=delay_ms,
            topology=options.links if nat is None else Topology.HOME,
            congestion_control=options.congestion_control,
            idle_restart=not options.no_idle_restart,
            nat=nat,
        )
        for name in options.systems.split(","):
            yield name, network


def _work(options: argparse.Namespace) -> Work:
    names = ("stages", "replicas", "tokens", "batch_size", "micro_batch_size")
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.model:
        values["channels"] = open_checkpoint(options.model).describe().hidden_size
    return replace(PRESETS[options.preset], **values)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        message = f"expected numbers with commas between them, got '{text}'"
        raise argparse.ArgumentTypeError(message) from None


if __name__ == "__main__":
    main()
