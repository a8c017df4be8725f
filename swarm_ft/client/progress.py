"""How a run goes, as numbers and as one line. Knows run events, no wire and no clock.

`ProgressState` is the pure part: event in, state out. `RunProgress` draws it on standard error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from swarm_ft.errors import ProtocolError
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic, summed_by_boundary

if TYPE_CHECKING:
    from swarm_ft.protocol.spec.run_spec import TrainSpec

WINDOW_STEPS = 16
"""Speed and ETA come from this many last steps: peers come, go and change their pace."""
PLAIN_LINES = 10
"""Lines of steps that a whole run prints where there is no terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTotals:
    """A step that counts, and sums over all of them up to and with it.

    Attributes:
        loss: of this step, mean over its target tokens.
        num_samples: visited.
        seconds: of the steps; waiting between them is not in it.
        traffic: both sides of each boundary together, boundaries rising.
        sent: everything that peers sent each other, by kind.
    """

    step: int = -1
    loss: float = 0.0
    num_samples: int = 0
    seconds: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    sent: ByteCounts = field(default_factory=ByteCounts)

    def and_then(self, event: StepCommitted) -> StepTotals:
        """The sums with one more step."""
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
    """What is known of a run after some of its events.

    Attributes:
        totals: one for each step that counts, step numbers rising.
        committed_steps: steps that count, as last heard.
        detail: what the run waits for, if it does; printable characters only.
    """

    num_steps: int
    seq_length: int
    totals: tuple[StepTotals, ...] = field(default=(), repr=False)
    committed_steps: int = 0
    phase: RunPhase = RunPhase.QUEUED
    detail: str = ""

    def after(self, event: RunEvent) -> ProgressState:
        """The state after one more event.

        A step not above the last one means that the run went back, or that it is told again
        from its beginning: what was known from that step on is void.
        """
        if isinstance(event, RunStatus):
            return replace(
                self,
                totals=self._totals_below(event.committed_steps),
                committed_steps=event.committed_steps,
                phase=event.phase,
                detail=_printable(event.detail),
            )
        kept = self._totals_below(event.step)
        latest = (kept[-1] if kept else _NOTHING).and_then(event)
        return replace(
            self,
            totals=(*kept, latest),
            committed_steps=event.step + 1,
            phase=RunPhase.TRAINING,
            detail="",
        )

    def _totals_below(self, step: int) -> tuple[StepTotals, ...]:
        stop = len(self.totals)
        while stop and self.totals[stop - 1].step >= step:
            stop -= 1
        return self.totals[:stop]

    @property
    def last(self) -> StepTotals:
        """The last step that counts, and the sums over all; of nothing before the first."""
        return self.totals[-1] if self.totals else _NOTHING

    @property
    def losses(self) -> tuple[float, ...]:
        """Of all steps that count, from 0 on.

        Raises:
            ProtocolError: a step was never told.
        """
        for number, known in enumerate(self.totals):
            if known.step != number:
                raise ProtocolError(f"run events: expected step {number}, got step {known.step}")
        return tuple(known.loss for known in self.totals)

    @property
    def loss(self) -> float | None:
        """Of the last step; None before the first."""
        return self.totals[-1].loss if self.totals else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained a second, over the last `WINDOW_STEPS`; 0 before the first step."""
        first, seconds = self._window()
        num_samples = self.last.num_samples - first.num_samples
        return num_samples * self.seq_length / seconds if seconds > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds that the steps to come take at the pace of the last ones; None if unknown."""
        counted = min(len(self.totals), WINDOW_STEPS)
        if not counted:
            return None
        remaining = max(0, self.num_steps - self.committed_steps)
        return remaining * self._window()[1] / counted

    @property
    def bytes_saved(self) -> int:
        """What the codecs kept off the links, over all boundaries, both ways."""
        return self.last.sent.uncompressed_bytes - self.last.sent.sent_bytes

    @property
    def ratio(self) -> float:
        """Uncompressed bytes to sent ones; 1 where nothing was sent."""
        sent = self.last.sent
        return sent.uncompressed_bytes / sent.sent_bytes if sent.sent_bytes else 1.0

    def _window(self) -> tuple[StepTotals, float]:
        """The totals before the last `WINDOW_STEPS` steps, and the seconds since."""
        before = len(self.totals) - 1 - WINDOW_STEPS
        first = self.totals[before] if before >= 0 else _NOTHING
        return first, self.last.seconds - first.seconds

    def line(self) -> str:
        """The state in words: what is waited for, or else the numbers."""
        if self.detail:
            return self.detail
        if self.phase is not RunPhase.TRAINING or self.loss is None:
            return self.phase.name.lower()
        saved = decimal(max(0, self.bytes_saved))
        return (
            f"loss {self.loss:.3f}  {self.tokens_per_second:,.0f} tok/s  "
            f"saved {saved} ({self.ratio:.1f}x)  ETA {_clock_time(self.eta_s)}"
        )


class RunProgress:
    """A progress bar on a terminal, a line now and then elsewhere. Use it in a `with`."""

    def __init__(self, spec: TrainSpec, console: Console | None = None) -> None:
        self.state = ProgressState(num_steps=spec.num_steps, seq_length=spec.seq_length)
        self._console = console or Console(stderr=True, highlight=False)
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        # Drawn at each event, so that no thread of the display outlives or races us.
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
        self._parts_told = 0

    def __enter__(self) -> Self:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_live:
            self._bar.stop()

    def show_status(self, status: RunStatus) -> None:
        """The run moved to another phase, or waits for something else."""
        self.state = self.state.after(status)
        line = self.state.line()
        # Who is gone, waited for or joins stays to be read when the bar tells of other things.
        is_news = status.phase is RunPhase.TRAINING and bool(status.detail)
        is_told = not self._is_live or is_news or status.phase is RunPhase.WAITING
        if is_told and line != self._last_line:
            self._last_line = line
            self.message(line)
        if self._is_live:
            self._draw()

    def show_step(self, step: StepCommitted) -> None:
        """A step counts. Without a terminal, about every tenth part of the run is told."""
        self.state = self.state.after(step)
        if self._is_live:
            self._draw()
            return
        done, whole = self.state.committed_steps, self.state.num_steps
        part = done * PLAIN_LINES // whole
        # A run that is told again, or that went back, is not printed again.
        if part > self._parts_told or (done == 1 and not self._parts_told):
            self._parts_told = part
            self.message(f"step {done}/{whole}  {self.state.line()}")

    def message(self, text: str) -> None:
        """One line above the bar."""
        self._console.print(_printable(text), markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        self._bar.update(self._task, completed=self.state.committed_steps, line=self.state.line())
        self._bar.refresh()


def _printable(text: str) -> str:
    """`text` without what could steer a terminal: parts of it come from other machines."""
    return "".join(c if c.isprintable() else " " for c in text)


def _clock_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"
