"""A model of 300 M weights trained through the default codecs and without, from a common start.

The model learns Python's own source text, some of it first, uncompressed, then other files of it in
stages with and without codecs: all runs by turns, an epoch each, so that what is cut off can still
be compared. Codecs run where the tensors are. Beside them the statistics of an uncompressed run:
how many bits a value of its first activations, its changes and its gradients needs by channel, and
in the basis of their covariance (KLT), for a mean distortion of 1/16: reverse water-filling over a
Gaussian of that covariance.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row
from benchmarks.gpu.stages import device_here
from benchmarks.quality import data
from benchmarks.quality.boundary import Cuts
from benchmarks.quality.configs import parse_config
from benchmarks.quality.models import CutModel, Regime, evaluate, steps

CONFIGS = (
    "none",
    "aq3+z/q3+z@q4+z",  # the default
    "aqk0.6/q1+z+last@qk0.45@q1t+d+z",
    "aq2+z/q2+z@q4+z",
    "aq4~aq2/q8",
)
REHEARSED_CONFIGS = CONFIGS[:3]
DISTORTION = 1 / 16
SEED = 0
BATCH = 8
PART_CHARS = 250_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes and times.

    Attributes:
        text_chars: of the sources that are read; the tokenizer is made of all of them.
        pretrain_s: seconds of learning before the runs part.
        train_samples: that the runs visit, each once an epoch.
    """

    regime: Regime
    text_chars: int
    pretrain_s: float
    pretrain_rate: float
    train_samples: int
    held_out: int
    epochs: int
    rate: float


PLAN = Plan(
    regime=Regime(
        layers=24, width=1024, heads=16, vocabulary=8192, tokens=512, cuts=(6, 12, 18), batch=BATCH
    ),
    text_chars=12_000_000,
    pretrain_s=90.0,
    pretrain_rate=3e-4,
    train_samples=64,
    held_out=32,
    epochs=6,
    rate=1e-4,
)
REHEARSED = Plan(
    regime=Regime(layers=4, width=32, heads=4, vocabulary=300, tokens=32, cuts=(1, 3), batch=BATCH),
    text_chars=120_000,
    pretrain_s=5.0,
    pretrain_rate=2e-3,
    train_samples=16,
    held_out=8,
    epochs=3,
    rate=1e-3,
)


def rows(scene: Scene) -> Iterator[Row]:
    """Start, then an epoch of each run by turns; statistics of the uncompressed one after each."""
    plan = REHEARSED if scene.rehearse else PLAN
    device = device_here()
    texts = read_texts(plan, device)
    began_s = time.monotonic()
    model, num_steps = _pretrained(plan, texts, device, scene)
    yield {
        "table": "start",
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "steps": num_steps,
        "s": time.monotonic() - began_s,
        "perplexity": perplexity(model, texts.held_out),
    }
    names = REHEARSED_CONFIGS if scene.rehearse else CONFIGS
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    del model
    runs: dict[str, Run] = {}
    plain: dict[int, float] = {}
    for epoch in range(plan.epochs):
        for name in names:
            # Begun when it is its turn: weights and optimizers of all take gigabytes.
            run = runs.setdefault(name, runs.get(name) or Run(name, plan, texts, weights, device))
            found = run.epoch(epoch)
            plain_perplexity = plain.setdefault(epoch, found["perplexity"])
            found["beside none, %"] = 100 * (found["perplexity"] / plain_perplexity - 1)
            yield {"table": "curves", "epoch": epoch + 1, "codecs": name, **found}
            yield from run.statistics_rows(epoch)
            if scene.left_s < 0:
                return


# ---- texts


@dataclass(frozen=True, slots=True)
class Texts:
    """Samples of what is learned first, what runs learn, and what none sees."""

    first: data.Dataset
    train: data.Dataset
    held_out: data.Dataset


