"""From options to a job: the model is described, the data tokenised, everything checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarm_ft.client.dataset import read_text, tokenise, tokens_to_bytes
from swarm_ft.client.export import check_out_dir
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.run_spec import RunSpec
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


def prepare_job(options: JobOptions) -> Job:
    """Read, tokenise and check; nothing is written and nobody is called.

    Raises:
        BadInput: the first thing that is wrong with the options, the model or the data.
    """
    check_outputs(options.outputs)
    checkpoint = open_checkpoint(_reference(options.model))
    check_seq_length(checkpoint.config, options.train.seq_length)
    tokens = read_tokens(options.dataset, checkpoint, options.train.seq_length)
    eval_data = read_eval_data(options.evaluation, checkpoint, tokens)
    train = options.train_spec(num_samples=len(tokens))
    return Job(
        spec=RunSpec(model=checkpoint.describe(), train=train),
        checkpoint=checkpoint,
        samples=[tokens_to_bytes(row) for row in tokens],
        eval_data=eval_data,
    )


def _reference(model: str) -> str:
    """A directory by its whole path: a peer may have been started in another place."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def check_outputs(outputs: Outputs) -> None:
    """Refuse outputs that could not be written at the end of a long run.

    Raises:
        BadOption: `--out`, `--json` or `--trace` cannot be written.
    """
    check_out_dir(outputs.out)
    for option, path in (("--json", outputs.json_file), ("--trace", outputs.trace_file)):
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


def read_eval_data(options: EvalOptions, checkpoint: Checkpoint, tokens: Tokens) -> EvalData:
    """Held-out samples; without held-out text, the beginning of the training text."""
    if options.eval_dataset is None:
        limit = options.max_eval_samples or TRAINING_TEXT_EVAL_SAMPLES
        return EvalData(samples=tokens[:limit], source="the training text")
    held_out = read_tokens(options.eval_dataset, checkpoint, tokens.shape[1])
    return EvalData(
        samples=held_out[: options.max_eval_samples], source=f"held-out {options.eval_dataset}"
    )
