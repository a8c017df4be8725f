"""Texts as token ids: samples of a language model, sentences to classify. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A few samples that are computed together.

    Attributes:
        ids: int64 [samples], stable for the whole run.
        tokens: int64 [samples, tokens], padded with 0.
        lengths: how many tokens of each sample are real.
        labels: int64 [samples] for classification; empty for a language model.
    """

    ids: Tensor
    tokens: Tensor
    lengths: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples with what belongs to each, aligned by row; a row's number is the sample's id."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Tensor) -> Batch:
        """Return the samples of these rows."""
        labels = self.labels[rows] if len(self.labels) else self.labels
        return Batch(rows, self.tokens[rows], self.lengths[rows], labels)

    def batches(
        self, size: int, order: Tensor | None = None, keep_rest: bool = False
    ) -> list[Batch]:
        """All samples in `order`, `size` at a time; a rest that fills no batch may be dropped."""
        rows = torch.arange(len(self)) if order is None else order
        last = len(rows) if keep_rest else len(rows) - size + 1
        return [self.batch(rows[i : i + size]) for i in range(0, last, size)]


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on `text`; the same text gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def language_samples(tokenizer: Tokenizer, text: str, tokens: int) -> Dataset:
    """`text` cut into samples of `tokens`, without overlap; the rest is dropped."""
    return samples_of(tokenizer.encode(text).ids, tokens)


def samples_of(ids: Sequence[int], tokens: int) -> Dataset:
    """Ids of a text, cut so."""
    samples = torch.tensor(ids[: len(ids) // tokens * tokens]).view(-1, tokens)
    return Dataset(samples, torch.full((len(samples),), tokens), torch.empty(0, dtype=torch.long))


def take(dataset: Dataset, start: int, end: int | None = None) -> Dataset:
    """Rows `start` to `end`, or to the last, numbered from 0 again."""
    return Dataset(dataset.tokens[start:end], dataset.lengths[start:end], dataset.labels[start:end])


def cola_text(path: Path) -> str:
    """Read the sentences of a CoLA file as lines of a text, in a fixed shuffled order."""
    rows = path.read_text().splitlines()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return "".join(rows[i].split("\t")[3] + "\n" for i in order)


def cola_sentences(tokenizer: Tokenizer, path: Path, tokens: int, most: int) -> Dataset:
    """Sentences of a CoLA file (source, label, mark, sentence), longer ones cut at `tokens`.

    The file is sorted by source; if it holds more than `most`, they are drawn from all of it.
    """
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(rows), generator=generator)[:most].tolist()
    encoded = [tokenizer.encode(rows[i][3]).ids[:tokens] for i in chosen]
    table = torch.zeros(len(encoded), tokens, dtype=torch.long)
    for row, ids in enumerate(encoded):
        table[row, : len(ids)] = torch.tensor(ids)
    labels = torch.tensor([int(rows[i][1]) for i in chosen])
    return Dataset(table, torch.tensor([len(ids) for ids in encoded]), labels)
