"""Preview of a job's samples before anything is submitted. Uses no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm_ft.client.data.progress import Listener
from swarm_ft.client.data.samples import TokenArray
from swarm_ft.client.data.summary import Summary, count_phrase
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
"""Number of preceding tokens that a piece is decoded with; some tokens decode differently at the
start of a text."""


class TextPiece(NamedTuple):
    """Neighbouring tokens that are all learned, or all only read.

    Attributes:
        text: Decoded text.
        document: Index of the document in the sample, from 0; packed samples have several.
        is_learned: Whether the loss includes these tokens.
        class_name: Class of the one token; empty if the task is language modelling.
    """

    text: str
    document: int
    is_learned: bool
    class_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedSample:
    """A sample as the model receives it.

    Attributes:
        input_ids: Token ids.
        labels: Token id or class of each learned token, and -100 for the others, as in
            transformers.
        position_ids: Position of each token in its document.
        pieces: Text of the sample.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    position_ids: tuple[int, ...]
    pieces: tuple[TextPiece, ...]

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """Mask with 1 for each learned token and 0 for the others."""
        return tuple(int(label != NO_LABEL) for label in self.labels)

    def fields(self) -> dict[str, Any]:
        """Return the sample for JSON."""
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
    """A job's data and the resulting training.

    Attributes:
        lines: How the data was read, for people.
        train: Counts of training samples.
        held_out: Counts of held-out samples; None without any.
        spec: Parameters of the training.
        samples: First training samples.
        eval_samples: First held-out samples.
    """

    lines: tuple[str, ...]
    train: Summary
    held_out: Summary | None
    spec: TrainSpec
    samples: tuple[DecodedSample, ...]
    eval_samples: tuple[DecodedSample, ...]

    def fields(self) -> dict[str, Any]:
        """Return all fields for JSON."""
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
        """Return the training as one line for people."""
        spec = self.spec
        epochs = spec.num_steps / spec.steps_per_epoch
        steps = (
            f"{count_phrase(spec.num_steps, 'step')} of {count_phrase(spec.batch_size, 'sample')}"
        )
        parts = [f"{steps} ({epochs:.3g} epoch{'s' * (epochs != 1)})"]
        if spec.warmup_steps:
            parts.append(f"{count_phrase(spec.warmup_steps, 'step')} of warm-up")
        if spec.num_eval_samples:
            parts.append(
                f"{count_phrase(spec.num_eval_samples, 'sample')} evaluated {_times_of(spec)}"
            )
        return "; ".join(parts)


def _times_of(spec: TrainSpec) -> str:
    if not spec.evaluates_on_the_way:
        return "before and after"
    is_epochs = spec.eval_strategy is EvalStrategy.EPOCH
    every = "each epoch" if is_epochs else f"every {count_phrase(spec.eval_steps, 'step')}"
    return f"before, {every} and after"


def preview(
    options: JobOptions, listener: Listener | None = None, *, num_shown: int = 3
) -> Preview:
    """Read and tokenise a job's data as `prepare_job` does, without its model's weights.

    Args:
        options: Options of the job.
        listener: Receiver of progress while data is read; lines go into the result.
        num_shown: Maximum number of decoded samples.

    Raises:
        BadInput: The first problem of the options, the model's config, or the data.
    """
    job = open_job(options)
    lines: list[str] = []
    data = read_data(job, replace(listener or Listener(), on_line=lines.append))
    tokenizer, names = job.checkpoint.tokenizer(), job.options.train.labels
    held_out = data.held_out
    return Preview(
        lines=tuple(lines),
        train=data.train.summary,
        held_out=held_out.summary if held_out else None,
        spec=data.train_spec(job.options),
        samples=decode_samples(data.train.tokens[:num_shown], tokenizer, names),
        eval_samples=decode_samples(held_out.tokens[:num_shown], tokenizer, names)
        if held_out
        else (),
    )


def decode_samples(
    rows: TokenArray, tokenizer: PreTrainedTokenizerBase, class_names: Sequence[str] = ()
) -> tuple[DecodedSample, ...]:
    """Decode rows [N, seq_length] of samples.

    Args:
        rows: Rows of samples, see `sample_rows`.
        tokenizer: Tokenizer of the model.
        class_names: Names of classes by number, for tasks with classes.
    """
    return tuple(_shown(row[None], tokenizer, class_names) for row in rows)


class _Kind(NamedTuple):
    """Key by which neighbouring tokens form one piece.

    Attributes:
        document: Index of the document in the sample, from 0.
        is_learned: Whether the loss includes the token.
        class_name: Class of the token; empty if the task is language modelling.
        number: Index of a token with a class, which is a piece of its own; else -1.
    """

    document: int
    is_learned: bool
    class_name: str = ""
    number: int = -1


def _shown(
    row: TokenArray, tokenizer: PreTrainedTokenizerBase, class_names: Sequence[str]
) -> DecodedSample:
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
    return DecodedSample(
        input_ids=tuple(ids),
        labels=tuple(labels),
        position_ids=tuple(positions),
        pieces=tuple(_pieces(ids, kinds, tokenizer)),
    )


def _pieces(
    ids: list[int], kinds: Sequence[_Kind], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TextPiece]:
    """Yield neighbouring tokens of one kind, each piece decoded with some preceding tokens."""
    for kind, places in groupby(range(len(ids)), key=lambda number: kinds[number]):
        numbers = list(places)
        start, stop = numbers[0], numbers[-1] + 1
        before = ids[max(0, start - NUM_BEFORE) : start]
        in_front = _decoded(before, tokenizer)
        text = _decoded([*before, *ids[start:stop]], tokenizer)[len(in_front) :]
        yield TextPiece(text, kind.document, kind.is_learned, kind.class_name)


def _decoded(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
