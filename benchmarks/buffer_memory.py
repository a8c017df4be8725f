"""A peer's peak memory as samples grow and memory for buffers stays the same.

    python -m benchmarks.buffer_memory --dataset wikitext2-valid.txt --json FILE --plot FILE.png

Trains a small model with a swarm of real processes on this machine until some steps into the second
epoch, for each number of samples anew, and reads the peers' peak of resident memory (VmHWM) from
/proc.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import THIS_MACHINE, LabSwarm
from swarm_ft.client.demo_input import write_demo_input

NUM_LAYERS, HIDDEN_SIZE, SEQ_LENGTH = 2, 64, 32
BATCH_SIZE, MORE_STEPS = 64, 4
POLL_S = 10.0
RECORD_BYTES = 2 * SEQ_LENGTH * HIDDEN_SIZE + 2
_PEAK = re.compile(r"VmHWM:\s+(\d+) kB")


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    counts = [int(count) for count in options.samples.split(",")]
    rows = []
    for count in counts:
        rows.append(_row(count, options))
        sys.stdout.write(f"{json.dumps(rows[-1])}\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        _draw(rows, options.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dataset", type=Path, required=True, help="UTF-8 text, used over again")
    parser.add_argument("--samples", default="1000,10000,100000", help="numbers, with commas")
    parser.add_argument("--memory-mib", type=int, default=32, help="for a peer's buffers")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    return parser


def _row(num_samples: int, options: argparse.Namespace) -> dict[str, object]:
    folder = Path(tempfile.mkdtemp(prefix="buffer-memory-"))
    try:
        return _measured(num_samples, options, folder)
    finally:
        shutil.rmtree(folder)


def _measured(num_samples: int, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    sample = write_demo_input(
        folder / "input", seed=0, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE
    )
    text = _text_of(options.dataset, num_samples, sample.model_dir, folder)
    with LabSwarm(folder / "swarm", THIS_MACHINE) as swarm:
        limits = ("--buffer-memory", f"{options.memory_mib}MiB", "--buffer-disk", "50GiB")
        names = [f"peer-{number}" for number in range(NUM_LAYERS)]
        for number, name in enumerate(names):
            place = ("--buffer-dir", str(folder / name))
            swarm.peer(name, THIS_MACHINE, f"{number}-{number + 1}", *place, *limits)
        idle = [_peak_bytes(swarm, name) for name in names]
        _train(swarm, sample.model_dir, text, folder, steps=num_samples // BATCH_SIZE + MORE_STEPS)
        return {
            "samples": num_samples,
            "buffers_bytes": num_samples * RECORD_BYTES,
            "budget_bytes": options.memory_mib << 20,
            "idle_bytes": idle,
            "peak_bytes": [_peak_bytes(swarm, name) for name in names],
        }


def _train(swarm: LabSwarm, model_dir: str, text: Path, folder: Path, *, steps: int) -> None:
    """Train until so many steps are committed, and leave the run as it is."""
    job = ("client", "train", "--model", model_dir, "--dataset", str(text))
    shape = ("--seq-length", str(SEQ_LENGTH), "--batch-size", str(BATCH_SIZE))
    # Codecs that cost little: what is kept of a sample is the same with all.
    codecs = ("--micro-batch-size", "16", "--fw", "aq8t", "--bw", "none")
    rest = (*codecs, "--epochs", "2", "--out", str(folder / "out"))
    client = swarm.begin("client", THIS_MACHINE, (*job, *shape, *rest, *swarm.client_way))
    while swarm.num_steps() < steps:
        if client.poll():
            raise RuntimeError((swarm.folder / "client.log").read_text(encoding="utf-8"))
        time.sleep(POLL_S)


def _text_of(dataset: Path, num_samples: int, model_dir: str, folder: Path) -> Path:
    """Repeat the text until it makes about so many samples."""
    from transformers import AutoTokenizer

    text, tokenizer = dataset.read_text(encoding="utf-8"), AutoTokenizer.from_pretrained(model_dir)
    tokens = len(tokenizer(text)["input_ids"])
    chars = int(len(text) * num_samples * SEQ_LENGTH / tokens * 1.01)
    path = folder / "train.txt"
    path.write_text((text * (chars // len(text) + 1))[:chars], encoding="utf-8")
    return path


def _peak_bytes(swarm: LabSwarm, name: str) -> int:
    status = Path(f"/proc/{swarm.processes[name].pid}/status").read_text(encoding="utf-8")
    match = _PEAK.search(status)
    if match is None:
        raise RuntimeError(f"{name}: no VmHWM in its status")
    return int(match[1]) << 10


def _draw(rows: Sequence[dict[str, object]], path: Path) -> None:
    import matplotlib.pyplot as plt

    counts = [row["samples"] for row in rows]
    figure, axes = plt.subplots(figsize=(6, 4))
    for number in range(NUM_LAYERS):
        peaks = [row["peak_bytes"][number] / 2**20 for row in rows]  # type: ignore[index]
        axes.plot(counts, peaks, marker="o", label=f"stage {number}: peak of resident memory")
    mib = [row["buffers_bytes"] / 2**20 for row in rows]  # type: ignore[operator]
    axes.plot(counts, mib, marker="x", linestyle="--", label="all buffers of a stage")
    axes.set(xscale="log", xlabel="samples", ylabel="MiB", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
