"""Options of `client train`, `demo`, `plan` and `generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Length, Range
from swarm_ft.protocol.spec.options import Option, check
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY, Priority
from swarm_ft.protocol.spec.run_spec import (
    MAX_EVAL_SAMPLES,
    MAX_STEPS,
    EvalStrategy,
    SaveStrategy,
    TrainOptions,
    TrainSpec,
)
from swarm_ft.protocol.spec.sampling import (
    MAX_TEXT_TOKENS,
    Sampling,
    Seed,
    Temperature,
    TopK,
    TopP,
)

Count = Annotated[int, Range(1)]
EvalCount = Annotated[int, Range(0, MAX_EVAL_SAMPLES)]
Steps = Annotated[int, Range(1, MAX_STEPS)]
MAX_NAMES_CHARS = 128
TRAINING_TEXT_EVAL_SAMPLES = 256
"""Maximum number of training samples to evaluate on without held-out data."""


class DataFormat(Enum):
    """Format of a data file; the values are for people."""

    TEXT = "plain text"
    LINES = "plain text with a document a line"
    JSONL = "JSON lines"
    JSON = "JSON"
    CSV = "comma-separated values"
    TSV = "tab-separated values"
    PARQUET = "Parquet"
    ARROW = "Arrow"


class PackingStrategy(Enum):
    """Strategy that packs documents into samples; the names are TRL's."""

    BFD = "best-fit decreasing"
    WRAPPED = "one stream of tokens, cut every --seq-length tokens"


class Truncation(Enum):
    """Treatment of a document that is longer than a sample."""

    CUT = "the tokens behind --seq-length are left out"
    DROP = "the document is left out"
    SPLIT = "the document goes on in the next samples"


