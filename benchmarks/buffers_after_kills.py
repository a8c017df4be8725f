"""Kills all peers after each epoch, with SIGKILL, and counts what their buffers are still good for.

    python -m benchmarks.buffers_after_kills --dataset wikitext2-valid.txt --json FILE

A swarm of real processes on this machine trains a small model and saves a snapshot an epoch, which
leaves the buffers on the peers' disks, as they are too many. Some steps into the next epoch both
peers are killed and started again: the run goes back to the snapshot, buffers go on as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lab import THIS_MACHINE, LabSwarm
from swarm_ft.client.demo_input import write_demo_input

NUM_LAYERS, HIDDEN_SIZE, SEQ_LENGTH, BATCH_SIZE = 2, 128, 256, 16
RECORD_BYTES = 2 * SEQ_LENGTH * HIDDEN_SIZE + 2
STEPS_BEFORE_KILL = 3
POLL_S = 0.2


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="buffers-after-kills-"))
    try:
        document = _measured(options, folder)
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
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--chars", type=int, default=600_000, help="of the text that are used")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--keep", action="store_true", help="the logs, where they are")
    return parser


def _measured(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    sample = write_demo_input(
        folder / "input", seed=0, num_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE
    )
    text = folder / "train.txt"
    text.write_text(options.dataset.read_text(encoding="utf-8")[: options.chars], encoding="utf-8")
    steps_per_epoch = -(-_num_samples(sample.model_dir, text) // BATCH_SIZE)
    with LabSwarm(folder / "swarm", THIS_MACHINE, snapshots=folder / "snapshots") as swarm:
        _start_peers(swarm, folder)
        job = ("client", "train", "--model", sample.model_dir, "--dataset", str(text))
        shape = ("--seq-length", str(SEQ_LENGTH), "--batch-size", str(BATCH_SIZE), "--shuffle")
        codecs = ("--fw", "aq4", "--bw", "q8", "--key", "fp16", "--epochs", str(options.epochs))
        rest = ("--save-steps", str(steps_per_epoch), "--out", str(folder / "out"))
        command = (*job, *shape, *codecs, *rest, *swarm.client_way)
        client = swarm.begin("client", THIS_MACHINE, command)
        kills = []
        for epoch in range(1, options.epochs):
            kills.append(_kill_after(swarm, epoch * steps_per_epoch + STEPS_BEFORE_KILL))
            _start_peers(swarm, folder)
        if client.wait():
            raise RuntimeError(f"the client failed; see {swarm.folder / 'client.log'}")
        swarm.kill("coordinator")  # it has the journal to itself
    frames = _frames(folder / "swarm" / "coordinator.db")
    epochs = [frames[i : i + steps_per_epoch] for i in range(0, len(frames), steps_per_epoch)]
    return {
        "samples": sum(key + delta for key, delta in epochs[0]),
        "buffers_bytes": _num_samples(sample.model_dir, text) * RECORD_BYTES,
        "killed_at_steps": kills,
        "epochs": [
            {"key_frames": sum(k for k, _ in e), "delta_frames": sum(d for _, d in e)}
            for e in epochs
        ],
    }


def _num_samples(model_dir: str, text: Path) -> int:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model_dir)(text.read_text(encoding="utf-8"))
    return len(tokens["input_ids"]) // SEQ_LENGTH


def _start_peers(swarm: LabSwarm, folder: Path) -> None:
    limits = ("--buffer-memory", "8MiB", "--buffer-disk", "50GiB")
    for number in range(NUM_LAYERS):
        place = ("--buffer-dir", str(folder / f"buffers-{number}"))
        swarm.peer(f"peer-{number}", THIS_MACHINE, f"{number}-{number + 1}", *place, *limits)


def _kill_after(swarm: LabSwarm, step: int) -> int:
    """Kill both peers once so many steps are committed; how many are by then."""
    while (done := swarm.num_steps()) < step:
        time.sleep(POLL_S)
    for number in range(NUM_LAYERS):
        swarm.kill(f"peer-{number}")
    return done


def _frames(journal: Path) -> list[tuple[int, int]]:
    """Key and delta frames of each step that counts in the end."""
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT traffic FROM commits ORDER BY step").fetchall()
    steps = [json.loads(text) for (text,) in rows]
    return [
        (sum(t["key_frames"] for t in step), sum(t["delta_frames"] for t in step)) for step in steps
    ]


if __name__ == "__main__":
    main()
