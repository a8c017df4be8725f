"""The gain of passing frozen stages once: one run by peers that cache their outputs or do not.

    sudo python -m benchmarks.frozen_prefix --up-mbps 25,100

Adapters in the upper half of a model of eight blocks, four stages behind home links, three epochs.
All is real: processes, links of these rates, the model's arithmetic; each peer has a core. Peers
that keep nothing lend their buffers no memory and no disk; no codec may need any, so that the run
is the same to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab import Lab, LabSwarm, Link
from benchmarks.trace_totals import Event, read_events
from swarm_ft.client.demo_input import DemoInput, write_demo_input

LAYERS = ("0-2", "2-4", "4-6", "6-8")
BELOW = ("0-2", "2-4")
TRAINED = "4-"
EPOCHS, SAMPLES, BATCH_SIZE, SEQ_LENGTH = 3, 64, 16, 128
STEPS_PER_EPOCH = SAMPLES // BATCH_SIZE
KEEPS: Mapping[bool, tuple[str, ...]] = {
    True: (),
    False: ("--buffer-memory", "0", "--buffer-disk", "0"),
}


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch of one run.

    Attributes:
        samples_per_s: of its steps.
        forwards: microbatches that frozen stages computed.
        sent_bytes: that they sent.
    """

    samples_per_s: float
    forwards: int
    sent_bytes: int


def main() -> None:
    """Measure one rate after the other, and print a line of each epoch."""
    options = _parser().parse_args()
    sys.stdout.write(
        "up Mbps  epoch  samples/s: all again  kept  ratio  below: forwards  MB sent\n"
    )
    for up_mbps in map(float, options.up_mbps.split(",")):
        again, cached = (_measured(up_mbps, options, keeps=keeps) for keeps in (False, True))
        for number, (without, one) in enumerate(zip(again[1], cached[1], strict=True), start=1):
            speeds = f"{without.samples_per_s:20.2f}  {one.samples_per_s:4.2f}"
            ratio = one.samples_per_s / without.samples_per_s
            work = f"{without.forwards:8d} {one.forwards:4d}"
            sent = f"{without.sent_bytes / 1e6:6.2f} {one.sent_bytes / 1e6:5.2f}"
            sys.stdout.write(f"{up_mbps:7g}  {number:5d}  {speeds}  {ratio:5.2f}  {work}  {sent}\n")
        losses = "equal to the bit" if again[0] == cached[0] else "DIFFERENT"
        whole = _mean(cached[1]) / _mean(again[1])
        sys.stdout.write(f"{up_mbps:7g}    all  {whole:.2f} times as fast; losses {losses}\n")
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--up-mbps", default="25,100", help="of all peers, with commas")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--fw", default="q8")
    parser.add_argument("--bw", default="q8")
    return parser


def _mean(epochs: Iterable[Epoch]) -> float:
    """Return the mean samples a second of epochs that have equally many samples."""
    found = [1 / epoch.samples_per_s for epoch in epochs]
    return len(found) / sum(found)


def _measured(
    up_mbps: float, options: argparse.Namespace, *, keeps: bool
) -> tuple[list[float], list[Epoch]]:
    """Train in a lab and return the run's losses and epochs."""
    with tempfile.TemporaryDirectory(prefix="frozen-") as name, Lab() as lab:
        folder = Path(name)
        sample = write_demo_input(
            folder / "sample", seed=1, hidden_size=options.hidden_size, num_layers=8
        )
        with LabSwarm(folder / "swarm", lab.host()) as swarm:
            for number, layers in enumerate(LAYERS):
                home = lab.host(Link(up_mbps, 4 * up_mbps, delay_ms=20.0))
                swarm.peer(f"peer-{number}", home, layers, *KEEPS[keeps])
            return _trained(swarm, sample, folder, options)


def _trained(
    swarm: LabSwarm, sample: DemoInput, folder: Path, options: argparse.Namespace
) -> tuple[list[float], list[Epoch]]:
    trace = folder / "trace.json"
    job = [
        *("--model", sample.model_dir, "--dataset", sample.train_file),
        *("--max-samples", str(SAMPLES), "--seq-length", str(SEQ_LENGTH)),
        *("--batch-size", str(BATCH_SIZE), "--epochs", str(EPOCHS)),
        *("--adapter", "lora", "--train-layers", TRAINED, "--eval-strategy", "no"),
        *("--fw", options.fw, "--bw", options.bw, "--trace", str(trace)),
    ]
    report = swarm.trained(folder, job)
    events = read_events(trace)
    return report["losses"], [_epoch(events, number) for number in range(EPOCHS)]


def _epoch(events: Iterable[Event], number: int) -> Epoch:
    """Measure an epoch from the events of a trace."""
    events = list(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    below = {pid for pid, name in names.items() if any(layers in name for layers in BELOW)}
    steps = range(number * STEPS_PER_EPOCH, (number + 1) * STEPS_PER_EPOCH)
    own = [e for e in events if e["ph"] == "X" and e["args"]["step"] in steps]
    spent_us = [
        sum(e["dur"] for e in own if e["name"] == "step" and e["pid"] == pid) for pid in names
    ]
    of_frozen = [e for e in own if e["pid"] in below]
    return Epoch(
        samples_per_s=SAMPLES / (max(spent_us) / 1e6),
        forwards=sum(e["name"] == "forward" for e in of_frozen),
        sent_bytes=sum(e["args"]["bytes"] for e in of_frozen if e["name"] == "send"),
    )


if __name__ == "__main__":
    main()
