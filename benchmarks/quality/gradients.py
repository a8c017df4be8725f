"""`python -m benchmarks.quality.gradients`: what codecs lose of a run's gradients, by visit.

The gradients are those of an uncompressed run of the study's model. Codecs send them as a boundary
would: squared error over squared gradient, for each epoch, and bits a value. Then how much of a
token's gradient is left after the best share of the sample's last one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality.boundary import Channel, Cuts, channel_of
from benchmarks.quality.configs import DEFAULT_EPOCHS, parse_config
from benchmarks.quality.models import regime_of, steps
from benchmarks.quality.train import RATES, Task, deterministic, read_task
from swarm_ft.codec.spec import Direction

CODECS = "q1t+z,q1t+d+z,q1f+d+z,q1.5t+d+z,q2t+d+z,q1t+d+z+ef21@q1t+d+z,q1t+d+z+last@q1t+d+z"
Visit = tuple[int, int, Tensor]
"""A step, a sample, and its gradient: float32 [tokens, channels], of its own mean loss."""


class Recorder(Cuts):
    """Cuts that lose nothing and keep the gradients of the first `samples`, by boundary."""

    def __init__(self, count: int, samples: int) -> None:
        super().__init__(parse_config("none"), count)
        self.kept: list[list[Visit]] = [[] for _ in range(count)]
        self.samples, self.step = samples, 0

    def begin(self, mode: str, ids: Tensor, lengths: Tensor) -> None:
        """Begin as `Cuts.begin` does, and count the step."""
        super().begin(mode, ids, lengths)
        self.step += mode == "train"

    def through(self, channel: Channel, x: Tensor, scale: float = 1.0) -> Tensor:
        """Record the first samples' gradients and pass the tensor on unchanged."""
        for visits, boundary in zip(self.kept, self.boundaries, strict=True):
            if boundary.backward is channel:
                few = (one for one in zip(self.ids, x, strict=True) if one[0] < self.samples)
                visits += [(self.step, sample, row.detach() * scale) for sample, row in few]
        return x


def recorded(task: Task, samples: int) -> list[list[Visit]]:
    """Gradients of each boundary, in the order in which they were sent."""
    model, regime = task.model(0), task.regime
    model.cuts = recorder = Recorder(len(regime.cuts), samples)
    for _ in steps(model, task.train, regime.batch, DEFAULT_EPOCHS, RATES[task.name], 0):
        pass
    return recorder.kept


def lost(codec: str, visits: list[Visit]) -> tuple[float, list[float]]:
    """Bits a value, and what is lost of the gradients' energy at first, second, ... visits."""
    spec, _, key = codec.partition("@")
    channel = channel_of(spec, key, Direction.BACKWARD)
    pairs = ((sample, sent - x, x) for sample, sent, x in _sent(channel, visits))
    shares = [0.0] * DEFAULT_EPOCHS
    totals = [0.0] * DEFAULT_EPOCHS
    for visit, _, error, x in _numbered(pairs):
        shares[visit] += error.double().square().sum().item()
        totals[visit] += x.double().square().sum().item()
    return channel.tally.rate, [part / all_ for part, all_ in zip(shares, totals, strict=True)]


def _sent(channel: Channel, visits: list[Visit]) -> Iterable[tuple[int, Tensor, Tensor]]:
    """Each visit's sample, what came of its gradient, and that; codebooks are learned by step."""
    open_step = 0
    for step, sample, x in visits:
        if step != open_step:
            channel.learner.begin()
        open_step = step
        yield sample, channel.send(sample, x.contiguous()), x


def left_after_last(visits: list[Visit]) -> list[float]:
    """Return the mean share of energy that the last gradient does not explain, by visit."""
    last: dict[int, Tensor] = {}
    sums: list[list[float]] = [[] for _ in range(DEFAULT_EPOCHS)]
    for visit, sample, x, _ in _numbered((sample, x, x) for _, sample, x in visits):
        if visit:
            cosine = torch.cosine_similarity(
                x[:-1], last[sample][:-1]
            )  # the last token has no target
            sums[visit].append((1 - cosine.square()).mean().item())
        last[sample] = x
    return [sum(each) / len(each) for each in sums[1:]]


def _numbered(
    pairs: Iterable[tuple[int, Tensor, Tensor]],
) -> Iterable[tuple[int, int, Tensor, Tensor]]:
    """Yield each pair with the number of the sample's visit in front."""
    seen: dict[int, int] = {}
    for sample, one, other in pairs:
        seen[sample] = seen.get(sample, -1) + 1
        yield seen[sample], sample, one, other


def _row(name: str, numbers: list[float]) -> None:
    sys.stdout.write(f"| {name} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |\n")


def main() -> None:
    """Print a table for each boundary."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.gradients", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("build/quality"))
    parser.add_argument("--codecs", default=CODECS, help="codec[@codec of first gradients],...")
    parser.add_argument(
        "--samples", type=int, default=32, help="whose gradients are kept: all visits of these"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER")
    options = parser.parse_args()
    deterministic()
    task = read_task("lm", regime_of(options.set), options.data, options.cache)
    for index, visits in enumerate(recorded(task, options.samples)):
        sys.stdout.write(f"\nboundary {index}: codec, bits, squared error by visit\n\n")
        for codec in options.codecs.split(","):
            bits, errors = lost(codec, visits)
            _row(f"`{codec}`", [bits, *errors])
        _row("left after the last gradient", left_after_last(visits))


if __name__ == "__main__":
    main()