def read_texts(plan: Plan, device: torch.device) -> Texts:
    """Read the sources of Python's own library; the runs train on the last files."""
    text = _sources(plan.text_chars)
    tokenizer = data.train_tokenizer(text, plan.regime.vocabulary)
    # Apart, as the tokenizer takes several at once; where one ends a token is cut at most.
    parts = [text[at : at + PART_CHARS] for at in range(0, len(text), PART_CHARS)]
    ids = [token for part in tokenizer.encode_batch(parts) for token in part.ids]
    samples = data.samples_of(ids, plan.regime.tokens)
    samples = replace(samples, tokens=samples.tokens.to(device))
    middle, end = len(samples) - plan.train_samples - plan.held_out, len(samples)
    return Texts(
        data.take(samples, 0, middle),
        data.take(samples, middle, end - plan.held_out),
        data.take(samples, end - plan.held_out, end),
    )


def _sources(chars: int) -> str:
    """Read the text of all modules that are plain files, in order."""
    folder, parts, left = Path(sysconfig.get_path("stdlib")), [], chars
    for path in sorted(folder.rglob("*.py")):
        if left <= 0:
            break
        inside = path.relative_to(folder).parts
        if not {"site-packages", "test", "tests", "idlelib"} & set(inside):
            parts.append(path.read_text(encoding="utf-8", errors="replace")[:left])
            left -= len(parts[-1])
    return "".join(parts)


# ---- runs


