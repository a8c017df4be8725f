"""Progress of a run, as numbers and as one line, and its final report.

Uses run events only; knows no network and no clock. `ProgressState` is the pure part: event in,
state out. `RunProgress` draws it on standard error. `RunReport` is the closing summary and the
`--json` document.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column, Table

from swarm_ft.client.formatting import (
    clock_time,
    format_traffic,
    kind_fields,
    kind_lines,
    printable,
)
from swarm_ft.errors import BadOption, ProtocolError
from swarm_ft.protocol.messages.client import (
    CodecChange,
    CompressionCost,
    Evaluated,
    RunEvent,
    RunPhase,
    RunStatus,
    StepCommitted,
)
from swarm_ft.protocol.messages.events import Rollback, Steered
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic, summed_by_boundary
from swarm_ft.protocol.spec.run_spec import Dtype
from swarm_ft.protocol.spec.tasks import CausalLm, Task, task_of

if TYPE_CHECKING:
    from swarm_ft.client.forecast import Forecast
    from swarm_ft.ids import RunId
    from swarm_ft.protocol.spec.run_spec import TrainSpec

_CAUSAL_LM = CausalLm()
WINDOW_STEPS = 16
"""Number of last steps that speed and ETA are computed from; the set and pace of peers change."""
PLAIN_LINES = 10
"""Number of step lines that a whole run prints without a terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """A committed step, and sums over all committed steps up to it.

    Attributes:
        step: Number of the step; -1 before the first.
        loss: Loss of this step, mean over its target tokens.
        num_samples: Samples visited in all steps.
        seconds: Seconds of all steps, without the time between them.
        traffic: Bytes of each boundary, both directions together, in the order of boundaries.
        sent: All bytes that peers sent to each other, by kind.
    """

    step: int = -1
    loss: float = 0.0
    num_samples: int = 0
    seconds: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    sent: ByteCounts = field(default_factory=ByteCounts)

    def with_step(self, event: StepCommitted) -> StepTotals:
        """Return the sums with one more step."""
        return StepTotals(
            step=event.step,
            loss=event.loss,
            num_samples=self.num_samples + event.num_samples,
            seconds=self.seconds + event.seconds,
            traffic=summed_by_boundary((*self.traffic, *event.traffic)),
            sent=self.sent + event.sent,
        )


