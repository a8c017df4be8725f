"""Preparation of a job: describe the model, tokenise the data, check all options."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import overload

from swarm_ft.client.data.dataset import Dataset, Samples
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.holdout import DatasetPart
from swarm_ft.client.data.mixture import Mixing, Mixture, open_datasets
from swarm_ft.client.data.progress import Listener, ReadProgress
from swarm_ft.client.data.samples import SampleBytes, TokenArray
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.export import check_out_dir
from swarm_ft.client.hub import check_push
from swarm_ft.client.labels import ClassNames, class_names
from swarm_ft.client.options import (
    TRAINING_TEXT_EVAL_SAMPLES,
    EvalOptions,
    JobOptions,
    Outputs,
    ReadOptions,
)
from swarm_ft.client.reporting import parse_reporters
from swarm_ft.client.result import class_lines
from swarm_ft.client.stop_tokens import stop_token_lines, trained_stop_tokens
from swarm_ft.digest import DIGEST_BYTES
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.run_spec import EvalStrategy, RunSpec, TrainSpec
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.stage.adapters import with_adapters
from swarm_ft.stage.architecture import check_seq_length
from swarm_ft.stage.checkpoint import Checkpoint, labels_of, open_checkpoint
from swarm_ft.stage.routers import check_routers


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A checked job.

    Attributes:
        spec: Parameters of the run.
        checkpoint: Base model.
        samples: Encoded rows of all samples; held-out samples are the last ones.
    """

    spec: RunSpec
    checkpoint: Checkpoint
    samples: Sequence[bytes]

    def owned_by(self, client: str) -> Job:
        """Return the job with its model's digests keyed for the client that submits it."""
        model = self.checkpoint.keyed(self.spec.model, self.spec.model.nonce, client)
        return replace(self, spec=replace(self.spec, model=model))

    def is_of(self, run: RunSpec) -> bool:
        """Return whether a run belongs to this job, without reading weights."""
        model = self.checkpoint.keyed(self.spec.model, run.model.nonce, run.model.owner)
        return replace(self.spec, model=model, version=run.version) == run


class ConcatenatedSamples(Sequence[bytes]):
    """Concatenation of two sequences of samples."""

    def __init__(self, first: Sequence[bytes], then: Sequence[bytes]) -> None:
        self._first, self._then = first, then

    def __len__(self) -> int:
        return len(self._first) + len(self._then)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        place = index % len(self)
        cut = len(self._first)
        return self._first[place] if place < cut else self._then[place - cut]


