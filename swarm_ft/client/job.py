"""From options to a job: the model is described, the data tokenised, everything checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from swarm_ft.client.export import check_out_dir
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.architecture import check_seq_length
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# ---- text to samples of token ids

TokenArray = npt.NDArray[np.uint32]


def read_text(path: str) -> str:
    """One UTF-8 file, or all `.txt` files of a directory, sorted by name, joined by newlines.

    Raises:
        BadDataset: the path is missing, unreadable, not UTF-8 or without any text, or it is a
            directory without `.txt` files.
    """
    files = _text_files(Path(path))
    text = "\n".join(_read_file(file) for file in files)
    if not text.strip():
        raise BadDataset(f"dataset '{path}': expected text, found none; the data is empty")
    return text


def _text_files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        files = sorted(p for p in path.iterdir() if p.suffix == ".txt" and p.is_file())
    except OSError as exc:
        raise BadDataset(f"dataset '{path}': cannot be read: {_reason(exc)}") from exc
    if not files:
        raise BadDataset(f"dataset '{path}': expected .txt files in this directory, found none")
    return files


def _read_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as exc:
        raise BadDataset(
            f"dataset '{path}': no such file; expected a UTF-8 text file or a directory of .txt"
        ) from exc
    except OSError as exc:
        raise BadDataset(f"dataset '{path}': cannot be read: {_reason(exc)}") from exc
    except UnicodeDecodeError as exc:
        raise BadDataset(
            f"dataset '{path}': expected UTF-8 text, got another encoding at byte "
            f"{exc.start} ({exc.reason}); convert the file to UTF-8"
        ) from exc


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc)


def tokenise(text: str, tokenizer: PreTrainedTokenizerBase, seq_length: int) -> TokenArray:
    """Samples of `seq_length` adjoining tokens; what does not fill the last one is dropped.

    The text is tokenised as one piece, and no special tokens are added. Whether a model knows
    all the ids is not checked here.

    Returns:
        Token ids [samples, seq_length].

    Raises:
        BadDataset: the text has fewer than `seq_length` tokens.
    """
    # verbose=False: a text longer than the model's context is what we want, not a mistake.
    encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.uint32)
    num_samples = len(ids) // seq_length
    if num_samples == 0:
        raise BadDataset(
            f"dataset: expected at least one sample of {seq_length} tokens, got {len(ids)} "
            "tokens in all; give more text or a smaller --seq-length"
        )
    return ids[: num_samples * seq_length].reshape(num_samples, seq_length)


def tokens_to_bytes(row: TokenArray) -> bytes:
    """One sample [seq_length] as it travels: little-endian uint32."""
    return row.astype("<u4").tobytes()


TRAINING_TEXT_EVAL_SAMPLES = 256
"""Without held-out text, this much of the training text is evaluated on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalData:
    """What the model is judged by, before and after.

    Attributes:
        samples: uint32 [samples, seq_length].
        source: where it comes from, for people.
    """

    samples: TokenArray
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
    check_seq_length(checkpoint.architecture, options.train.seq_length)
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


def read_tokens(path: str, checkpoint: Checkpoint, seq_length: int) -> TokenArray:
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


def read_eval_data(options: EvalOptions, checkpoint: Checkpoint, tokens: TokenArray) -> EvalData:
    """Held-out samples; without held-out text, the beginning of the training text."""
    if options.eval_dataset is None:
        limit = options.max_eval_samples or TRAINING_TEXT_EVAL_SAMPLES
        return EvalData(samples=tokens[:limit], source="the training text")
    held_out = read_tokens(options.eval_dataset, checkpoint, tokens.shape[1])
    return EvalData(
        samples=held_out[: options.max_eval_samples], source=f"held-out {options.eval_dataset}"
    )