_NOTHING = StepTotals()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressState:
    """State of a run after some of its events.

    Attributes:
        totals: One entry for each committed step, step numbers rising.
        evaluations: Evaluations of the held-out samples, steps rising.
        committed_steps: Number of committed steps in the last event.
        detail: Reason why the run waits, if it does; printable characters only.
        result_step: Number of steps in the result if it has the best weights, not the last.
        rollbacks: Rollbacks that happened while this client watched, with their reasons.
        codecs: Changes of codecs, steps rising.
        quality: Measured cost of compression; None if the job sets no quality.
        steered: Requests of people to pause, resume or change the run, oldest first.
    """

    num_steps: int
    totals: tuple[StepTotals, ...] = field(default=(), repr=False)
    evaluations: tuple[Evaluated, ...] = ()
    committed_steps: int = 0
    phase: RunPhase = RunPhase.QUEUED
    detail: str = ""
    result_step: int | None = None
    rollbacks: tuple[Rollback, ...] = ()
    codecs: tuple[CodecChange, ...] = ()
    quality: CompressionCost | None = None
    steered: tuple[Steered, ...] = ()

    def with_event(self, event: RunEvent) -> ProgressState:
        """Return the state after one more event.

        A step that is not above the last one means a rollback, or a replay of all events from the
        first. The state from that step on is discarded.
        """
        if isinstance(event, RunStatus):
            return replace(
                self,
                totals=self._totals_below(event.committed_steps),
                evaluations=self._evaluations_up_to(event.committed_steps),
                committed_steps=event.committed_steps,
                phase=event.phase,
                detail=printable(event.detail),
                result_step=event.result_step,
                codecs=event.codecs,
                quality=event.quality,
                steered=(*self.steered, *self.new_requests(event)),
            )
        if isinstance(event, Rollback):
            return replace(
                self,
                totals=self._totals_below(event.to_step),
                evaluations=self._evaluations_up_to(event.to_step),
                committed_steps=event.to_step,
                rollbacks=(*self.rollbacks, event),
            )
        if isinstance(event, Evaluated):
            before = self._evaluations_up_to(event.step - 1)
            return replace(self, evaluations=(*before, event))
        earlier = self._totals_below(event.step)
        latest = (earlier[-1] if earlier else _NOTHING).with_step(event)
        return replace(
            self,
            totals=(*earlier, latest),
            evaluations=self._evaluations_up_to(event.step),
            committed_steps=event.step + 1,
            phase=RunPhase.TRAINING,
            detail="",
        )

    def new_requests(self, status: RunStatus) -> tuple[Steered, ...]:
        """Return the requests in a status that this state does not have."""
        newest = self.steered[-1].number if self.steered else 0
        return tuple(request for request in status.steered if request.number > newest)

    def _totals_below(self, step: int) -> tuple[StepTotals, ...]:
        stop = len(self.totals)
        while stop and self.totals[stop - 1].step >= step:
            stop -= 1
        return self.totals[:stop]

    def _evaluations_up_to(self, step: int) -> tuple[Evaluated, ...]:
        return tuple(found for found in self.evaluations if found.step <= step)

    @property
    def last(self) -> StepTotals:
        """The last committed step with the sums over all; zeros before the first step."""
        return self.totals[-1] if self.totals else _NOTHING

    @property
    def losses(self) -> tuple[float, ...]:
        """Losses of all committed steps, from step 0 on.

        Raises:
            ProtocolError: The events of a step are missing.
        """
        for number, known in enumerate(self.totals):
            if known.step != number:
                raise ProtocolError(f"run events: expected step {number}, got step {known.step}")
        return tuple(known.loss for known in self.totals)

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None before the first."""
        return self.totals[-1].loss if self.totals else None

    @property
    def samples_per_second(self) -> float:
        """Speed over the last `WINDOW_STEPS` steps; 0 before the first."""
        first, seconds = self._window()
        num_samples = self.last.num_samples - first.num_samples
        return num_samples / seconds if seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds of the remaining steps at the pace of recent ones; None before the first."""
        counted = min(len(self.totals), WINDOW_STEPS)
        if not counted:
            return None
        remaining = max(0, self.num_steps - self.committed_steps)
        return remaining * self._window()[1] / counted

    @property
    def bytes_saved(self) -> int:
        """Bytes that codecs kept off the links, over all boundaries and both directions."""
        return self.last.sent.uncompressed_bytes - self.last.sent.sent_bytes

    @property
    def ratio(self) -> float:
        """Ratio of uncompressed to sent bytes; 1 if nothing was sent."""
        sent = self.last.sent
        return sent.uncompressed_bytes / sent.sent_bytes if sent.sent_bytes else 1.0

    def _window(self) -> tuple[StepTotals, float]:
        """Return the totals before the last `WINDOW_STEPS` steps, and the seconds since then."""
        before = len(self.totals) - 1 - WINDOW_STEPS
        first = self.totals[before] if before >= 0 else _NOTHING
        return first, self.last.seconds - first.seconds

    def line(self) -> str:
        """Return the reason for waiting, or else the numbers, as one line."""
        if self.detail:
            is_training = self.phase is RunPhase.TRAINING
            return self.detail if is_training else self.phase.in_words(self.detail)
        if self.phase is not RunPhase.TRAINING or self.loss is None:
            return self.phase.name.lower()
        return (
            f"loss {self.loss:.3f}  {self.samples_per_second:,.1f} samples/s  "
            f"sent {self.ratio:.1f}x less  ETA {clock_time(self.eta_s)}"
        )


