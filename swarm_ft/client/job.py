"""From options to a job: the model is described, the data tokenised, everything checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarm_ft.client.data.dataset import Dataset, open_dataset
from swarm_ft.client.data.files import Wanted
from swarm_ft.client.data.progress import Listener, ReadSoFar
from swarm_ft.client.data.samples import SampleBytes, TokenArray
from swarm_ft.client.export import check_out_dir
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs, ReadOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.architecture import check_seq_length
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint

TRAINING_TEXT_EVAL_SAMPLES = 256
"""Without held-out text, this much of the training text is evaluated on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalData:
    """What the model is judged by, before and after.

    Attributes:
        samples: rows [samples, seq_length], see `sample_rows`.
        source: where it comes from, for people.
    """

    samples: TokenArray
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything a run needs, checked.

    Attributes:
        samples: each sample's row, as it travels.
    """

    spec: RunSpec
    checkpoint: Checkpoint
    samples: Sequence[bytes]
    eval_data: EvalData


def prepare_job(options: JobOptions, listener: Listener | None = None) -> Job:
    """Read, tokenise and check; nobody is called, and tokens are written to a nameless file.

    Raises:
        BadInput: the first thing that is wrong with the options, the model or the data.
    """
    listener = listener or Listener()
    check_outputs(options.outputs)
    checkpoint = open_checkpoint(_reference(options.model))
    check_seq_length(checkpoint.architecture, options.train.seq_length)
    seq_length, model = options.train.seq_length, checkpoint.describe()
    # Refuses, before anything long begins, what no data could make good.
    RunSpec(model=model, train=options.train_spec(num_samples=1))
    wanted = Wanted(split=options.split, format=options.reading.data_format)
    data = open_dataset(options.dataset, wanted, options.reading, checkpoint.tokenizer())
    held_out = open_held_out(options.evaluation, options.reading, checkpoint, options.dataset)
    # Nothing is told of the one before the other is known to begin well.
    to_tell: list[str] = []
    eval_data = None
    if held_out is not None:
        quiet = replace(listener, tell=to_tell.append)
        eval_data = read_held_out(held_out, options.evaluation, checkpoint, seq_length, quiet)
    tokens = _read(data, checkpoint, seq_length, options.max_samples, listener, to_tell)
    train = options.train_spec(num_samples=len(tokens))
    return Job(
        spec=RunSpec(model=model, train=train),
        checkpoint=checkpoint,
        samples=SampleBytes(tokens),
        eval_data=eval_data or _beginning_of(tokens, options.evaluation),
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


EVAL_SPLITS = ("validation", "test", "train")
"""Of data to evaluate on that has several, the first that is there."""


def open_held_out(
    options: EvalOptions, reading: ReadOptions, checkpoint: Checkpoint, dataset: str | None
) -> Dataset | None:
    """Data to evaluate on, if some is asked for.

    Args:
        options: what is asked for.
        reading: how it is read.
        checkpoint: whose tokenizer is used.
        dataset: of which a split may be held out; None if there is none.

    Raises:
        BadInput: it cannot be used, or a split is asked for of nothing.
    """
    if options.eval_dataset is None and options.eval_split is None:
        return None
    path = options.eval_dataset or dataset
    if path is None:
        raise BadOption("--eval-split: expected --eval-dataset beside it")
    wanted = Wanted(split=options.eval_split, instead=EVAL_SPLITS, format=reading.data_format)
    return open_dataset(path, wanted, reading, checkpoint.tokenizer(), all_options=False)


def read_held_out(
    data: Dataset,
    options: EvalOptions,
    checkpoint: Checkpoint,
    seq_length: int,
    listener: Listener,
) -> EvalData:
    """All of it, or as much as is asked for.

    Raises:
        BadDataset: it is too short, or not as it should be.
    """
    tokens = _read(data, checkpoint, seq_length, options.max_eval_samples, listener)
    source = data.source if options.eval_split is None else f"{data.source} ({options.eval_split})"
    return EvalData(samples=tokens, source=f"held-out {source}")


def _beginning_of(tokens: TokenArray, options: EvalOptions) -> EvalData:
    """Without held-out data, the beginning of the training data."""
    limit = options.max_eval_samples or TRAINING_TEXT_EVAL_SAMPLES
    return EvalData(samples=tokens[:limit], source="the training text")


def _read(
    data: Dataset,
    checkpoint: Checkpoint,
    seq_length: int,
    limit: int | None,
    listener: Listener,
    told_first: Sequence[str] = (),
) -> TokenArray:
    """Rows [samples, seq_length] of samples; what they are is told once there is one."""
    to_tell = [*told_first, *data.describe()]

    def on_batch(so_far: ReadSoFar) -> None:
        while to_tell and so_far.num_samples:
            listener.tell(to_tell.pop(0))
        listener.show(so_far)

    vocab_size = int(checkpoint.config.vocab_size)
    samples = data.samples(seq_length, vocab_size, limit=limit, on_batch=on_batch)
    listener.tell(samples.words)
    return samples.tokens
