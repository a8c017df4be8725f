"""`python -m benchmarks.quality.errors`: what quantisers lose of real tensors and of known ones.

Relative errors at 2, 3 and 4 bits, of activations, of their changes over an epoch and of gradients
at the cuts of the study's model, and of Gaussian, Laplacian and Student-t(3) values.
"""

from __future__ import annotations

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.boundary import AnyCodec
from benchmarks.quality.former import parse_former
from benchmarks.quality.models import CutModel, Regime, steps
from benchmarks.quality.published import parse_published
from benchmarks.quality.train import RATES, Task, deterministic, read_task
from tests.codecs import parse

WIDTHS = (2, 3, 4)
FAMILIES = ("pubq{}", "q{}c", "q{}t", "q{}tc", "hq{}", "q{}c+z", "q{}t+z", "q{}f+z", "hq{}+z")
SYNTHETIC_SHAPE = (1024, 512)
EPOCHS, PROBES = 3, 8


class Recorder:
    """Stands where a model's cuts would be, and keeps what goes through."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def begin(self, mode: str, ids: Tensor, lengths: Tensor) -> None:
        """Ignore the batch; all tensors are recorded."""

    def cut(self, index: int, x: Tensor) -> Tensor:
        """`x` as it is."""
        x.retain_grad()
        self.kept[index] = x
        return x


def real_tensors(task: Task) -> dict[str, list[Tensor]]:
    """Activations, changes and gradients of a few samples, after epochs of fine-tuning."""
    model, records = task.model(0), []
    batches = steps(model, task.train, task.regime.batch, EPOCHS, RATES[task.name], 0)
    for epoch, group in _last_of_each(batches):
        records.append(_probe(model, task))
        sys.stderr.write(f"epoch {epoch + 1}: loss {group:.3f}\n")
    found: dict[str, list[Tensor]] = {"activations": [], "changes": [], "gradients": []}
    for before, after in pairwise(records):
        for index, (x, gradient) in after.items():
            found["activations"] += list(x)
            found["changes"] += list(x - before[index][0])
            found["gradients"] += list(gradient)
    return found


def synthetic_tensors() -> dict[str, list[Tensor]]:
    """One tensor of each distribution."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(SYNTHETIC_SHAPE, generator=generator)
    signs = torch.randn(SYNTHETIC_SHAPE, generator=generator).sign()
    uniform = torch.rand(SYNTHETIC_SHAPE, generator=generator).clamp(min=1e-7)
    chi = torch.randn((3, *SYNTHETIC_SHAPE), generator=generator).square().sum(0)
    student = torch.randn(SYNTHETIC_SHAPE, generator=generator) / (chi / 3).sqrt()
    return {"Gaussian": [normal], "Laplacian": [-signs * uniform.log()], "Student-t(3)": [student]}


def _last_of_each(batches: Any) -> Any:  # noqa: ANN401
    """(epoch, loss) of each epoch's last batch, while the model is as that batch left it."""
    last = None
    for epoch, loss in batches:
        if last is not None and epoch != last[0]:
            yield last
        last = epoch, loss.item()
    if last is not None:
        yield last


def _probe(model: CutModel, task: Task) -> dict[int, tuple[Tensor, Tensor]]:
    recorder = Recorder()
    kept, model.cuts = model.cuts, recorder  # type: ignore[assignment]
    loss, _ = model.loss(task.train.batch(torch.arange(PROBES)))
    loss.backward()
    model.zero_grad()
    model.cuts = kept
    return {
        index: (x.detach().clone(), PROBES * x.grad)
        for index, x in recorder.kept.items()
        if x.grad is not None
    }


def _error_and_bits(name: str, tensors: list[Tensor]) -> tuple[float, float]:
    """Mean relative error, and mean bits a value with all headers."""
    codec: AnyCodec = parse_published(name) or parse_former(name) or parse(name)
    errors, bits = [], []
    for x in tensors:
        encoded = codec.encode(x.contiguous())
        errors.append(((codec.decode(encoded) - x).norm() / x.norm()).item())
        bits.append(8 * len(encoded.to_bytes()) / x.numel())
    return sum(errors) / len(errors), sum(bits) / len(bits)


def _print(kind: str, tensors: list[Tensor]) -> None:
    shape = " x ".join(str(n) for n in tensors[0].shape)
    sys.stdout.write(
        f"\n{kind}, {shape}\n\n| codec | 2 bits | 3 bits | 4 bits |\n|---|---|---|---|\n"
    )
    for family in FAMILIES:
        cells = [_error_and_bits(family.format(bits), tensors) for bits in WIDTHS]
        row = " | ".join(f"{error:.4f} ({bits:.2f})" for error, bits in cells)
        sys.stdout.write(f"| `{family.format('B')}` | {row} |\n")


def main() -> None:
    """Print a table for each kind of tensor: relative error (bits a value)."""
    parser = argparse.ArgumentParser("python -m benchmarks.quality.errors", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--cache", type=Path, default=Path("build/quality"))
    options = parser.parse_args()
    deterministic()
    for kind, tensors in synthetic_tensors().items():
        _print(kind, tensors)
    task = read_task("lm", Regime(), options.data, options.cache)
    for kind, tensors in real_tensors(task).items():
        _print(kind, tensors)


if __name__ == "__main__":
    main()
