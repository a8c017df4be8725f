"""From options to a job: the model is described, the data tokenised, everything checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm_ft.client.dataset import read_text, tokenise, tokens_to_bytes
from swarm_ft.client.export import check_out_dir
from swarm_ft.client.options import TrainOptions
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.run_spec import LrSchedule, RunSpec, TrainSpec
from swarm_ft.stage.architecture import check_seq_length
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint

TRAINING_TEXT_EVAL_SAMPLES = 256
"""Without held-out text, this much of the training text is evaluated on."""

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalData:
    """What the model is judged by, before and after.

    Attributes:
        samples: uint32 [samples, seq_length].
        source: where it comes from, for people.
    """

    samples: Tokens
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything a run needs, checked.

    Attributes:
        samples: each sample's token ids, little-endian uint32.
    """

    spec: RunSpec
    checkpoint: Checkpoint
    samples: list[bytes]
    eval_data: EvalData


def prepare_job(options: TrainOptions) -> Job:
    """Read, tokenise and check; nothing is written and nobody is called.

    Raises:
        BadInput: the first thing that is wrong with the options, the model or the data.
    """
    check_options(options)
    checkpoint = open_checkpoint(_reference(options.model))
    check_seq_length(checkpoint.config, options.seq_length)
    tokens = read_tokens(options.dataset, checkpoint, options.seq_length)
    eval_data = read_eval_data(options, checkpoint, tokens)
    train = _train_spec(options, num_samples=len(tokens))
    return Job(
        spec=RunSpec(model=checkpoint.describe(), train=train),
        checkpoint=checkpoint,
        samples=[tokens_to_bytes(row) for row in tokens],
        eval_data=eval_data,
    )


def check_options(options: TrainOptions) -> None:
    """Refuse what is wrong whatever the model and the data are.

    Raises:
        BadInput: an option is out of range, or an output cannot be written.
    """
    check_outputs(options.out, options.json_file, options.trace_file)
    _train_spec(options, num_samples=1)


def _reference(model: str) -> str:
    """A directory by its whole path: a peer may have been started in another place."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def check_outputs(out: Path, json_file: Path | None, trace_file: Path | None) -> None:
    """Refuse outputs that could not be written at the end of a long run.

    Raises:
        BadOption: `--out`, `--json` or `--trace` cannot be written.
    """
    check_out_dir(out)
    for option, path in (("--json", json_file), ("--trace", trace_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadOption(f"{option} {path}: there is no directory {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise BadOption(f"{option} {path}: is a directory; name a file")
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadOption(f"{option} {path}: may not be written")


def read_tokens(path: str, checkpoint: Checkpoint, seq_length: int) -> Tokens:
    """A text as samples, uint32 [samples, seq_length].

    Raises:
        BadDataset: the text cannot be used, or the tokenizer is not the model's.
    """
    tokens = tokenise(read_text(path), checkpoint.tokenizer(), seq_length)
    vocab_size = int(checkpoint.config.vocab_size)
    if int(tokens.max()) >= vocab_size:
        raise BadDataset(
            f"{path}: token id {int(tokens.max())} is outside the model's vocabulary of "
            f"{vocab_size}; does the tokenizer belong to the model?"
        )
    return tokens


def read_eval_data(options: TrainOptions, checkpoint: Checkpoint, tokens: Tokens) -> EvalData:
    """Held-out samples; without held-out text, the beginning of the training text."""
    if options.eval_dataset is None:
        limit = options.max_eval_samples or TRAINING_TEXT_EVAL_SAMPLES
        return EvalData(samples=tokens[:limit], source="the training text")
    held_out = read_tokens(options.eval_dataset, checkpoint, options.seq_length)
    return EvalData(
        samples=held_out[: options.max_eval_samples], source=f"held-out {options.eval_dataset}"
    )


def _train_spec(options: TrainOptions, *, num_samples: int) -> TrainSpec:
    if options.epochs < 1:
        raise BadOption(f"--epochs: expected 1 or more, got {options.epochs}")
    steps_per_epoch = -(-num_samples // max(1, options.batch_size))
    return TrainSpec(
        num_samples=num_samples,
        seq_length=options.seq_length,
        batch_size=options.batch_size,
        micro_batch_size=options.micro_batch_size,
        num_steps=options.epochs * steps_per_epoch if options.steps is None else options.steps,
        learning_rate=options.lr,
        lr_schedule=LrSchedule[options.lr_schedule.upper()],
        warmup_steps=options.warmup_steps,
        weight_decay=options.weight_decay,
        clip_grad_norm=options.clip_grad_norm,
        seed=options.seed,
        shuffle=options.shuffle,
        dropout=options.dropout,
        sync_tied_embeddings=options.sync_tied_embeddings,
        forward_codec=options.fw,
        backward_codec=options.bw,
        key_codec=options.key,
        dp_codec=options.dp,
        save_steps=options.save_steps,
        buffer_bits=options.buffer_bits,
        fill_codec=options.fill,
        fill_microbatches=options.fill_microbatches,
    )