class StoppingStrategy(Enum):
    """End of mixed datasets; the values are those of the library `datasets`."""

    FIRST_EXHAUSTED = "first_exhausted"
    ALL_EXHAUSTED = "all_exhausted"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOptions:
    """Options for reading training and evaluation data.

    Raises:
        BadOption: A value is out of its bounds, or a packing strategy is set without packing.
    """

    data_format: Annotated[
        DataFormat | None,
        Option(
            "Format of the data files; a text file is one document, a lines file has one document "
            "per line.",
            default="from the file names",
        ),
    ] = None
    subset: Annotated[
        str | None, Option("Subset (configuration) of a dataset on the hub.", metavar="NAME")
    ] = None
    text_column: Annotated[
        str | None,
        Option(
            "Column to train on; for pairs of texts both columns, as A,B.",
            metavar="NAME|NAME,NAME",
            default=(
                "text, prompt and completion, messages, or instruction, input and output; with "
                "classes also sentence, or GLUE's pairs"
            ),
        ),
    ] = None
    column: Annotated[
        tuple[str, ...],
        Option(
            "Role of a column, as prompt=question, or a format for a role, as 'prompt=Q: "
            "{question}'. May be repeated.",
            metavar="NAME=COLUMN",
        ),
    ] = ()
    template: Annotated[
        str | None,
        Option(
            "Template of a document with columns in braces, as 'Q: {question}\\nA: {answer}'. The "
            "loss covers the whole document.",
            metavar="TEXT",
        ),
    ] = None
    remove_columns: Annotated[
        str | None,
        Option(
            "Columns to drop, if a column that changes a row's meaning is refused; messages.KEY "
            "names a key of each message.",
            metavar="A,B,...",
        ),
    ] = None
    label_column: Annotated[
        str | None,
        Option(
            "Column of classes, as integers or names.",
            metavar="NAME",
            default="label or labels; ner_tags or tags for classes of words",
        ),
    ] = None
    column_names: Annotated[
        str | None,
        Option("Column names of a CSV or TSV file without a header line.", metavar="A,B,..."),
    ] = None
    delimiter: Annotated[
        str | None,
        Option(
            "Column delimiter of a CSV file, such as ';'; \\t is a tab.",
            metavar="CHAR",
            default="a comma, or a tab in a TSV file",
        ),
    ] = None
    field: Annotated[
        str | None,
        Option(
            "Key of the list of rows in a JSON file that is one object.",
            metavar="NAME",
            default="data, rows or examples where it is the only list; train, test, ... are splits",
        ),
    ] = None
    quotes: Annotated[
        bool,
        Option(
            "Let quotes in a CSV or TSV file enclose fields, or read them as ordinary characters."
        ),
    ] = True
    separator: Annotated[
        str | None,
        Option(
            "Text after each document.",
            metavar="TEXT",
            default="the tokenizer's end-of-text token",
        ),
    ] = None
    packing: Annotated[
        bool,
        Option(
            "Pack several documents into one sample (--packing-strategy), or put one document into "
            "each."
        ),
    ] = False
    packing_strategy: Annotated[
        PackingStrategy,
        Option(
            "Strategy of --packing. bfd fits whole documents into samples, and no document attends "
            "to another; wrapped joins all documents and cuts the stream into samples."
        ),
    ] = PackingStrategy.BFD
    truncation: Annotated[
        Truncation | None,
        Option(
            "Treatment of documents longer than --seq-length tokens: cut their end, drop them, or "
            "split them into several samples.",
            default="cut; split for plain text and --packing-strategy wrapped",
        ),
    ] = None
    completion_only_loss: Annotated[
        bool,
        Option("Compute the loss on completions (outputs) only, or on prompts as well."),
    ] = True
    assistant_only_loss: Annotated[
        bool,
        Option("Compute the loss on the assistant's messages only, or on all messages."),
    ] = False

    def __post_init__(self) -> None:
        check(self)
        if self.packing_strategy is not PackingStrategy.BFD and not self.packing:
            raise BadOption("--packing-strategy: expected --packing beside it")
        letter = self.column_delimiter
        if letter is not None and (len(letter) != 1 or letter in '"\r\n'):
            raise BadOption(f"--delimiter: expected one letter that is no quote, got {letter!a}")

    @property
    def column_delimiter(self) -> str | None:
        """Character between columns; None for that of the file's format."""
        return "\t" if self.delimiter == "\\t" else self.delimiter


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """Options of evaluation. Without held-out data the swarm evaluates on training samples."""

    eval_dataset: Annotated[
        str | None,
        Option(
            "Held-out data to evaluate on, in any form that --dataset takes.", metavar="PATH|HUB_ID"
        ),
    ] = None
    eval_split: Annotated[
        str | None,
        Option("Split of --eval-dataset to evaluate on, or else of --dataset.", metavar="NAME"),
    ] = None
    eval_size: Annotated[
        float,
        Range(0.0),
        Option(
            "Part of --dataset to hold out and evaluate on: a share of its documents if below 1, "
            "else their number. --seed draws them.",
            default="nothing is held out",
        ),
    ] = 0.0
    max_eval_samples: Annotated[
        Count | None, Option("Maximum number of samples to evaluate on.")
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.eval_size > 1 and self.eval_size != int(self.eval_size):
            raise BadOption(
                f"--eval-size: expected a share below 1 or a whole number of documents, "
                f"got {self.eval_size}"
            )
        if self.eval_size and (self.eval_dataset is not None or self.eval_split is not None):
            other = "--eval-split" if self.eval_dataset is None else "--eval-dataset"
            raise BadOption(f"--eval-size: expected it without {other}, which is held out already")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Options of outputs. Peers record their timelines only if a trace file is set."""

    out: Annotated[Path, Option("Directory for the trained model.", metavar="DIR")] = Path(
        "swarm-ft-output"
    )
    json_file: Annotated[
        Path | None, Option("File for a report in JSON.", name="json", metavar="FILE")
    ] = None
    trace_file: Annotated[
        Path | None,
        Option(
            "File for a trace of what each peer does when, for ui.perfetto.dev.",
            name="trace",
            metavar="FILE",
        ),
    ] = None
    report_to: Annotated[
        str,
        Length(MAX_NAMES_CHARS),
        Option(
            "Integrations that receive the losses, by the Trainer's names: csv, tensorboard, "
            "wandb, trackio, or none.",
            metavar="NAME,NAME,...",
        ),
    ] = "none"
    logging_dir: Annotated[
        Path | None,
        Option(
            "Directory for the files of --report-to, one folder per run.",
            metavar="DIR",
            default="OUT-runs",
        ),
    ] = None
    push_to_hub: Annotated[
        str | None,
        Option(
            "Hub repository to upload the result to; log in first ('hf auth login').",
            metavar="[OWNER/]NAME",
        ),
    ] = None
    hub_private_repo: Annotated[
        bool, Option("Create the repository of --push-to-hub as a private one.")
    ] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of one job.

    Raises:
        BadOption: A value is out of its bounds.
    """

    model: Annotated[str, Option("Model to fine-tune.", metavar="DIR|HUB_ID")]
    dataset: Annotated[
        tuple[str, ...] | str,
        Option(
            "Training data: .txt, .jsonl, .json, .csv, .tsv, .parquet, .arrow, a directory of such "
            "files, or a dataset on the hub. May be repeated.",
            metavar="PATH|HUB_ID",
        ),
    ]
    split: Annotated[
        str | None, Option("Split of --dataset.", metavar="NAME", default="train, or the only one")
    ] = None
    probabilities: Annotated[
        str | None,
        Option(
            "Sampling probabilities of several --dataset, as in interleave_datasets of the library "
            "datasets.",
            metavar="0.7,0.3",
            default="each sample once, evenly interleaved",
        ),
    ] = None
    stopping_strategy: Annotated[
        StoppingStrategy,
        Option(
            "End of a mixture by --probabilities: at the first exhausted dataset, or once all are, "
            "while exhausted ones begin again."
        ),
    ] = StoppingStrategy.FIRST_EXHAUSTED
    max_samples: Annotated[
        Count | None, Option("Maximum number of training samples; reading stops there.")
    ] = None
    reading: ReadOptions = field(default_factory=ReadOptions)
    evaluation: EvalOptions = field(default_factory=EvalOptions)
    epochs: Annotated[Steps, Option("Number of training epochs.")] = 3
    steps: Annotated[Steps | None, Option("Number of optimizer steps; overrides --epochs.")] = None
    warmup_ratio: Annotated[
        float,
        Range(0.0, 1.0),
        Option("Warmup steps as a share of all steps, in place of --warmup-steps."),
    ] = 0.0
    evals_per_epoch: Annotated[
        int,
        Range(0, MAX_STEPS),
        Option("Evaluations per epoch, in place of --eval-steps.", default="see --eval-steps"),
    ] = 0
    saves_per_epoch: Annotated[
        int,
        Range(0, MAX_STEPS),
        Option("Snapshots per epoch, in place of --save-steps.", default="see --save-steps"),
    ] = 0
    train: TrainOptions = field(default_factory=TrainOptions)
    resume: Annotated[
        bool,
        Option(
            "Resume the unfinished run of this same job, from its newest snapshot if necessary.",
            has_no=False,
        ),
    ] = False
    priority: Annotated[
        Priority,
        Option(
            "Priority among your own jobs, from 1 to 9; the highest goes first. Other clients' "
            "jobs are not affected."
        ),
    ] = DEFAULT_PRIORITY
    outputs: Outputs = field(default_factory=Outputs)

    def __post_init__(self) -> None:
        check(self)
        train = self.train
        pairs = (
            ("--warmup-ratio", self.warmup_ratio, "--warmup-steps", train.warmup_steps),
            ("--evals-per-epoch", self.evals_per_epoch, "--eval-steps", train.eval_steps),
            ("--saves-per-epoch", self.saves_per_epoch, "--save-steps", train.save_steps),
        )
        for option, value, other, other_value in pairs:
            if value and other_value:
                raise BadOption(f"{option} {value}: expected it or {other}, got both")
        if self.evals_per_epoch and train.eval_strategy is not EvalStrategy.STEPS:
            raise BadOption("--evals-per-epoch: expected --eval-strategy steps beside it")
        if self.saves_per_epoch and train.save_strategy is not SaveStrategy.STEPS:
            raise BadOption("--saves-per-epoch: expected --save-strategy steps beside it")

    @property
    def datasets(self) -> tuple[str, ...]:
        """Paths and hub ids of `dataset`."""
        paths = (self.dataset,) if isinstance(self.dataset, str) else self.dataset
        return tuple(filter(None, paths))

    @property
    def shares(self) -> tuple[float, ...] | None:
        """Numbers of `probabilities`, one for each dataset.

        Raises:
            BadOption: The text is not such a list of numbers.
        """
        if self.probabilities is None:
            if self.stopping_strategy is not StoppingStrategy.FIRST_EXHAUSTED:
                raise BadOption("--stopping-strategy: expected --probabilities beside it")
            return None
        try:
            shares = tuple(map(float, self.probabilities.split(",")))
        except ValueError:
            shares = ()
        is_whole = abs(sum(shares) - 1.0) < 1e-6 and all(share > 0.0 for share in shares)
        if len(shares) != len(self.datasets) or not is_whole:
            raise BadOption(
                f"--probabilities: expected {len(self.datasets)} numbers above 0 that sum to 1, "
                f"one for each --dataset, as 0.7,0.3; got {self.probabilities!a:.80}"
            )
        return shares

    def train_spec(self, num_samples: int, num_eval_samples: int = 0) -> TrainSpec:
        """Return the parameters of a training on this many samples.

        Shares of steps become numbers of steps, rounded up as in transformers' `TrainingArguments`.

        Raises:
            BadOption: There are too many samples or steps.
        """
        spec = _train_spec(self.train, num_samples, self.epochs, self.steps, num_eval_samples)
        in_epoch = spec.steps_per_epoch
        warmup = math.ceil(self.warmup_ratio * spec.num_steps)
        return replace(
            spec,
            warmup_steps=warmup or spec.warmup_steps,
            eval_steps=_evenly(in_epoch, self.evals_per_epoch) or spec.eval_steps,
            save_steps=_evenly(in_epoch, self.saves_per_epoch) or spec.save_steps,
        )


def _evenly(num_steps: int, times: int) -> int:
    """Return the number of steps between two of `times` events; 0 without events."""
    return math.ceil(num_steps / times) if times else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options of a job to forecast: as `JobOptions`, but without data.

    Raises:
        BadOption: A value is out of its bounds.
    """

    model: Annotated[str, Option("Model of the planned job.", metavar="DIR|HUB_ID")]
    num_samples: Annotated[
        Count, Option("Number of training samples; `client train` counts them itself.")
    ] = 1000
    num_eval_samples: Annotated[
        EvalCount | None,
        Option("Number of held-out samples.", default="256, or all samples if there are fewer"),
    ] = None
    epochs: Annotated[Steps, Option("Number of training epochs.")] = 3
    steps: Annotated[Steps | None, Option("Number of optimizer steps; overrides --epochs.")] = None
    train: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        check(self)

    def train_spec(self) -> TrainSpec:
        """Return the parameters of the training.

        Raises:
            BadOption: There are too many samples or steps.
        """
        held_out = self.num_eval_samples
        if held_out is None:
            held_out = min(TRAINING_TEXT_EVAL_SAMPLES, self.num_samples)
        if self.train.eval_strategy is EvalStrategy.NO:
            held_out = 0
        return _train_spec(self.train, self.num_samples, self.epochs, self.steps, held_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """Options of text generation, named as in `generate` of transformers.

    Raises:
        BadOption: A value is out of its bounds.
    """

    max_new_tokens: Annotated[
        int, Range(1, MAX_TEXT_TOKENS), Option("Maximum number of new tokens.")
    ] = 50
    chat: Annotated[
        bool,
        Option("Apply the model's chat template to the prompt.", has_no=False),
    ] = False
    do_sample: Annotated[bool, Option("Sample each token, or decode greedily.")] = False
    temperature: Annotated[
        Temperature,
        Option("Sampling temperature (--do-sample): below 1 less random, above 1 more."),
    ] = 1.0
    top_k: Annotated[
        TopK, Option("Number of most likely tokens to sample from (--do-sample); 0 for all.")
    ] = 50
    top_p: Annotated[
        TopP, Option("Total probability of the most likely tokens to sample from (--do-sample).")
    ] = 1.0
    seed: Annotated[
        Seed | None, Option("Sampling seed; the same seed gives the same text.", default="random")
    ] = None

    def __post_init__(self) -> None:
        check(self)

    def sampling(self, drawn_seed: int) -> Sampling | None:
        """Return the sampling parameters with a default seed; None for greedy decoding."""
        if not self.do_sample:
            return None
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=drawn_seed if self.seed is None else self.seed,
        )


def _train_spec(
    train: TrainOptions,
    num_samples: int,
    epochs: int,
    steps: int | None,
    num_eval_samples: int = 0,
) -> TrainSpec:
    steps_per_epoch = -(-num_samples // train.batch_size)
    num_steps = epochs * steps_per_epoch if steps is None else steps
    return TrainSpec.of(
        train, num_samples=num_samples, num_steps=num_steps, num_eval_samples=num_eval_samples
    )