class Watched(CutModel):
    """See `CutModel`; it computes in bfloat16 on a GPU, and can record the tensors at its cuts.

    Attributes:
        kept: by cut, what the last batch's blocks gave, with its gradient once there is one.
        ids: of the last batch's samples.
    """

    def __init__(self, regime: Regime, *, keeps: bool) -> None:
        super().__init__(regime)
        self.activations: dict[int, Tensor] = {}
        self.ids: list[int] = []
        for index, block in enumerate(regime.cuts if keeps else ()):
            self.blocks[block - 1].register_forward_hook(self._keep(index))

    def loss(self, batch: data.Batch, mode: str = "off") -> tuple[Tensor, Tensor]:
        """See `CutModel.loss`."""
        self.ids = batch.ids.tolist()
        kind = batch.tokens.device.type
        with torch.autocast(kind, torch.bfloat16, kind == "cuda"):
            loss, logits = super().loss(batch, mode)
        return loss.float(), logits

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(_block: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            hidden: Tensor = output if isinstance(output, Tensor) else output[0]
            if hidden.requires_grad:
                hidden.retain_grad()
                self.activations[index] = hidden

        return keep


def _pretrained(
    plan: Plan, texts: Texts, device: torch.device, scene: Scene
) -> tuple[Watched, int]:
    """Train a model for a while; return it with the number of steps."""
    torch.manual_seed(SEED)
    model, count = Watched(plan.regime, keeps=False).to(device), 0
    end_s = time.monotonic() + min(plan.pretrain_s, scene.left_s / 3)
    for count, (_, loss) in enumerate(  # noqa: B007 - told when the time is over
        steps(model, texts.first, BATCH, 1, plan.pretrain_rate, SEED), 1
    ):
        if time.monotonic() > end_s and math.isfinite(loss.item()):
            break
    return model, count


@dataclass
class Run:
    """One way through the cuts, an epoch at a time."""

    name: str
    plan: Plan
    texts: Texts
    weights: Mapping[str, Tensor]
    device: torch.device
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        self._is_plain = self.name == "none"
        self.model = Watched(self.plan.regime, keeps=self._is_plain).to(self.device)
        self.model.load_state_dict(self.weights)
        self.weights = {}
        if not self._is_plain:
            self.model.cuts = Cuts(parse_config(self.name), len(self.plan.regime.cuts))
        self.statistics = Statistics()
        self._steps = steps(
            self.model, self.texts.train, BATCH, self.plan.epochs, self.plan.rate, SEED
        )

    def epoch(self, number: int) -> dict[str, Any]:
        """Train one and evaluate."""
        began_s, losses = time.monotonic(), []
        for _ in range(len(self.texts.train) // BATCH):
            _, loss = next(self._steps)
            losses.append(loss.item())
            if self._is_plain:
                self.statistics.add(number, self.model)
        bits_fw, bits_bw = self.model.cuts.rates() if self.model.cuts else (32.0, 32.0)
        return {
            "loss": math.fsum(losses) / len(losses),
            "perplexity": perplexity(self.model, self.texts.held_out),
            "bits forward": bits_fw,
            "bits backward": bits_bw,
            "s": time.monotonic() - began_s,
        }

    def statistics_rows(self, number: int) -> Iterator[Row]:
        """Yield statistics of the tensors that crossed the uncompressed run's cuts in an epoch."""
        if self._is_plain:
            yield from self.statistics.rows(number)


def perplexity(model: CutModel, held_out: data.Dataset) -> float:
    """Return the perplexity of held-out text, without codecs."""
    model.eval()
    loss, _ = evaluate(model, held_out, BATCH)
    model.train()
    return math.exp(min(loss, 50.0))


# ---- how many bits it needs


class Statistics:
    """Covariances of what passes cuts, by cut and kind, and each sample's last activation."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Tensor] = {}
        self._products: dict[tuple[int, str], Tensor] = {}
        self._energy: dict[tuple[int, str], float] = defaultdict(float)

    def add(self, epoch: int, model: Watched) -> None:
        """Count a batch, after its backward pass."""
        for cut, hidden in model.activations.items():
            for row, sample in enumerate(model.ids):
                x = hidden[row].detach().float()
                if epoch == 0:
                    self._count(cut, "first activation", x - x.mean(0))
                else:
                    change = x - self._last[cut, sample]
                    self._count(cut, f"change, visit {epoch + 1}", change)
                    self._energy[cut, f"change, visit {epoch + 1}"] += float(x.square().sum())
                self._last[cut, sample] = x
                gradient = None if hidden.grad is None else hidden.grad[row].float()
                if gradient is not None:
                    size = gradient.square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)
                    self._count(cut, f"gradient by token, visit {epoch + 1}", gradient / size)
        model.activations.clear()

    def rows(self, epoch: int) -> Iterator[Row]:
        """Yield the rows of an epoch, and forget its sums."""
        for (cut, kind), products in sorted(self._products.items()):
            energy = self._energy.get((cut, kind))
            of_values = None
            if energy:
                of_values = math.sqrt(float(products.trace()) / energy)
            by_channel, in_klt = bits_needed(products)
            yield {
                "table": "bits a value at a distortion of 1/16, uncompressed run",
                "visit": epoch + 1,
                "cut": cut,
                "of": kind,
                "by channel": by_channel,
                "KLT": in_klt,
                "KLT of it": in_klt / by_channel if by_channel else None,
                "size of the activation": of_values,
            }
        self._products.clear()

    def _count(self, cut: int, kind: str, x: Tensor) -> None:
        products = x.double().T @ x.double()
        seen = self._products.get((cut, kind))
        self._products[cut, kind] = products if seen is None else seen + products


def bits_needed(products: Tensor, distortion: float = DISTORTION) -> tuple[float, float]:
    """Bits a value of a Gaussian of that covariance, by channel, and in its own basis.

    Args:
        products: float64 [C, C], a multiple of the covariance.
        distortion: mean squared, of the mean variance.
    """
    in_klt = torch.linalg.eigvalsh(products).clamp(min=0)
    return water_filled(products.diagonal(), distortion), water_filled(in_klt, distortion)


def water_filled(variances: Tensor, distortion: float) -> float:
    """Mean bits of independent Gaussians by reverse water-filling (Cover and Thomas, 10.3.3)."""
    target, low, high = distortion * float(variances.sum()), 0.0, float(variances.max())
    if not target:
        return 0.0
    for _ in range(80):
        level = (low + high) / 2
        is_below = float(variances.clamp(max=level).sum()) < target
        low, high = (level, high) if is_below else (low, level)
    rates = 0.5 * torch.log2(variances / variances.clamp(max=high)).nan_to_num(0.0)
    return float(rates.mean())
