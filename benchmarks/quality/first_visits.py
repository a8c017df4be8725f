"""`python -m benchmarks.quality.first_visits`: what can be known of a sample that was never seen.

Activations and gradients are those of an uncompressed run of one epoch. What is known at a step is
learned from the steps before alone. Of activations: how much of the energy around what a sample's
tokens have in common is left beside a prediction, and the bits a value that `qkS` takes for it. Of
gradients: how much is left of a token's along the best direction; then what codecs lose, with the
codebooks that they learn, and the bits, these counted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.quality.boundary import Channel, Cuts, channel_of
from benchmarks.quality.configs import parse_config
from benchmarks.quality.models import regime_of, steps
from benchmarks.quality.train import RATES, Task, deterministic, read_task
from swarm_ft.codec.basis import learn_basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.spec import Direction, parse_codec_spec

CODECS = "q1+z,q0.85+z+book,q1+z+book,q1.25+z,q1.25+z+book,q1.5+z"
ENTRIES = (64, 256, 1024)
_FADES = 0.8
"""What a step leaves of the weight of those before: activations move while a model learns."""
_RIDGE = 0.003
_WINDOW, _ROUNDS = 8, 12
"""Steps that a codebook is learned of, and rounds of k-means."""
_SETTLED = 8
"""From this step on: what is known of tokens that came seldom is little before."""
Predictions = Callable[[Tensor], Iterator[Tensor]]
"""Of a run's rows, [steps, rows, channels], what is predicted of each step's: [rows, channels]."""


@dataclass(slots=True)
class Recorded:
    """A run's tokens, [steps, samples, tokens], and each boundary's activations and gradients."""

    ids: Tensor
    tokens: Tensor
    forward: list[Tensor]
    backward: list[Tensor]
    embeddings: Tensor


class Recorder(Cuts):
    """Cuts that lose nothing and keep everything."""

    def __init__(self, count: int) -> None:
        super().__init__(parse_config("none"), count)
        self.seen: list[Tensor] = []
        self.kept: dict[int, list[Tensor]] = {}

    def begin(self, mode: str, ids: Tensor, lengths: Tensor) -> None:
        """Begin as `Cuts.begin` does, and record the ids."""
        super().begin(mode, ids, lengths)
        self.seen += [ids] if mode == "train" else []

    def through(self, channel: Channel, x: Tensor, scale: float = 1.0) -> Tensor:
        """Record the tensor and pass it on unchanged."""
        self.kept.setdefault(id(channel), []).append(x.detach() * scale)
        return x


def recorded(task: Task) -> Recorded:
    """Train an epoch of the task and record the tensors at its cuts."""
    model, regime = task.model(0), task.regime
    model.cuts = recorder = Recorder(len(regime.cuts))
    embeddings = model.body.get_input_embeddings().weight.detach().clone()
    for _ in steps(model, task.train, regime.batch, 1, RATES[task.name], 0):
        pass
    ids = torch.stack(recorder.seen)
    ways = [(each.forward, each.backward) for each in recorder.boundaries]
    forward, backward = (
        [torch.stack(recorder.kept[id(way)]) for way in each] for each in zip(*ways, strict=True)
    )
    return Recorded(ids, task.train.tokens[ids], forward, backward, embeddings)


# ---- predictions, of the steps before alone


def nothing(rows: Tensor) -> Iterator[Tensor]:
    """Zeros."""
    yield from torch.zeros_like(rows)


def by_key(keys: Tensor, count: int) -> Predictions:
    """Predict the mean of earlier rows with the same key below `count`, [steps, rows]."""

    def predicted(rows: Tensor) -> Iterator[Tensor]:
        sums, weights = torch.zeros(count, rows.shape[2]), torch.zeros(count, 1)
        for key, now in zip(keys, rows, strict=True):
            mean = sums.sum(0) / weights.sum().clamp(min=1e-9)
            yield ((sums + mean) / (weights + 1))[key]
            sums, weights = sums * _FADES, weights * _FADES
            sums.index_add_(0, key, now)
            weights.index_add_(0, key, torch.ones(len(key), 1))

    return predicted


def by_map(features: Tensor) -> Predictions:
    """Predict by ridge regression on features, [steps, rows, features], and a constant."""

    def predicted(rows: Tensor) -> Iterator[Tensor]:
        ones = torch.full((*features.shape[:2], 1), float(features.std()))
        known = torch.cat((features, ones), 2).double()
        size = known.shape[2]
        xx, xy = torch.zeros(size, size).double(), torch.zeros(size, rows.shape[2]).double()
        for x, now in zip(known, rows, strict=True):
            spread = _RIDGE * xx.trace() / size + 1e-30
            yield (x @ torch.linalg.solve(xx + spread * torch.eye(size), xy)).float()
            xx, xy = _FADES * xx + x.T @ x, _FADES * xy + x.T @ now.double()

    return predicted


def by_codebook(entries: int, *, directions: bool = False) -> Predictions:
    """Predict the nearest of `entries` centroids of earlier rows, made anew as bases are."""

    def predicted(rows: Tensor) -> Iterator[Tensor]:
        book = torch.zeros(1, rows.shape[2])
        for step, now in enumerate(rows):
            if is_due(step):
                book = k_means(rows[max(0, step - _WINDOW) : step].flatten(0, 1), entries)
            yield book[nearest(functional.normalize(now) if directions else now, book)]

    return lambda rows: predicted(functional.normalize(rows, dim=2) if directions else rows)


def is_due(step: int) -> bool:
    """Whether bases are made anew before it."""
    return step in (1, 2, 4, 8) or (step > 0 and step % _WINDOW == 0)


def k_means(rows: Tensor, count: int) -> Tensor:
    """Centroids, [count, channels], or half as many as there are rows."""
    count = min(count, len(rows) // 2)
    found = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]]
    for _ in range(_ROUNDS):
        where = nearest(rows, found)
        weights = torch.bincount(where, minlength=count)[:, None]
        sums = torch.zeros_like(found).index_add_(0, where, rows)
        found = torch.where(weights > 0, sums / weights.clamp(min=1), found)
    return found


def nearest(rows: Tensor, entries: Tensor) -> Tensor:
    """Return the index of the nearest entry for each row."""
    return (entries.square().sum(1) - 2 * rows @ entries.T).argmin(1)


# ---- activations


def bits_of(x: Tensor, predicted: Tensor, size: float) -> tuple[float, float]:
    """Bits a value of `qk` of that size beside predictions of x, bases apart; and those of bases.

    Args:
        x, predicted: [steps, samples, tokens, channels].
        size: of a step, times the spread of the activation itself.
    """
    alone, along_codebook = (
        DirectionalCodec(parse_codec_spec(f"{name}{size:g}", Direction.FORWARD))
        for name in ("qk", "aqk")
    )
    basis, bits, basis_bits = None, 0, 0
    for step, (now, prediction) in enumerate(zip(x, predicted, strict=True)):
        if is_due(step):
            size = statistics.fmean(alone.step_of(sample) for sample in x[step - 1])
            left = (x[step - 1] - predicted[step - 1]) if step > 1 else x[0]
            basis = learn_basis(list(left), size, has_mean=True)
            basis_bits += 8 * len(basis.data) if basis else 0
        for sample, base in zip(now, prediction, strict=True):
            if basis is None:
                encoded = alone.encode(sample)
            else:
                encoded = along_codebook.with_side_info(basis).encode(sample, base)
            bits += 8 * len(encoded.to_bytes())
    return bits / x.numel(), basis_bits / x.numel()


def share_left(x: Tensor, predicted: Tensor) -> float:
    """Return the share of energy around the tokens' mean that is left, in settled steps."""
    left, all_ = ((each - each.mean(2, keepdim=True))[_SETTLED:] for each in (x - predicted, x))
    return float(left.square().sum() / all_.square().sum())


