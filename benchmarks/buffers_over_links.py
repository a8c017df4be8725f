"""Trains a model twice side by side over slow links: with memory for all buffers, and for a tenth.

Prints samples a second of each, and where buffers were found.

    sudo python -m benchmarks.buffers_over_links --dataset wikitext2-valid.txt --json FILE

Each swarm is two peers of one stage each, a DHT node, a coordinator and a client, as real processes
on hosts of their own (network namespaces), the peers behind links of `--mbps` either way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lab import Lab, LabSwarm, Link
from swarm_ft.client.demo_input import write_demo_input

NUM_LAYERS = 2
BOUNDARY = 1
HIDDEN_SIZE = 128
SEQ_LENGTH = 256
RECORD_BYTES = 2 * SEQ_LENGTH * HIDDEN_SIZE + 2


@dataclass(frozen=True)
class Outcome:
    """The figures of one swarm.

    Attributes:
        step_s: median seconds of a step after the first epoch.
        samples_per_s: after the first epoch.
        loss: of the last step.
        buffers: the boundary's row in `swarm-ft status` at the end.
    """

    memory_bytes: int
    step_s: float
    samples_per_s: float
    loss: float
    buffers: dict[str, object]


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="buffers-over-links-", dir=options.folder))
    try:
        document = _measure(options, folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder)
    text = json.dumps(document, indent=2)
    sys.stdout.write(f"{text}\n")
    if options.json:
        options.json.write_text(f"{text}\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", type=Path, required=True, help="UTF-8 text")
    parser.add_argument("--mbps", type=float, default=5.0, help="of each peer's link, either way")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--chars", type=int, default=500_000, help="of the text that are used")
    parser.add_argument("--buffer-bits", type=int, default=16, choices=(16, 8, 4))
    parser.add_argument("--folder", type=Path, help="for everything that is written meanwhile")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--keep", action="store_true", help="the logs, where they are")
    return parser


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    text = folder / "train.txt"
    text.write_text(options.dataset.read_text(encoding="utf-8")[: options.chars], encoding="utf-8")
    sample = write_demo_input(
        folder / "input", seed=0, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE
    )
    num_samples = _num_samples(sample.model_dir, text)
    set_bytes = num_samples * RECORD_BYTES * options.buffer_bits // 16
    budgets = {"all in memory": 1 << 31, "a tenth in memory": set_bytes // 10}
    began_s, cpu_s = time.monotonic(), _children_cpu_s()
    with Lab() as lab, ExitStack() as stack:
        trainings = {
            name: stack.enter_context(
                _training(lab, folder / name.replace(" ", "-"), options, budget, sample.model_dir)
            )
            for name, budget in budgets.items()
        }
        outcomes = {
            name: _outcome(swarm, budgets[name], num_samples) for name, swarm in trainings.items()
        }
    wall_s, cpu_s = time.monotonic() - began_s, _children_cpu_s() - cpu_s
    fits, tenth = outcomes.values()
    return {
        "mbps": options.mbps,
        "samples": num_samples,
        "set_bytes": set_bytes,
        "cpus_used": cpu_s / wall_s,
        "cpus": os.cpu_count(),
        "speed of a tenth / of all": tenth.samples_per_s / fits.samples_per_s,
        **{name: asdict(outcome) for name, outcome in outcomes.items()},
    }


def _num_samples(model_dir: str, text: Path) -> int:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model_dir)(text.read_text(encoding="utf-8"))
    return len(tokens["input_ids"]) // SEQ_LENGTH


@contextmanager
def _training(
    lab: Lab, folder: Path, options: argparse.Namespace, budget: int, model_dir: str
) -> Iterator[LabSwarm]:
    """Start a swarm whose client trains; it ends with the context."""
    link = Link(up_mbps=options.mbps, down_mbps=options.mbps)
    with LabSwarm(folder, lab.host()) as swarm:
        for number in range(NUM_LAYERS):
            place = ("--buffer-dir", str(folder / f"buffers-{number}"))
            limits = ("--buffer-memory", f"{budget}B", "--buffer-disk", "50GiB")
            layers = f"{number}-{number + 1}"
            swarm.peer(f"peer-{number}", lab.host(link), layers, *place, *limits)
        job = (
            "client",
            "train",
            "--model",
            model_dir,
            "--dataset",
            str(folder.parent / "train.txt"),
        )
        shape = ("--seq-length", str(SEQ_LENGTH), "--batch-size", "16", "--micro-batch-size", "1")
        codecs = ("--fw", "aq4", "--bw", "q8", "--buffer-bits", str(options.buffer_bits))
        rest = ("--epochs", str(options.epochs), "--lr", "1e-3", "--out", str(folder / "out"))
        report = ("--json", str(folder / "report.json"))
        command = (*job, *shape, *codecs, *rest, *report, *swarm.client_way)
        swarm.begin("client", swarm.hub, command)
        yield swarm


def _outcome(swarm: LabSwarm, memory_bytes: int, num_samples: int) -> Outcome:
    if swarm.processes["client"].wait():
        raise RuntimeError(f"the client failed; see {swarm.folder / 'client.log'}")
    found = swarm.start("status", swarm.hub, ("status", *swarm.client_way, "--json"))
    swarm.kill("coordinator")  # it has the journal to itself
    report = json.loads((swarm.folder / "report.json").read_text(encoding="utf-8"))
    seconds = _step_seconds(swarm.folder / "coordinator.db")
    epochs = report["samples"] // num_samples
    later = seconds[len(seconds) // epochs :]
    return Outcome(
        memory_bytes=memory_bytes,
        step_s=statistics.median(later),
        samples_per_s=num_samples * (epochs - 1) / sum(later),
        loss=report["losses"][-1],
        buffers=found["runs"][0]["boundaries"][0],
    )


def _step_seconds(journal: Path) -> list[float]:
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as db:
        return [s for (s,) in db.execute("SELECT seconds FROM commits ORDER BY step")]


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