class RunProgress:
    """A progress bar on a terminal while it is `shown`; a line from time to time elsewhere."""

    def __init__(self, spec: TrainSpec, console: Console | None = None) -> None:
        self.state = ProgressState(num_steps=spec.num_steps)
        self.task = task_of(spec)
        self._console = console or Console(stderr=True, highlight=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        # The bar is drawn at each event, so that no display thread races with this process.
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True)),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("", total=spec.num_steps, line="")
        self._last_line = ""
        self._parts_printed = 0
        self._evaluations_printed = 0
        self._listeners: list[Callable[[RunEvent], object]] = []

    @contextmanager
    def display(self) -> Iterator[Self]:
        """Draw the bar, if there is a terminal, as long as the context lasts."""
        with self._bar if self._is_live else nullcontext():
            yield self

    @contextmanager
    def notifying(self, listener: Callable[[RunEvent], object]) -> Iterator[None]:
        """Notify a listener of each event, once the state has it, while the context lasts."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def show_status(self, status: RunStatus) -> None:
        """Show a new phase, a new reason for waiting, and people's requests."""
        requests = self.state.new_requests(status)
        self._take(status)
        for request in requests:
            self._last_line = printable(request.words)
            self.message(self._last_line)
        line = self.state.line()
        # The bar overwrites its own line, so news about peers are printed above it.
        is_news = status.phase is RunPhase.TRAINING and bool(status.detail)
        is_printed = not self._is_live or is_news or status.phase is RunPhase.WAITING
        if is_printed and line != self._last_line:
            self._last_line = line
            self.message(line)
        if self._is_live:
            self._draw()

    def show_step(self, step: StepCommitted) -> None:
        """Show a committed step; without a terminal print about `PLAIN_LINES` of them."""
        self._take(step)
        if self._is_live:
            self._draw()
            return
        done, whole = self.state.committed_steps, self.state.num_steps
        part = done * PLAIN_LINES // whole
        # Replayed events and steps after a rollback are not printed a second time.
        if part > self._parts_printed or (done == 1 and not self._parts_printed):
            self._parts_printed = part
            self.message(f"step {done}/{whole}  {self.state.line()}")

    def show_evaluation(self, found: Evaluated) -> None:
        """Print an evaluation of the held-out samples."""
        self._take(found)
        if len(self.state.evaluations) > self._evaluations_printed:
            self._evaluations_printed = len(self.state.evaluations)
            self.message(f"step {found.step}/{self.state.num_steps}  {eval_line(found, self.task)}")

    def show_rollback(self, event: Rollback) -> None:
        """Print which steps were rolled back, why, and what would have prevented it."""
        self.state = self.state.with_event(event)
        self.message(f"the run {event.words}")

    def message(self, text: str) -> None:
        """Print one line above the bar."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def _take(self, event: RunEvent) -> None:
        self.state = self.state.with_event(event)
        for listener in self._listeners:
            listener(event)

    def _draw(self) -> None:
        self._bar.update(self._task, completed=self.state.committed_steps, line=self.state.line())
        self._bar.refresh()


# ---- what came of it


_LABEL_CHARS = 16
"""Width of the labels in `str(report)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """Outcome of a run; `print(report)` shows it in six lines.

    Attributes:
        run_id: Name of the run.
        losses: Losses of committed steps, mean over target tokens.
        totals: Sums over all committed steps.
        evaluations: Evaluations of the held-out samples, steps rising.
        model_dir: Directory of the exported checkpoint.
        num_steps: Number of steps that the job configured.
        result_step: Number of steps in the result; None means all steps.
        forecast: Forecast from before the run started; None without one.
        rollbacks: Rollbacks that happened while this client watched, with their reasons.
        task: Task of the run.
        codecs: Changes of codecs during the run, steps rising; only the newest if they follow a
            quality.
        quality: Measured cost of compression; None if the job sets no quality.
        steered: Requests of people to pause, resume or change the run, oldest first.
        result_dtype: Stored type of the result's weights; losses are those of float32 weights.
    """

    run_id: RunId
    losses: tuple[float, ...] = field(repr=False)
    totals: StepTotals = field(repr=False)
    evaluations: tuple[Evaluated, ...] = field(repr=False)
    model_dir: str
    num_steps: int | None = None
    result_step: int | None = None
    forecast: Forecast | None = field(default=None, repr=False)
    rollbacks: tuple[Rollback, ...] = field(default=(), repr=False)
    task: Task = field(default=_CAUSAL_LM, repr=False)
    codecs: tuple[CodecChange, ...] = field(default=(), repr=False)
    quality: CompressionCost | None = field(default=None, repr=False)
    steered: tuple[Steered, ...] = field(default=(), repr=False)
    result_dtype: Dtype = Dtype.FLOAT32

    def __str__(self) -> str:
        totals, sent = self.totals, self.sent
        of_all = f" of {self.num_steps}" if self.has_stopped_early else ""
        loss = f"{self.losses[0]:.3f} -> {self.losses[-1]:.3f}" if self.losses else "no step ran"
        lines = {
            str(self.run_id): (
                f"{len(self.losses)}{of_all} steps, {totals.num_samples} samples in "
                f"{totals.seconds:,.1f} s ({self.samples_per_second:.1f} samples/s)"
            ),
            "training loss": loss,
            "evaluation loss": self._evaluation_words(),
            "sent": _sent_in_all(sent),
            "went back": _went_back_words(self.rollbacks) or "never",
            "result": f"{self.model_dir} ({self.steps_in_result} steps)",
        }
        return "\n".join(f"{label:<{_LABEL_CHARS}} {words}" for label, words in lines.items())

    def _evaluation_words(self) -> str:
        before, after = self.eval_before, self.eval_after
        if before is None or after is None:
            return "not evaluated"
        digits = 3 if self.task.num_counts else 1
        metrics = metrics_of(after, self.task)
        words = ", ".join(f"{name} {value:.{digits}f}" for name, value in metrics.items())
        return f"{before.loss:.3f} -> {after.loss:.3f}" + (f" ({words})" if words else "")

    @property
    def sent(self) -> ByteCounts:
        """Bytes that peers sent to each other, by kind, evaluations included."""
        return sum((found.sent for found in self.evaluations), self.totals.sent)

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Bytes of each boundary, evaluations included."""
        of_evaluations = (one for found in self.evaluations for one in found.traffic)
        return summed_by_boundary((*self.totals.traffic, *of_evaluations))

    @property
    def steps_in_result(self) -> int:
        """Number of steps in the result."""
        return len(self.losses) if self.result_step is None else self.result_step

    @property
    def has_stopped_early(self) -> bool:
        """Whether early stopping ended the run."""
        return self.num_steps is not None and len(self.losses) < self.num_steps

    @property
    def eval_before(self) -> Evaluated | None:
        """Evaluation of the base model; None without one."""
        return next((found for found in self.evaluations if found.step == 0), None)

    @property
    def eval_after(self) -> Evaluated | None:
        """Evaluation of the result; None without one."""
        steps = self.steps_in_result
        return next((found for found in self.evaluations if found.step == steps > 0), None)

    @property
    def samples_per_second(self) -> float:
        """Training speed; 0 if no step ran."""
        totals = self.totals
        return totals.num_samples / totals.seconds if totals.seconds > 0 else 0.0

    def to_json(self) -> str:
        """Return the `--json` document; losses and metrics that are not finite become null."""
        document = {
            "run_id": self.run_id,
            "model_dir": self.model_dir,
            "steps": len(self.losses),
            "stopped_early": self.has_stopped_early,
            "result_step": self.steps_in_result,
            "samples": self.totals.num_samples,
            "seconds": self.totals.seconds,
            "samples_per_second": self.samples_per_second,
            "went_back": [asdict(event) for event in self.rollbacks],
            "steered": [_steered_fields(request) for request in self.steered],
            "forecast": _forecast_fields(self.forecast),
            "eval_weights_dtype": Dtype.FLOAT32.name.lower(),
            "result_dtype": self.result_dtype.name.lower(),
            "eval_before": _eval_fields(self.eval_before, self.task),
            "eval": _eval_fields(self.eval_after, self.task),
            "evaluations": [
                {
                    "step": found.step,
                    "samples": found.num_samples,
                    "bytes": found.sent.evaluation_bytes,
                    **(_eval_fields(found, self.task) or {}),
                }
                for found in self.evaluations
            ],
            "eval_samples": sum(found.num_samples for found in self.evaluations),
            "bytes_by_kind": kind_fields(self.sent),
            "relayed_bytes": self.sent.relayed_bytes,
            "codecs": [{"first_step": one.first_step, **asdict(one.codecs)} for one in self.codecs],
            "quality": asdict(self.quality) if self.quality is not None else None,
            "bytes": {
                str(one.boundary): {
                    name.removesuffix("_bytes"): count for name, count in one.counts().items()
                }
                for one in self.traffic
            },
            "losses": [_finite(loss) for loss in self.losses],
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the document to a file atomically.

        Raises:
            BadOption: The file cannot be written.
        """
        partial = path.with_name(f".{path.name}.swarm-ft-partial")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            os.replace(partial, path)
        except OSError as exc:
            partial.unlink(missing_ok=True)
            raise BadOption(f"--json '{path}': cannot be written: {exc.strerror}") from exc

    def summary_lines(self) -> list[str]:
        """Return the summary as plain lines, without the table of bytes."""
        lines, totals = [], self.totals
        if self.losses:
            lines.append(
                f"training loss        {self.losses[0]:.3f} -> {self.losses[-1]:.3f}   "
                f"({len(self.losses)} steps, {totals.num_samples} samples in "
                f"{totals.seconds:.1f} s, {self.samples_per_second:.1f} samples/s)"
            )
        lines += self._end_lines()
        if self.forecast and self.losses:
            low, high = self.forecast.samples_range
            reached = self.samples_per_second
            words = f"{low:.3g} to {high:.3g} samples/s; reached {reached:.3g}"
            lines.append(f"forecast             {words}")
        if self.eval_before and self.eval_after:
            before, after = self.eval_before.loss, self.eval_after.loss
            stored = self.result_dtype
            words = f"   (float32 weights; the result is stored as {stored.name.lower()})"
            note = words if stored is not Dtype.FLOAT32 else ""
            lines.append(f"evaluation loss      {before:.3f} -> {after:.3f}{note}")
            lines += self._metric_lines()
            compressed = self.eval_after.compressed_eval_loss
            if compressed is not None and self.eval_after.eval_loss is not None:
                worth = _compressed(compressed, self.task)
                lines.append(f"... with activations compressed    {worth}")
        lines.append(f"result               {self.model_dir}")
        return lines

    def _end_lines(self) -> list[str]:
        """Return the lines about rollbacks, requests, an early stop, codecs and best weights."""
        lines = []
        if self.rollbacks:
            words = f"{_went_back_words(self.rollbacks)}; see the reasons above"
            lines.append(f"went back            {words}")
        for request in self.steered:
            lines.append(f"steered              {printable(request.words)}")
        if self.has_stopped_early:
            last = f"after step {len(self.losses)} of {self.num_steps}"
            lines.append(f"stopped early        {last}: evaluations did not improve")
        if self.quality is not None:
            lines.append(f"quality              {self.quality}")
        # Codecs that follow a quality change often; only the last change matters to a reader.
        for change in self.codecs if self.quality is None else self.codecs[-1:]:
            words = f"{change.codecs} from step {change.first_step} on"
            lines.append(f"codecs               {words}")
        if self.steps_in_result < len(self.losses):
            lines.append(f"best weights         from step {self.steps_in_result}")
        return lines

    def _metric_lines(self) -> list[str]:
        """Return one line for each metric of the task, before and after."""
        before, after = (
            metrics_of(found, self.task) for found in (self.eval_before, self.eval_after) if found
        )
        digits = 3 if self.task.num_counts else 1
        return [
            f"{name:<20} {before[name]:.{digits}f} -> {after[name]:.{digits}f}"
            for name in after
            if name in before
        ]

    def print_summary(self, console: Console) -> None:
        """Print the bytes of each boundary and each kind, then the summary lines."""
        if self.traffic:
            console.print(_traffic_table(self.traffic))
        for line in kind_lines(self.sent):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in self.summary_lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _sent_in_all(sent: ByteCounts) -> str:
    if not sent.sent_bytes:
        return "nothing"
    ratio = sent.uncompressed_bytes / sent.sent_bytes
    amounts = f"{decimal(sent.sent_bytes)} instead of {decimal(sent.uncompressed_bytes)}"
    return f"{amounts} ({ratio:.1f}x less)"


def _went_back_words(went_back: Sequence[Rollback]) -> str:
    if not went_back:
        return ""
    num_steps = sum(one.from_step - one.to_step for one in went_back)
    times = "once" if len(went_back) == 1 else f"{len(went_back)} times"
    return f"{times}, {num_steps} steps trained again"


def perplexity(loss: float) -> float:
    """Return exp(loss); infinity if that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def eval_line(found: Evaluated, task: Task = _CAUSAL_LM) -> str:
    """Return an evaluation as one line for people."""
    digits = 3 if task.num_counts else 1
    metrics = [f"{name} {value:.{digits}f}" for name, value in metrics_of(found, task).items()]
    line = "  ".join([f"eval_loss {found.loss:.3f}", *metrics])
    compressed = found.compressed_eval_loss
    if found.eval_loss is None:
        return f"{line}, with activations compressed"
    return line + (
        f"  compressed {_compressed(compressed, task)}" if compressed is not None else ""
    )


def _compressed(loss: float, task: Task) -> str:
    """Return a loss with compressed activations, or its perplexity if the task has no metrics."""
    return f"loss {loss:.3f}" if task.num_counts else f"{perplexity(loss):.1f}"


def metrics_of(found: Evaluated, task: Task) -> Mapping[str, float]:
    """Return the metrics of an evaluation by name; perplexity if the task has none of its own."""
    if not task.num_counts:
        return {"perplexity": perplexity(found.loss)}
    return task.metrics(found.counts) if len(found.counts) == task.num_counts else {}


def _eval_fields(found: Evaluated | None, task: Task) -> dict[str, float | None] | None:
    if found is None:
        return None
    metrics = {name: _finite(value) for name, value in metrics_of(found, task).items()}
    fields = {"loss": _finite(found.loss), **metrics}
    compressed = found.compressed_eval_loss
    if compressed is None:
        return fields
    fields["compressed_loss"] = _finite(compressed)
    if not task.num_counts:
        fields["compressed_perplexity"] = _finite(perplexity(compressed))
    return fields


def _forecast_fields(expected: Forecast | None) -> dict[str, Any] | None:
    if expected is None:
        return None
    return {
        "seconds": expected.seconds,
        "seconds_range": [expected.seconds_range.low, expected.seconds_range.high],
        "samples_per_second": expected.samples_per_s,
        "samples_per_second_range": list(expected.samples_range),
        "runs_learned_from": expected.num_learned,
        "shared": list(expected.shared),
        "bound_by": expected.bound_by,
        "evaluation": asdict(expected.evaluation) if expected.evaluation else None,
        "shadows": asdict(expected.shadows) if expected.shadows else None,
    }


def _steered_fields(request: Steered) -> dict[str, Any]:
    return {
        "step": request.step,
        "kind": request.kind.label,
        "actor": request.actor.label,
        "words": request.words,
    }


def _finite(value: float) -> float | None:
    """Return a finite value as it is, and None for others, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def _traffic_table(traffic: Iterable[Traffic]) -> Table:
    # The table has to fit into 80 columns.
    table = Table(
        title="Bytes sent over each boundary, of their uncompressed size",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("boundary", no_wrap=True)
    for name in ("forward", "backward", "key / delta"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in traffic:
        table.add_row(
            str(one.boundary),
            format_traffic(one.forward_bytes, one.forward_uncompressed_bytes),
            format_traffic(one.backward_bytes, one.backward_uncompressed_bytes),
            f"{one.key_frames} / {one.delta_frames}",
        )
    return table