def print_activations(run: Recorded, size: float) -> None:
    """Print a table for each boundary."""
    ids = run.tokens.flatten(1)
    positions = torch.arange(run.tokens.shape[2]).repeat(run.tokens.shape[1]).expand_as(ids)
    vocabulary = len(run.embeddings)
    ways: dict[str, tuple[Predictions, float]] = {
        "nothing": (nothing, 0.0),
        "mean of the position": (by_key(positions, run.tokens.shape[2]), 0.0),
        "mean of the token": (by_key(ids, vocabulary), math.log2(vocabulary)),
        "map of the token's embedding": (by_map(run.embeddings[ids]), math.log2(vocabulary)),
    }
    ways |= {f"{count} centroids": (by_codebook(count), math.log2(count)) for count in ENTRIES}
    for index, x in enumerate(run.forward):
        _print_line(
            f"\nactivations, boundary {index}: left, bits of `qk{size:g}`, of names, of bases\n"
        )
        for name, (way, name_bits) in ways.items():
            predicted = torch.stack(list(way(x.flatten(1, 2)))).view_as(x)
            bits, basis_bits = bits_of(x, predicted, size)
            _row(name, share_left(x, predicted), bits, name_bits / x.shape[3], basis_bits)


# ---- gradients


def left_along(gradients: Tensor, predicted: Tensor) -> float:
    """Return the share of energy beside the best multiple of a direction, in settled steps."""
    along = (gradients * functional.normalize(predicted, dim=2)).sum(2).square()
    energy = gradients.square().sum(2)
    return float((energy - along)[_SETTLED:].sum() / energy[_SETTLED:].sum())


