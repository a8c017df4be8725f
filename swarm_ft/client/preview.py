"""The samples that a job would learn, before anything is submitted. Calls nobody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm_ft.client.data.progress import Listener
from swarm_ft.client.data.samples import TokenArray
from swarm_ft.client.data.summary import Summary, counted
from swarm_ft.client.job import open_job, read_data
from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.run_spec import EvalStrategy, TrainSpec
from swarm_ft.protocol.spec.sample_rows import (
    NO_LABEL,
    labels_in,
    starts_in,
    targets_in,
    token_ids_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_BEFORE = 5
"""Tokens that a piece is decoded with: some are written otherwise at a text's beginning."""


class TextPiece(NamedTuple):
    """Neighbouring tokens that are all learned, or all only read.

    Attributes:
        text: as the tokenizer decodes them.
        document: of the sample, from 0: several share one where they are packed.
        is_learned: whether they are.
        class_name: the class that is learned of a token; empty where text is learned.
    """

    text: str
    document: int
    is_learned: bool
    class_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """One sample as a model takes it.

    Attributes:
        input_ids: of its tokens.
        labels: of each token its id where it is learned, or its class; else -100, as in
            transformers.
        position_ids: of each token its place in its document.
        pieces: its text.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    position_ids: tuple[int, ...]
    pieces: tuple[TextPiece, ...]

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """1 for each token that is learned, 0 for the others."""
        return tuple(int(label != NO_LABEL) for label in self.labels)

    def fields(self) -> dict[str, Any]:
        """The sample for JSON."""
        return {
            "input_ids": list(self.input_ids),
            "labels": list(self.labels),
            "loss_mask": list(self.loss_mask),
            "position_ids": list(self.position_ids),
            "pieces": [
                {"text": piece.text, "learned": piece.is_learned, "document": piece.document}
                | ({"class": piece.class_name} if piece.class_name else {})
                for piece in self.pieces
            ],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """A job's data, and what would be done with it.

    Attributes:
        lines: how the data was read, for people.
        train: counts of the samples that train.
        held_out: counts of those that are held out; None if none are.
        spec: how it would be trained.
        samples: the first that train.
        eval_samples: the first that are held out.
    """

    lines: tuple[str, ...]
    train: Summary
    held_out: Summary | None
    spec: TrainSpec
    samples: tuple[ShownSample, ...]
    eval_samples: tuple[ShownSample, ...]

    def fields(self) -> dict[str, Any]:
        """All of it for JSON."""
        spec, held_out = self.spec, self.held_out
        return {
            "lines": list(self.lines),
            "train": {
                **self.train.fields(),
                "first_samples": [one.fields() for one in self.samples],
            },
            "held_out": held_out
            and {
                **held_out.fields(),
                "first_samples": [one.fields() for one in self.eval_samples],
            },
            "run": {
                "batch_size": spec.batch_size,
                "steps_per_epoch": spec.steps_per_epoch,
                "steps": spec.num_steps,
                "warmup_steps": spec.warmup_steps,
                "eval_steps": spec.eval_steps,
                "evaluated_samples": spec.num_eval_samples,
            },
        }

    def run_words(self) -> str:
        """How it would be trained, in a line."""
        spec = self.spec
        epochs = spec.num_steps / spec.steps_per_epoch
        steps = f"{counted(spec.num_steps, 'step')} of {counted(spec.batch_size, 'sample')}"
        parts = [f"{steps} ({epochs:.3g} epoch{'s' * (epochs != 1)})"]
        if spec.warmup_steps:
            parts.append(f"{counted(spec.warmup_steps, 'step')} of warm-up")
        if spec.num_eval_samples:
            parts.append(f"{counted(spec.num_eval_samples, 'sample')} evaluated {_times_of(spec)}")
        return "; ".join(parts)


def _times_of(spec: TrainSpec) -> str:
    if not spec.evaluates_on_the_way:
        return "before and after"
    is_epochs = spec.eval_strategy is EvalStrategy.EPOCH
    every = "each epoch" if is_epochs else f"every {counted(spec.eval_steps, 'step')}"
    return f"before, {every} and after"


def preview(
    options: JobOptions, listener: Listener | None = None, *, num_shown: int = 3
) -> Preview:
    """Read and tokenise a job's data as `prepare_job` does, without its model's weights.

    Args:
        options: the job's.
        listener: whom to notify how far the data was read; lines go into the result.
        num_shown: samples to show, at most.

    Raises:
        BadInput: the first problem of the options, the model's config, or the data.
    """
    job = open_job(options)
    lines: list[str] = []
    data = read_data(job, replace(listener or Listener(), tell=lines.append))
    tokenizer, names = job.checkpoint.tokenizer(), job.options.train.labels
    held_out = data.held_out
    return Preview(
        lines=tuple(lines),
        train=data.train.summary,
        held_out=held_out.summary if held_out else None,
        spec=data.train_spec(job.options),
        samples=shown(data.train.tokens[:num_shown], tokenizer, names),
        eval_samples=shown(held_out.tokens[:num_shown], tokenizer, names) if held_out else (),
    )


def shown(
    rows: TokenArray, tokenizer: PreTrainedTokenizerBase, class_names: Sequence[str] = ()
) -> tuple[ShownSample, ...]:
    """Decode rows [N, seq_length] of samples.

    Args:
        rows: see `sample_rows`.
        tokenizer: of the model.
        class_names: by number, of tasks with classes.
    """
    return tuple(_shown(row[None], tokenizer, class_names) for row in rows)


class _Kind(NamedTuple):
    """What neighbouring tokens of a piece have in common.

    Attributes:
        document: of the sample, from 0.
        is_learned: whether the tokens are.
        class_name: of the one token; empty where text is learned.
        number: of the token that has a class, and is a piece of its own; else -1.
    """

    document: int
    is_learned: bool
    class_name: str = ""
    number: int = -1


def _shown(
    row: TokenArray, tokenizer: PreTrainedTokenizerBase, class_names: Sequence[str]
) -> ShownSample:
    ids = token_ids_of(row[0]).tolist()
    size = len(ids)
    learned, classes, starts = (
        flags(row)[0, :size].tolist() for flags in (targets_in, labels_in, starts_in)
    )
    labels, positions, kinds = [], [], []
    position, document = -1, 0
    for number in range(size):
        label, is_start = classes[number], starts[number]
        position, document = (0, document + 1) if is_start else (position + 1, document)
        positions.append(position)
        if label == NO_LABEL:
            labels.append(ids[number] if learned[number] else NO_LABEL)
            kinds.append(_Kind(document, learned[number]))
        else:
            labels.append(label)
            kinds.append(_Kind(document, learned[number], class_names[label], number))
    return ShownSample(
        input_ids=tuple(ids),
        labels=tuple(labels),
        position_ids=tuple(positions),
        pieces=tuple(_pieces(ids, kinds, tokenizer)),
    )


def _pieces(
    ids: list[int], kinds: Sequence[_Kind], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TextPiece]:
    """Neighbouring tokens of one kind, decoded behind some of the tokens in front."""
    for kind, places in groupby(range(len(ids)), key=lambda number: kinds[number]):
        numbers = list(places)
        start, stop = numbers[0], numbers[-1] + 1
        before = ids[max(0, start - NUM_BEFORE) : start]
        in_front = _decoded(before, tokenizer)
        text = _decoded([*before, *ids[start:stop]], tokenizer)[len(in_front) :]
        yield TextPiece(text, kind.document, kind.is_learned, kind.class_name)


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
