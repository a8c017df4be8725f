"""CoLA by a swarm of processes, and by transformers in one process: the same numbers all over."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

COLUMNS = ("source", "label", "mark", "sentence")
CLASSES = ("unacceptable", "acceptable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Both ways' hyperparameters; no dropout, no weight decay."""

    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-4
    warmup_steps: int = 50
    clip_grad_norm: float = 1.0
    seq_length: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Data:
    """The directory of a pre-trained model, and CoLA's files."""

    model: Path
    train: Path
    dev: Path


@dataclass(frozen=True, slots=True)
class Sentence:
    """One of CoLA's."""

    text: str
    label: int


def read(path: Path) -> list[Sentence]:
    """All rows of one of CoLA's files."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    return [Sentence(row[3], int(row[1])) for row in rows]


def matthews(predictions: Sequence[int], labels: Sequence[int]) -> float:
    """Matthews' correlation, which is Pearson's of two classes; 0 if all get one class."""
    if len(set(predictions)) < 2:
        return 0.0
    return float(np.corrcoef(predictions, labels)[0, 1])


def by_swarm(data: Data, out: Path, tuning: Tuning, more: Sequence[str]) -> dict[str, float]:
    """Train with a swarm of processes and return its evaluation of the held-out sentences.

    Raises:
        CalledProcessError: it failed.
    """
    report = out.with_suffix(".json")
    options = {
        "model": data.model,
        "dataset": data.train,
        "eval-dataset": data.dev,
        "out": out,
        "json": report,
        "task": "classification",
        "labels": ",".join(CLASSES),
        "column-names": ",".join(COLUMNS),
        "text-column": "sentence",
        "epochs": tuning.epochs,
        "batch-size": tuning.batch_size,
        "micro-batch-size": tuning.batch_size,
        "seq-length": tuning.seq_length,
        "lr": tuning.learning_rate,
        "warmup-steps": tuning.warmup_steps,
        "clip-grad-norm": tuning.clip_grad_norm,
        "seed": tuning.seed,
        "stages": 2,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "swarm_ft", "demo", *words, "--no-quotes", "--shuffle", *more]
    subprocess.run(command, check=True)
    found: dict[str, float] = json.loads(report.read_text())["eval"]
    return found


def by_transformers(data: Data, tuning: Tuning) -> tuple[float, float]:
    """Loss and Matthews' correlation of the held-out sentences, by one process."""
    torch.manual_seed(tuning.seed)
    tokenizer = AutoTokenizer.from_pretrained(data.model)
    model = AutoModelForSequenceClassification.from_pretrained(data.model, num_labels=len(CLASSES))
    model.eval()  # without dropout
    sentences = read(data.train)
    steps_per_epoch = -(-len(sentences) // tuning.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tuning.learning_rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(
        optimizer, tuning.warmup_steps, tuning.epochs * steps_per_epoch
    )
    for batch in _epochs(sentences, tuning):
        loss = cross_entropy(*_logits(model, tokenizer, batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), tuning.clip_grad_norm)
        optimizer.step()
        schedule.step()
    return judged(model, tokenizer, read(data.dev))


def judged(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sentence]
) -> tuple[float, float]:
    """Loss and Matthews' correlation."""
    with torch.no_grad():
        logits, labels = _logits(model, tokenizer, sentences)
    loss = cross_entropy(logits, labels).item()
    return loss, matthews(logits.argmax(1).tolist(), labels.tolist())


def _epochs(sentences: Sequence[Sentence], tuning: Tuning) -> Iterator[list[Sentence]]:
    for _ in range(tuning.epochs):
        order = torch.randperm(len(sentences))
        for rows in order.split(tuning.batch_size):
            yield [sentences[row] for row in rows.tolist()]


def _logits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Sentence]
) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [one.text for one in batch]
    encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    return model(**encoded).logits, torch.tensor([one.label for one in batch])
