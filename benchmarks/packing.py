"""Tokens a second of short chats, packed beside one chat a sample, by peers of this machine.

    python -m benchmarks.packing [--chats 600] [--json FILE]

Both ways train the same chats for two epochs, with real processes: a coordinator, two peers of one
thread each that share a GPT-2 of four blocks, and a client that reads a file of messages. A step
has about as many tokens in both ways. Of the ways to put chats without packing into microbatches
all of `--alone` are measured, since padding grows with their size and overhead shrinks. All runs of
one turn follow each other; the ratio is taken within a turn.

The second epoch's frames are deltas if the buffers of their samples are found: the hit rate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from transformers import AutoTokenizer

from benchmarks.lab import THIS_MACHINE, LabSwarm
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.options import ReadOptions
from swarm_ft.protocol.spec.sample_rows import counts_of

LAYERS = ("0-2", "2-4")
HIDDEN_SIZE, SEQ_LENGTH, EPOCHS = 256, 256, 2
STEP_TOKENS = 2048
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}\n{% endfor %}"
    "{{ eos_token }}"
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One run over all chats.

    Attributes:
        packing: whether chats share samples.
        micro_batch_size: samples of a microbatch.
        num_samples: of an epoch.
        num_tokens: of an epoch.
        longest: tokens of the longest sample.
        seconds: of all steps.
        tokens_per_s: of all epochs.
        tokens_per_cpu_s: so too of both peers' processor time, which other load changes less.
        hit_rate: share of the second epoch's frames whose buffers were there.
        losses: of the first and the last step.
    """

    packing: bool
    micro_batch_size: int
    num_samples: int
    num_tokens: int
    longest: int
    seconds: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    hit_rate: float
    losses: tuple[float, float]


def main() -> None:
    """Measure both ways in turn, and print a line of each run."""
    options = _parser().parse_args()
    alone = [int(size) for size in options.alone.split(",")]
    turns = []
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory(prefix="packing-") as name:
            turns.append(_turn(Path(name), options, alone))
        best = max((one for one in turns[-1] if not one.packing), key=lambda one: one.tokens_per_s)
        packed = turns[-1][0]
        ratio = packed.tokens_per_s / best.tokens_per_s
        of_cpu = packed.tokens_per_cpu_s / best.tokens_per_cpu_s
        sys.stdout.write(
            f"packed: {ratio:.2f} times the tokens/s of the fastest way without, "
            f"{of_cpu:.2f} times its tokens a CPU second\n"
        )
    if options.json:
        rows = [[asdict(one) for one in turn] for turn in turns]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chats", type=int, default=600)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--alone", default="4,8,16", help="chats of a microbatch, with commas")
    parser.add_argument("--packs", type=int, default=2, help="packed samples of a microbatch")
    parser.add_argument("--json", type=Path, help="write the result there too")
    return parser


def _turn(folder: Path, options: argparse.Namespace, alone: Sequence[int]) -> list[Way]:
    sample = write_demo_input(folder / "sample", seed=1, hidden_size=HIDDEN_SIZE, num_layers=4)
    (Path(sample.model_dir) / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    chats = folder / "chats.jsonl"
    text = Path(sample.train_file).read_text(encoding="utf-8")
    chats.write_text(_chats(text, options.chats), encoding="utf-8")
    ways = []
    for packing, size in [(True, options.packs), *((False, size) for size in alone)]:
        place = folder / f"{packing}-{size}"
        with LabSwarm(place / "swarm", THIS_MACHINE) as swarm:
            for number, layers in enumerate(LAYERS):
                swarm.peer(f"peer-{number}", THIS_MACHINE, layers, "--models", str(folder))
            ways.append(_run(swarm, sample.model_dir, chats, place, packing=packing, size=size))
        sys.stdout.write(f"{_line(ways[-1])}\n")
        sys.stdout.flush()
    return ways


def _chats(text: str, count: int) -> str:
    """Messages with words of a text, most of them a few lines long, some much longer."""
    draw, words = random.Random(1), text.split()

    def some() -> str:
        start = draw.randrange(len(words) - 60)
        return " ".join(words[start : start + max(1, min(60, int(draw.lognormvariate(1.5, 0.8))))])

    rows = []
    for _ in range(count):
        roles = ["user", "assistant"] * draw.choice((1, 1, 1, 2))
        messages = [{"role": role, "content": some()} for role in roles]
        rows.append(json.dumps({"messages": messages}))
    return "\n".join(rows) + "\n"


def _run(
    swarm: LabSwarm, model: str, chats: Path, folder: Path, *, packing: bool, size: int
) -> Way:
    read = ReadOptions(packing=packing)
    data = open_dataset(str(chats), DataSelection(), read, AutoTokenizer.from_pretrained(model))
    counts = counts_of(data.samples(SEQ_LENGTH, 1 << 20).tokens)
    num_tokens, num_samples = sum(counts.lengths), len(counts.lengths)
    batch_size = max(size, round(STEP_TOKENS / mean(counts.lengths) / size) * size)
    job = [
        *("--model", model, "--dataset", str(chats), "--seq-length", str(SEQ_LENGTH)),
        *("--batch-size", str(batch_size), "--micro-batch-size", str(size)),
        *("--epochs", str(EPOCHS), "--eval-strategy", "no"),
        *(["--packing"] if packing else []),
    ]
    before_s = _cpu_s(swarm)
    report = swarm.trained(folder, job)
    cpu_s = _cpu_s(swarm) - before_s
    frames = sum(one["key_frames"] + one["delta_frames"] for one in report["bytes"].values())
    key_frames = sum(one["key_frames"] for one in report["bytes"].values())
    return Way(
        packing=packing,
        micro_batch_size=size,
        num_samples=num_samples,
        num_tokens=num_tokens,
        longest=max(counts.lengths),
        seconds=report["seconds"],
        tokens_per_s=EPOCHS * num_tokens / report["seconds"],
        tokens_per_cpu_s=EPOCHS * num_tokens / cpu_s,
        hit_rate=2 - 2 * key_frames / frames,
        losses=(report["losses"][0], report["losses"][-1]),
    )


def _cpu_s(swarm: LabSwarm) -> float:
    """Processor seconds that all peers took so far, loading and exporting among them."""
    ticks = 0
    for name, process in swarm.processes.items():
        if name.startswith("peer-"):
            words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _line(way: Way) -> str:
    name = "packed" if way.packing else "a chat each"
    return (
        f"{name:11}  microbatch {way.micro_batch_size:2d}  {way.num_samples:4d} samples  "
        f"{way.num_tokens:6d} tokens  {way.tokens_per_s:7.0f} tokens/s  "
        f"{way.tokens_per_cpu_s:7.0f} a CPU second  buffers found {way.hit_rate:.0%}"
    )


if __name__ == "__main__":
    main()
