"""`python -m benchmarks.quality.updates`: what `--dp` codecs make of AdamW's steps.

One run trains by exact gradients; beside it, each codec reduces the same two halves of every batch
and steps an optimizer of its own, whose steps go nowhere. A final perplexity differs by chance from
one codec to the next; these errors hardly do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import torch
from torch import Tensor

from benchmarks.quality.models import CutModel, flat_gradients, regime_of
from benchmarks.quality.replicas import Replicas
from benchmarks.quality.train import RATES, Task, deterministic, read_task
from swarm_ft.stage.optimizers import BETAS

_CODECS = "fp16,q8,q4,q4+z"


class Follower:
    """AdamW over one flat tensor, by gradients that a codec went over."""

    def __init__(self, dp: str, count: int) -> None:
        self.replicas = Replicas(dp)
        self.weights = torch.nn.Parameter(torch.zeros(count))
        self._optimizer = torch.optim.AdamW([self.weights], betas=BETAS, weight_decay=0.0)

    @property
    def moved(self) -> Tensor:
        """Sum of all its steps so far, float32 [n]."""
        return self.weights.detach()

    def step(self, halves: list[Tensor], rate: float) -> Tensor:
        """Go on by the sum of the replicas' gradients, clipped at norm 1; the step, [n]."""
        before = self.moved.clone()
        self.weights.grad = self.replicas.reduce(halves).clone()
        torch.nn.utils.clip_grad_norm_([self.weights], 1.0)
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.step()
        return self.moved - before


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.updates", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("build/quality"))
    parser.add_argument("--dps", default=_CODECS, help="codecs, as in --dp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=NUMBER")
    options = parser.parse_args()
    deterministic()
    task = read_task("lm", regime_of(options.set), options.data, options.cache)
    _print(_follow(task, options.dps.split(","), options.epochs, options.seed))


def _follow(task: Task, dps: list[str], epochs: int, seed: int) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each codec."""
    model = task.model(seed)
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    sizes = [parameter.numel() for parameter in parameters]
    followers = {dp: Follower(dp, sum(sizes)) for dp in ("none", *dps)}
    cosines: dict[str, list[float]] = {dp: [] for dp in dps}
    for halves, rate in _gradients(model, task, epochs, seed):
        steps = {dp: follower.step(halves, rate) for dp, follower in followers.items()}
        for dp in dps:
            cosines[dp].append(torch.cosine_similarity(steps[dp], steps["none"], dim=0).item())
        with torch.no_grad():
            parts = steps["none"].split(sizes)
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.add_(part.view_as(parameter))
    exact = followers["none"].moved
    for dp in dps:
        error = (followers[dp].moved - exact).norm() / exact.norm()
        bits = f"{followers[dp].replicas.tally.rate:.2f}"
        yield dp, bits, f"{sum(cosines[dp]) / len(cosines[dp]):.4f}", f"{error.item():.3f}"


def _gradients(
    model: CutModel, task: Task, epochs: int, seed: int
) -> Iterator[tuple[list[Tensor], float]]:
    """Yield the gradients of both halves of each batch and the rate of its step."""
    generator = torch.Generator().manual_seed(seed)
    batch, step = task.regime.batch, 0
    total = epochs * (len(task.train) // batch)
    for _ in range(epochs):
        order = torch.randperm(len(task.train), generator=generator)
        for part in task.train.batches(batch, order):
            _, halves = flat_gradients(model, task.train, part, 2)
            yield halves, RATES[task.name] * (1 - step / total)
            step += 1


def _print(rows: Iterator[tuple[str, ...]]) -> None:
    head = ("`--dp`", "bits", "cosine of a step", "error of all steps together")
    for cells in (head, ("---",) * len(head), *rows):
        sys.stdout.write("| " + " | ".join(cells) + " |\n")


if __name__ == "__main__":
    main()
