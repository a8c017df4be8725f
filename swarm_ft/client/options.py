"""What a user asks for, as `client train` and `demo` take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Option, check
from swarm_ft.protocol.spec.run_spec import MAX_STEPS, TrainOptions, TrainSpec

Count = Annotated[int, Range(1)]
Steps = Annotated[int, Range(1, MAX_STEPS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """What the model is judged by. Without held-out text that is the text it is trained on."""

    eval_dataset: Annotated[
        str | None, Option("Held-out UTF-8 text to evaluate on.", metavar="PATH")
    ] = None
    max_eval_samples: Annotated[Count | None, Option("Evaluate on so many samples at most.")] = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """What is written where. Without a trace file nobody records what it would hold."""

    out: Annotated[Path, Option("Where the trained model goes.", metavar="DIR")] = Path(
        "swarm-ft-output"
    )
    json_file: Annotated[
        Path | None, Option("Write a report for programs.", name="json", metavar="FILE")
    ] = None
    trace_file: Annotated[
        Path | None,
        Option(
            "Write what each peer does when, for ui.perfetto.dev.",
            name="trace",
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """One job.

    Raises:
        BadOption: a value is out of its bounds.
    """

    model: Annotated[str, Option("What to fine-tune.", metavar="DIR|HUB_ID")]
    dataset: Annotated[
        str,
        Option("UTF-8 text to train on: a file, or a directory of .txt files.", metavar="PATH"),
    ]
    evaluation: EvalOptions = field(default_factory=EvalOptions)
    epochs: Annotated[Steps, Option("Passes over the data.")] = 3
    steps: Annotated[Steps | None, Option("Optimizer steps; wins over --epochs.")] = None
    train: TrainOptions = field(default_factory=TrainOptions)
    resume: Annotated[
        bool,
        Option(
            "Go on with the unfinished run of this very job, from its newest snapshot if need be.",
            has_no=False,
        ),
    ] = False
    outputs: Outputs = field(default_factory=Outputs)

    def __post_init__(self) -> None:
        check(self)

    def train_spec(self, num_samples: int) -> TrainSpec:
        """How to train on a text of so many samples.

        Raises:
            BadOption: there are too many of them, or of steps.
        """
        steps_per_epoch = -(-num_samples // self.train.batch_size)
        num_steps = self.epochs * steps_per_epoch if self.steps is None else self.steps
        return TrainSpec.of(self.train, num_samples=num_samples, num_steps=num_steps)