def lost(codec: str, ids: Tensor, gradients: Tensor) -> tuple[float, float]:
    """Bits a value, codebooks counted, and squared error over squared gradient."""
    channel, error = channel_of(codec, "", Direction.BACKWARD), 0.0
    for samples, now in zip(ids.tolist(), gradients, strict=True):
        channel.learner.begin()
        for sample, x in zip(samples, now, strict=True):
            error += float((channel.send(sample, x.contiguous()) - x).square().sum())
    return channel.tally.rate, error / float(gradients.square().sum())


def print_gradients(run: Recorded, codecs: list[str]) -> None:
    """Two tables for each boundary."""
    ids = run.tokens.flatten(1)
    targets = functional.pad(run.tokens[:, :, 1:], (0, 1)).flatten(1)
    vocabulary = len(run.embeddings)
    for index, (activations, x) in enumerate(zip(run.forward, run.backward, strict=True)):
        rows = x.flatten(1, 2)
        ways: dict[str, Predictions] = {
            "mean of all": by_key(torch.zeros_like(ids), 1),
            "mean of the token": by_key(ids, vocabulary),
            "mean of the target": by_key(targets, vocabulary),
            "map of the activation": by_map(activations.flatten(1, 2)),
            "map of the target's embedding": by_map(run.embeddings[targets]),
        }
        ways |= {f"{n} directions": by_codebook(n, directions=True) for n in ENTRIES}
        _print_line(f"\ngradients, boundary {index}: left along the best multiple\n")
        for name, way in ways.items():
            predicted = torch.stack(list(way(functional.normalize(rows, dim=2))))
            _row(name, left_along(rows, predicted))
        _print_line(f"\ngradients, boundary {index}: bits, squared error\n")
        for codec in codecs:
            _row(f"`{codec}`", *lost(codec, run.ids, x))


def _row(name: str, *numbers: float) -> None:
    _print_line(f"| {name} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.first_visits", description=__doc__
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("build/quality"))
    parser.add_argument("--codecs", default=CODECS, help="of gradients")
    parser.add_argument("--size", type=float, default=0.35, help="S of qkS")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER")
    options = parser.parse_args()
    deterministic()
    task = read_task("lm", regime_of(options.set), options.data, options.cache)
    run = recorded(task)
    print_activations(run, options.size)
    print_gradients(run, options.codecs.split(","))


if __name__ == "__main__":
    main()