def prepare_job(options: JobOptions, listener: Listener | None = None) -> Job:
    """Read, tokenise and check a job. Uses no network; tokens go to an unnamed temporary file.

    Raises:
        BadInput: The first problem of the options, the model or the data.
    """
    listener = listener or Listener()
    check_outputs(options.outputs)
    job = open_job(options)
    check_routers(job.checkpoint.config, job.options.train)
    model = job.checkpoint.describe(secrets.token_bytes(DIGEST_BYTES))
    # Options that fail with any data are refused here, before the data is read.
    tried = RunSpec(model=model, train=job.options.train_spec(num_samples=1))
    model = with_adapters(job.checkpoint, tried).model
    data = read_data(job, listener)
    return Job(
        spec=RunSpec(model=model, train=data.train_spec(job.options)),
        checkpoint=job.checkpoint,
        samples=ConcatenatedSamples(SampleBytes(data.train.tokens), SampleBytes(data.eval_tokens)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenJob:
    """A job with its model opened; neither data nor weights are read yet.

    Attributes:
        options: Options, with the names of all classes.
        classes: Names of classes with their source.
        checkpoint: Base model.
    """

    options: JobOptions
    classes: ClassNames
    checkpoint: Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class JobData:
    """Samples of a job.

    Attributes:
        train: Training samples.
        held_out: Held-out samples; None without any.
        eval_tokens: Rows of evaluated samples, from either.
        end_token_ids: Stop tokens, see `TrainSpec`.
    """

    train: Samples
    held_out: Samples | None
    eval_tokens: TokenArray
    end_token_ids: tuple[int, ...] = ()

    def train_spec(self, options: JobOptions) -> TrainSpec:
        """Return the parameters of a training on these samples.

        Raises:
            BadOption: There are too many samples or steps.
        """
        spec = options.train_spec(
            num_samples=len(self.train.tokens), num_eval_samples=len(self.eval_tokens)
        )
        return replace(spec, end_token_ids=self.end_token_ids)


def open_job(options: JobOptions) -> OpenJob:
    """Open a job's model and find the names of its classes, reading data for them if needed.

    Raises:
        BadInput: The first problem of the model or the classes.
    """
    classes = _class_names(options)
    train = replace(options.train, label_names=",".join(classes.names))
    checkpoint = open_checkpoint(_reference(options.model), train)
    check_seq_length(checkpoint.architecture, train.seq_length)
    return OpenJob(options=replace(options, train=train), classes=classes, checkpoint=checkpoint)


def read_data(job: OpenJob, listener: Listener) -> JobData:
    """Read and tokenise the data of a job.

    Raises:
        BadInput: The first problem of the data or of its options.
    """
    options, checkpoint, names = job.options, job.checkpoint, job.classes.counted_names
    wanted = DataSelection(split=options.split, format=options.reading.data_format)
    tokenizer, task = checkpoint.tokenizer(), task_of(options.train)
    train_part, eval_part = parts_of(options)
    open_part = partial(
        open_datasets,
        options.datasets,
        options=options.reading,
        tokenizer=tokenizer,
        task=task,
        counted_names=names,
    )
    mixing = Mixing(
        shares=options.shares, stopping=options.stopping_strategy, seed=options.train.seed
    )
    data = open_part(replace(wanted, part=train_part), mixing=mixing)
    held_out: Dataset | Mixture | None
    if eval_part is not None:
        held_out = open_part(replace(wanted, part=eval_part), mixing=Mixing(seed=mixing.seed))
    else:
        held_out = open_held_out(
            options.evaluation, options.reading, checkpoint, _only_dataset(options), names
        )
    # All datasets are opened before the first line is printed, so that an error stands alone.
    lines = [f"model '{checkpoint.reference}': {line}" for line in checkpoint.unused.lines()]
    lines += class_lines(checkpoint, options.train, tokenizer)
    lines += [job.classes.note] if job.classes.note else []
    eval_samples = None
    if held_out is not None:
        quiet = replace(listener, on_line=lines.append)
        eval_samples = _read_held_out(held_out, options, checkpoint, quiet)
    seq_length = options.train.seq_length
    train = _read(data, checkpoint, seq_length, options.max_samples, listener, lines)
    is_packed = train.summary.num_starts > train.summary.num_samples
    if is_packed and not options.train.shuffle:
        listener.on_line(
            "packed samples of long documents come first; --shuffle draws a new order every epoch"
        )
    if options.train.eval_strategy is EvalStrategy.NO:
        eval_tokens = train.tokens[:0]
    elif eval_samples is not None:
        eval_tokens = eval_samples.tokens
    else:
        eval_tokens = _beginning_of(train.tokens, options)
        words = f"no held-out data: evaluating on {len(eval_tokens)} training samples"
        listener.on_line(f"{words} (--eval-dataset, --eval-split, --eval-size)")
    ends: tuple[int, ...] = ()
    if not options.train.has_classes:
        ends = trained_stop_tokens(train.tokens, tokenizer, checkpoint.end_token_ids)
        for line in stop_token_lines(tokenizer, ends, is_adapter=options.train.gives_adapter):
            listener.on_line(line)
    return JobData(train=train, held_out=eval_samples, eval_tokens=eval_tokens, end_token_ids=ends)


def _class_names(options: JobOptions) -> ClassNames:
    if not options.train.has_classes:
        return ClassNames()
    known = labels_of(_reference(options.model), task_of(options.train))
    held_out = _find_held_out(options.evaluation, options.reading, _only_dataset(options))
    return class_names(options, known, held_out)


def _only_dataset(options: JobOptions) -> str | None:
    """Return the dataset of which a split may be held out; None where there are several."""
    return options.datasets[0] if len(options.datasets) == 1 else None


def _reference(model: str) -> str:
    """Return a directory as an absolute path, because peers may run elsewhere on this machine."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def check_outputs(outputs: Outputs) -> None:
    """Refuse outputs that could not be written at the end of a long run.

    Raises:
        BadOption: `--out`, `--json` or `--trace` cannot be written, or `--report-to` or
            `--push-to-hub` cannot work.
    """
    check_out_dir(outputs.out)
    parse_reporters(outputs.report_to)
    if outputs.push_to_hub is not None:
        check_push(outputs.push_to_hub)
    for option, path in (("--json", outputs.json_file), ("--trace", outputs.trace_file)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadOption(f"{option} {path}: there is no directory {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise BadOption(f"{option} {path}: is a directory; name a file")
        if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadOption(f"{option} {path}: may not be written")


def parts_of(options: JobOptions) -> tuple[DatasetPart | None, DatasetPart | None]:
    """Return the training and the held-out part of the data; both None without `--eval-size`."""
    size, seed = options.evaluation.eval_size, options.train.seed
    if not size:
        return None, None
    held_out = DatasetPart(size=size, seed=seed, is_held_out=True)
    return replace(held_out, is_held_out=False), held_out


EVAL_SPLITS = ("validation", "test", "train")
"""Splits of evaluation data in order of preference."""


def open_held_out(
    options: EvalOptions,
    reading: ReadOptions,
    checkpoint: Checkpoint,
    dataset: str | None,
    counted_names: tuple[str, ...] = (),
) -> Dataset | None:
    """Open the evaluation data, if the options name any.

    Args:
        options: Options of the evaluation.
        reading: Options of reading.
        checkpoint: Base model, whose tokenizer is used.
        dataset: Training dataset that may have a held-out split; None if there are several.
        counted_names: Names of classes that numbers in the data count from 0.

    Raises:
        BadInput: The data cannot be used, or a split is named without a dataset.
    """
    found = _find_held_out(options, reading, dataset)
    if found is None:
        return None
    path, wanted = found
    return open_dataset(
        path,
        wanted,
        reading,
        checkpoint.tokenizer(),
        all_options=False,
        task=checkpoint.task,
        counted_names=counted_names,
    )


def _find_held_out(
    options: EvalOptions, reading: ReadOptions, dataset: str | None
) -> tuple[str, DataSelection] | None:
    """Return the path of evaluation data and its part, if evaluations are requested."""
    if options.eval_dataset is None and options.eval_split is None:
        return None
    path = options.eval_dataset or dataset
    if path is None:
        raise BadOption(
            "--eval-split: expected --eval-dataset beside it, unless there is one --dataset"
        )
    return path, DataSelection(
        split=options.eval_split, preferred_splits=EVAL_SPLITS, format=reading.data_format
    )


def _read_held_out(
    data: Dataset | Mixture, options: JobOptions, checkpoint: Checkpoint, listener: Listener
) -> Samples:
    """Read evaluation samples: all, or as many as the options or the swarm allow.

    Raises:
        BadDataset: The data is too short or malformed.
    """
    wanted = options.evaluation.max_eval_samples
    most = TrainSpec.most_eval_samples(options.train, options.max_samples or 1)
    seq_length = options.train.seq_length
    samples = _read(data, checkpoint, seq_length, min(wanted or most, most), listener)
    if wanted is None and len(samples.tokens) == most:
        listener.on_line(
            f"evaluating on {most} samples of {data.source}, the most that a run takes"
        )
    return samples


def _beginning_of(tokens: TokenArray, options: JobOptions) -> TokenArray:
    """Return the first training samples, to evaluate on without held-out data."""
    limit = options.evaluation.max_eval_samples or TRAINING_TEXT_EVAL_SAMPLES
    most = TrainSpec.most_eval_samples(options.train, len(tokens))
    return tokens[: min(limit, most)]


def _read(
    data: Dataset | Mixture,
    checkpoint: Checkpoint,
    seq_length: int,
    limit: int | None,
    listener: Listener,
    first_lines: Sequence[str] = (),
) -> Samples:
    """Read the samples of a dataset; its description is printed with the first batch."""
    lines = [*first_lines, *data.describe()]

    def on_batch(so_far: ReadProgress) -> None:
        while lines and so_far.num_samples:
            listener.on_line(lines.pop(0))
        listener.on_progress(so_far)

    vocab_size = int(checkpoint.config.vocab_size)
    samples = data.samples(seq_length, vocab_size, limit=limit, on_batch=on_batch)
    for line in samples.words.splitlines():
        listener.on_line(line)
    return samples
