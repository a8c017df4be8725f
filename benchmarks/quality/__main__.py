"""`python -m benchmarks.quality`: runs configs of the study, prints its tables, draws its plots."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from benchmarks.quality.configs import DEFAULT_EPOCHS, GROUPS, Config, configs_of
from benchmarks.quality.models import regime_of
from benchmarks.quality.train import RATES, Task, deterministic, key_of, read_task, run

_GRID = "3e-4,1e-3,2e-3,4e-3"


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    if options.table or options.plots:
        _show(options)
        return
    deterministic()
    regime = regime_of(options.set)
    task = read_task(_task_name(options), regime, options.data, options.cache)
    _run_all(task, list(_jobs(task, options)), options.out)


def _show(options: argparse.Namespace) -> None:
    from benchmarks.quality.table import print_tables, read_records

    records = read_records(options.table or options.out)
    configs = configs_of(options.configs, options.epochs) if options.configs else None
    if options.table:
        print_tables(records, options.group, configs)
    if options.plots:
        from benchmarks.quality.plots import draw  # needs matplotlib

        draw(records, options.group, configs, options.plots)


def _jobs(task: Task, options: argparse.Namespace) -> Iterator[tuple[Config, int, float]]:
    """Config, seed and rate of this process's share; whole seeds first, so a stop loses little."""
    configs = configs_of(options.configs or GROUPS[options.group or "main"], options.epochs)
    default = RATES[task.name]
    rates = [float(rate) for rate in (options.rates or str(default)).split(",")]
    jobs = [(c, s, r) for s in _numbers(options.seeds) for c in configs for r in rates]
    share, shares = (int(part) for part in options.shard.split("/"))
    yield from jobs[share::shares]


def _run_all(task: Task, jobs: list[tuple[Config, int, float]], out: Path) -> None:
    for number, (config, seed, rate) in enumerate(jobs, 1):
        key = key_of(task, config, seed, rate)
        if _is_done(out, key):
            continue
        record = run(task, config, seed, rate)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        _print_line(f"{number}/{len(jobs)} seed {seed} rate {rate:g} {config}: {_summary(record)}")


def _is_done(out: Path, key: dict[str, object]) -> bool:
    """Read each time: another process may have written it."""
    lines = out.read_text().splitlines() if out.exists() else []
    return any(key.items() <= json.loads(line).items() for line in lines)


def _summary(record: dict[str, object]) -> str:
    if record["diverged"]:
        return f"diverged: {record['diverged']}"
    hidden = ("loss", "bits_fw", "bits_bw", "changes")
    last = {k: v for k, v in record["epochs"][-1].items() if k not in hidden}  # type: ignore[index]
    scores = ", ".join(f"{name} {value:.3f}" for name, value in last.items())
    bits = f"bits {record['bits_fw']:.2f} / {record['bits_bw']:.2f}"
    return f"{scores}, {bits}, {record['seconds']} s"


def _task_name(options: argparse.Namespace) -> str:
    return options.task or ("cola" if options.group == "cola" else "lm")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.quality", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="folder with the WikiText-2, CoLA files")
    add("--group", choices=GROUPS, help="a table of configs (default: main)")
    add(
        "--configs",
        default="",
        help="fw[~fill][%%reuse]/bw[~drain][/dp][@key[@first]][#bits][:epochs],.., not a group",
    )
    add("--task", choices=RATES, help="default: cola for the group cola, else lm")
    add("--seeds", default="0,1,2")
    add("--epochs", type=int, default=DEFAULT_EPOCHS, help="where the config names none")
    add("--rates", default="", help=f"learning rates instead of the best; the grid was {_GRID}")
    add("--set", action="append", default=[], metavar="FIELD=NUMBER", help="change the regime")
    add("--cache", type=Path, default=Path("build/quality"), help="keeps pre-trained weights")
    add("--out", type=Path, default=Path("build/quality/results.jsonl"))
    add("--shard", default="0/1", metavar="I/N", help="run only every Nth job, from the Ith")
    add("--table", type=Path, metavar="FILE", help="print tables of results; runs nothing")
    add("--plots", type=Path, metavar="DIR", help="draw plots of --out or --table; runs nothing")
    return parser


if __name__ == "__main__":
    main()
