"""`python -m benchmarks.quality.small_changes`: what a sample costs that hardly moved.

The study's model trains through `aqkS` for some epochs. Then a few samples' changes since their
last visit are made smaller, and each is encoded as the next frame would be, along the basis that
there is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.quality.boundary import Channel, Cuts
from benchmarks.quality.configs import parse_config
from benchmarks.quality.errors import Recorder
from benchmarks.quality.models import CutModel, regime_of, steps
from benchmarks.quality.table import row
from benchmarks.quality.train import RATES, Task, deterministic, read_task
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.ids import BlockIndex
from swarm_ft.peer.boundary.side_info import SideInfoKey, TensorKind

SAMPLES = 8
SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01, 0.0)


class Cost(NamedTuple):
    """The cost of a sample.

    Attributes:
        change: root mean square, of that of the values.
        steps: the same, in steps of the codec.
        frame_bytes: all of the frame.
        bits: a value.
    """

    change: float
    steps: float
    frame_bytes: float
    bits: float


def main() -> None:
    """Print a table for each boundary."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.small_changes", description=__doc__
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("build/quality"))
    parser.add_argument("--config", default="aqk0.3/none@qk0.3:3")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER")
    options = parser.parse_args()
    deterministic()
    task = read_task("lm", regime_of(options.set), options.data, options.cache)
    for index, pairs in enumerate(visits(task, options.config)):
        sys.stdout.write(f"\nboundary {index}\n\n")
        row(["share of the change", "change, %", "change, steps", "bytes", "bits a value"], True)
        for share in SHARES:
            change, step, size, bits = mean_cost(pairs, share)
            row([f"{share:g}", f"{100 * change:.2f}", f"{step:.3f}", f"{size:.0f}", f"{bits:.3f}"])


Visit = tuple[DirectionalCodec, Tensor, Tensor]
"""The codec along its basis, a sample's activation, and what its last visit left there."""


def visits(task: Task, text: str) -> Iterator[list[Visit]]:
    """Train by the config and yield the visits of a few samples, for each boundary."""
    model, config = task.model(0), parse_config(text)
    cuts = model.cuts = Cuts(config, len(task.regime.cuts))
    rate = RATES[task.name]
    for _ in steps(model, task.train, task.regime.batch, config.epochs, rate, 0):
        pass
    for boundary, x in zip(cuts.boundaries, _activations(model, task), strict=True):
        yield [_visit(boundary.forward, sample, x[sample]) for sample in range(SAMPLES)]


def _activations(model: CutModel, task: Task) -> list[Tensor]:
    """Return the first samples' activations by boundary: float32 [samples, tokens, channels]."""
    recorder = Recorder()
    model.cuts = cast(Cuts, recorder)
    model.loss(task.train.batch(torch.arange(SAMPLES)))
    return [x.detach() for _, x in sorted(recorder.kept.items())]


def _visit(channel: Channel, sample: int, x: Tensor) -> Visit:
    codec = cast(DirectionalCodec, channel.codec)
    basis = channel.learner.bases.get(SideInfoKey(BlockIndex(0), TensorKind.CHANGE))
    return codec.with_side_info(basis), x, channel.base_of(sample, x)


def mean_cost(pairs: list[Visit], share: float) -> Cost:
    """Over samples, of that share of each one's change."""
    costs = [_cost(codec, base + share * (x - base), base) for codec, x, base in pairs]
    return Cost(*(statistics.fmean(each) for each in zip(*costs, strict=True)))


def _cost(codec: DirectionalCodec, x: Tensor, base: Tensor) -> Cost:
    change, size = (value.square().mean().sqrt().item() for value in (x - base, x))
    frame_bytes = len(codec.encode(x, base).to_bytes())
    return Cost(change / size, change / codec.step_of(x), frame_bytes, 8 * frame_bytes / x.numel())


if __name__ == "__main__":
    main()
