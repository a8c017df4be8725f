"""Reporters that log a run's losses and metrics by the names of transformers' Trainer.

`--report-to csv` is implemented here; the others are the real packages, imported on demand. The
coordinator replays events after a restart; they are not logged twice. A step that is trained again
after a rollback is logged again, and its last row counts.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from swarm_ft.client.options import Outputs
from swarm_ft.client.report import metrics_of
from swarm_ft.digest import file_stem
from swarm_ft.errors import BadOption
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import Evaluated, RunEvent, StepCommitted
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.tasks import Task, task_of

PROJECT = "swarm-ft"
"""Project in wandb and trackio unless WANDB_PROJECT or TRACKIO_PROJECT names another."""
REPORTER_PACKAGES = {
    "csv": "",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""Package that each reporter needs."""
TRAIN_METRICS = ("train/loss", "train/grad_norm", "train/learning_rate", "train/epoch")

_PLAIN_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Reporter(Protocol):
    """Interface of a reporter."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values after `step` steps."""

    def close(self) -> None:
        """Flush and close the reporter."""


def parse_reporters(report_to: str) -> tuple[str, ...]:
    """Return the reporters that `--report-to` names, each once.

    Raises:
        BadOption: A name is unknown, or its package is not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for name in report_to.split(",")))
    if names == ("none",):
        return ()
    for name in names:
        if name not in REPORTER_PACKAGES:
            known = ", ".join((*REPORTER_PACKAGES, "none"))
            raise BadOption(f"--report-to: expected some of {known}, got {name!a:.80}")
        package = REPORTER_PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            raise BadOption(
                f"--report-to {name}: its package is not installed; pip install {package}"
            )
    return names


def log_dir(outputs: Outputs, run_id: str) -> Path:
    """Return the directory of a run's log files.

    The directory has the run's name if every file system can hold it, else a digest of the name.
    """
    name = run_id if _PLAIN_NAME.fullmatch(run_id) else f"run-{file_stem(run_id)}"
    out = outputs.out if outputs.out.name.strip(".") else outputs.out.resolve()
    return (outputs.logging_dir or out.with_name(f"{out.name}-runs")) / name


@contextmanager
def open_reporters(
    outputs: Outputs, run_id: str, spec: TrainSpec
) -> Iterator[Callable[[RunEvent], None]]:
    """Open all reporters and yield the function that takes a run's events.

    Raises:
        BadOption: A reporter is unknown or not installed, or a file cannot be written.
    """
    names = parse_reporters(outputs.report_to)
    folder = log_dir(outputs, run_id)
    with ExitStack() as stack:
        reporters = []
        for name in names:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                reporter = _MAKERS[name](folder, run_id, spec)
            except OSError as error:
                where = f"--report-to {name}: {folder}"
                raise BadOption(f"{where}: {error.strerror or error}") from None
            stack.callback(reporter.close)
            reporters.append(reporter)
        yield _EventLogger(spec, reporters).take


class _EventLogger:
    """Converter of events to metrics that logs each event once."""

    def __init__(self, spec: TrainSpec, reporters: list[Reporter]) -> None:
        self._spec, self._task = spec, task_of(spec)
        self._reporters = reporters
        self._seen: dict[tuple[type, int], Mapping[str, float]] = {}
        self._samples: dict[int, int] = {0: 0}
        """Number of visited samples by number of steps."""

    def take(self, event: RunEvent) -> None:
        """Log the metrics of an event, unless it is a replayed one."""
        if isinstance(event, StepCommitted):
            done = event.step + 1
            visited = self._samples.get(event.step, event.step * self._spec.batch_size)
            self._samples[done] = visited + event.num_samples
            epoch = self._samples[done] / max(1, self._spec.num_samples)
            values = _of_step(event, epoch)
        elif isinstance(event, Evaluated):
            done, values = event.step, _of_evaluation(event, self._task)
        else:
            return
        if self._seen.get((type(event), done)) != values:
            self._seen[type(event), done] = values
            for reporter in self._reporters:
                reporter.log(done, values)


def _of_step(event: StepCommitted, epoch: float) -> dict[str, float]:
    numbers = event.loss, event.grad_norm, event.learning_rate, epoch
    return dict(zip(TRAIN_METRICS, numbers, strict=True))


def _of_evaluation(event: Evaluated, task: Task) -> dict[str, float]:
    values = {"eval/loss": event.loss}
    values |= {f"eval/{name}": value for name, value in metrics_of(event, task).items()}
    if event.compressed_eval_loss is not None:
        values["eval/compressed_loss"] = event.compressed_eval_loss
    return values


def event_metrics(event: RunEvent) -> tuple[int, Mapping[str, float]]:
    """Return the number of steps and an event's metrics by the Trainer's names; none for a status.

    Class metrics and the epoch are left out, because the event alone does not determine them.
    """
    if isinstance(event, StepCommitted):
        values = _of_step(event, 0.0)
        del values["train/epoch"]
        return event.step + 1, values
    if isinstance(event, Evaluated):
        return event.step, {"eval/loss": event.loss}
    return 0, {}


# ---- each of them


class _Csv:
    """A row for each step and each evaluation, flushed at once."""

    def __init__(self, folder: Path, _run_id: str, spec: TrainSpec) -> None:
        self._file = (folder / "metrics.csv").open("w", encoding="utf-8", newline="")
        task = task_of(spec)
        known = Evaluated(
            step=StepNumber(0),
            num_samples=1,
            eval_loss=0.0,
            compressed_eval_loss=0.0,
            counts=(1,) * task.num_counts,
        )
        names = _of_evaluation(known, task)
        self._rows = csv.DictWriter(
            self._file, ("step", *TRAIN_METRICS, *names), extrasaction="ignore"
        )
        self._rows.writeheader()
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._rows.writerow({"step": step, **values})
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Tensorboard:
    def __init__(self, folder: Path, _run_id: str, _spec: TrainSpec) -> None:
        self._writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Online:
    """wandb, or trackio with the same functions; our step numbers are a metric of their own."""

    def __init__(self, package: str, run_id: str, spec: TrainSpec) -> None:
        module: Any = importlib.import_module(package)
        project = os.environ.get(f"{package.upper()}_PROJECT", PROJECT)
        config = {
            "num_steps": spec.num_steps,
            "num_samples": spec.num_samples,
            "batch_size": spec.batch_size,
            "learning_rate": spec.learning_rate,
            "forward_codec": spec.forward_codec,
            "backward_codec": spec.backward_codec,
        }
        self._run: Any = module.init(project=project, name=run_id, config=config)
        if hasattr(module, "define_metric"):
            module.define_metric("train/global_step")
            module.define_metric("*", step_metric="train/global_step", step_sync=True)
        self._log: Callable[[dict[str, float]], object] = module.log
        self._finish: Callable[[], object] = module.finish

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._log({**finite, "train/global_step": step})

    def close(self) -> None:
        self._finish()


_MAKERS: Mapping[str, Callable[[Path, str, TrainSpec], Reporter]] = {
    "csv": _Csv,
    "tensorboard": _Tensorboard,
    "wandb": lambda _folder, run_id, spec: _Online("wandb", run_id, spec),
    "trackio": lambda _folder, run_id, spec: _Online("trackio", run_id, spec),
}
