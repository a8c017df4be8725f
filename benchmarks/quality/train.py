"""One run of the study: fine-tune through the cuts, evaluate after each epoch, record it all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.quality import data
from benchmarks.quality.boundary import Cuts
from benchmarks.quality.configs import Config
from benchmarks.quality.models import CutModel, Regime, evaluate, fine_tunable, pretrained, steps
from benchmarks.quality.replicas import Replicas
from swarm_ft.errors import NonFinite

Record = dict[str, Any]
PRETRAIN_TEXT = "wikitext2-valid.txt"
Parts = tuple[data.Dataset, data.Dataset]
"""Train and held out."""
RATES = {"lm": 2e-3, "wikitext": 3e-4, "cola": 4e-3, "lora": 8e-3}
"""The best of the grid, by task; `--rates` runs the grid again."""


@dataclass(slots=True)
class Task:
    """Texts of one task, read once for all runs of a process.

    Attributes:
        train: what is fine-tuned on.
        held_out: what is evaluated on.
        pretrain: what the backbone learns first.
        text: the pre-training text, which the tokenizer is made of.
    """

    name: str
    regime: Regime
    train: data.Dataset
    held_out: data.Dataset
    pretrain: data.Dataset
    text: str
    cache: Path
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def model(self, seed: int) -> CutModel:
        """Return the model that a run of that seed begins with."""
        if seed not in self.weights:
            self.weights[seed] = pretrained(self.regime, self.text, self.pretrain, seed, self.cache)
        classes = 2 if self.name == "cola" else 0
        return fine_tunable(self.regime, self.weights[seed], seed, classes)


def read_task(name: str, regime: Regime, folder: Path, cache: Path) -> Task:
    """Task `lm`, `wikitext`, `cola` or `lora`, from the texts in `folder`."""
    text = (folder / PRETRAIN_TEXT).read_text()
    tokenizer = data.train_tokenizer(text, regime.vocabulary)
    pretrain = data.language_samples(tokenizer, text, regime.tokens)
    train, held_out = _READERS[name](tokenizer, regime, folder)
    return Task(name, regime, train, held_out, pretrain, text, cache)


def _cola_text(tokenizer: Tokenizer, regime: Regime, folder: Path) -> Parts:
    """Language model: sentences of linguistics papers after an encyclopedia."""
    train, held_out = (
        data.language_samples(tokenizer, data.cola_text(folder / f"cola-{part}.tsv"), regime.tokens)
        for part in ("train", "dev")
    )
    return data.take(train, 0, regime.train_samples), held_out


def _wikitext(tokenizer: Tokenizer, regime: Regime, folder: Path) -> Parts:
    """Language model: more of the same encyclopedia; held out are its last articles."""
    text = (folder / "wikitext2-test.txt").read_text()
    samples, end = data.language_samples(tokenizer, text, regime.tokens), regime.train_samples
    return data.take(samples, 0, end), data.take(samples, max(end, len(samples) - 100))


def _cola_labels(tokenizer: Tokenizer, regime: Regime, folder: Path) -> Parts:
    """Classification: is a sentence acceptable?"""
    args = regime.cola_tokens, regime.cola_sentences
    train = data.cola_sentences(tokenizer, folder / "cola-train.tsv", *args)
    return train, data.cola_sentences(tokenizer, folder / "cola-dev.tsv", *args)


_READERS = {"lm": _cola_text, "wikitext": _wikitext, "cola": _cola_labels, "lora": _cola_text}


def run(task: Task, config: Config, seed: int, rate: float) -> Record:
    """Fine-tune and evaluate; a run that diverges is recorded as such, up to where it did."""
    began = time.monotonic()
    model = task.model(seed)
    model.cuts = Cuts(config, len(task.regime.cuts), adapts=task.regime.lora_r > 0)
    model.replicas = Replicas(config.dp) if config.dp else None
    record = key_of(task, config, seed, rate) | {"diverged": "", "epochs": []}
    regime = task.regime
    record |= {"family": regime.family, "trains": regime.trains, "in_a_row": regime.in_a_row}
    model.shadows.clear()
    record["start"] = _scores(model, task, "off")
    try:
        _epochs(model, task, config, rate, seed, record)
        if config.fw.startswith(("aq", "pubaq")):
            record["direct"] = _scores(model, task, "direct")
    except NonFinite as error:
        record["diverged"] = str(error) or type(error).__name__
    if model.cuts.control is not None:
        record["told_cost"], record["step_size"] = (
            model.cuts.control.cost,
            model.cuts.control.step_size,
        )
    record["shadows"] = [[round(x, 4) for x in (s.loss, s.cosine, s.error)] for s in model.shadows]
    values = [(e["bits_fw"], e["bits_bw"]) for e in record["epochs"]]
    for index, name in enumerate(("bits_fw", "bits_bw")):
        rates = [pair[index] for pair in values]
        record[name] = math.fsum(rates) / len(rates) if rates else None
    return record | {"seconds": round(time.monotonic() - began, 1)}


def key_of(task: Task, config: Config, seed: int, rate: float) -> Record:
    """Return the key of a run: two runs with the same key give the same numbers."""
    return {
        "task": task.name,
        "regime": _relevant(task).digest(),
        "config": str(config),
        "planned_epochs": config.epochs,
        "seed": seed,
        "rate": rate,
    }


def _relevant(task: Task) -> Regime:
    """Return the regime without the fields that this task does not use."""
    if task.name == "cola":
        return replace(task.regime, train_samples=0)
    return replace(task.regime, cola_sentences=0, cola_tokens=0)


def _epochs(
    model: CutModel, task: Task, config: Config, rate: float, seed: int, record: Record
) -> None:
    """Train, adding one entry an epoch to the record.

    Raises:
        NonFinite: the loss, an activation or a gradient is no longer finite.
    """
    regime, losses, ended = task.regime, [], len(task.train) // task.regime.batch
    for _, loss in steps(model, task.train, regime.batch, config.epochs, rate, seed):
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NonFinite(f"loss is {losses[-1]}")
        if len(losses) == ended:
            record["epochs"].append(_epoch(model, task, losses))
            losses = []
    if model.replicas is not None:
        record["bits_dp"] = model.replicas.tally.rate


def _epoch(model: CutModel, task: Task, losses: list[float]) -> Record:
    cuts = model.cuts
    reused = cuts.reused() if cuts else 0.0
    bits_fw, bits_bw = cuts.rates() if cuts else (0.0, 0.0)
    changes = cuts.changes() if cuts else []
    plain = _scores(model, task, "off")
    differs = any(boundary.changes_inference for boundary in (cuts.boundaries if cuts else ()))
    compressed = _scores(model, task, "compressed") if differs else plain
    return {
        "loss": math.fsum(losses) / len(losses),
        "bits_fw": bits_fw,
        "bits_bw": bits_bw,
        "changes": changes,
        **({"reused": reused} if reused else {}),
        **plain,
        **{f"{name}_compressed": value for name, value in compressed.items()},
    }


def _scores(model: CutModel, task: Task, mode: str) -> Record:
    """Perplexity; for sentences, mean loss, accuracy and Matthews correlation.

    Raises:
        NonFinite: an activation to be encoded is no longer finite.
    """
    model.eval()
    loss, logits = evaluate(model, task.held_out, task.regime.batch, mode)
    model.train()
    if task.name != "cola":
        return {"ppl": math.exp(min(loss, 700.0))}
    guesses, labels = logits.argmax(1), task.held_out.labels
    accuracy = (guesses == labels).float().mean().item()
    return {"held_out_loss": loss, "accuracy": accuracy, "matthews": matthews(guesses, labels)}


def matthews(guesses: Tensor, labels: Tensor) -> float:
    """Matthews correlation of two classes; 0 if either side has only one class."""
    a, b = guesses.double(), labels.double()
    spread = (a.std(correction=0) * b.std(correction=0)).item()
    covariance = ((a - a.mean()) * (b - b.mean())).mean().item()
    return covariance / spread if spread else 0.0


def deterministic() -> None:
    """One thread and deterministic operations: the same bits for the same seed."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
