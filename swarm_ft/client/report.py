"""The closing summary of a run and its `--json` document. Knows run events, reads no file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table

from swarm_ft.errors import BadOption, ProtocolError
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic, summed_by_boundary

if TYPE_CHECKING:
    from rich.console import Console

    from swarm_ft.client.evaluate import Evaluation
    from swarm_ft.ids import RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What came of a run.

    Attributes:
        losses: one for each step that counts, mean over its target tokens.
        samples: samples visited, over all steps.
        seconds: of all steps that count; waiting between them is not in it.
        traffic: both sides of each boundary together, boundaries rising.
        sent: everything that peers sent each other, by kind.
        eval_before: of the held-out text before training; None where there was none.
        eval_after: the same on the exported weights, uncompressed.
        model_dir: the exported checkpoint.
    """

    run_id: RunId
    losses: tuple[float, ...]
    samples: int
    seconds: float
    traffic: tuple[Traffic, ...]
    sent: ByteCounts
    eval_before: Evaluation | None
    eval_after: Evaluation | None
    model_dir: str

    @classmethod
    def build(
        cls,
        events: Iterable[RunEvent],
        *,
        run_id: RunId,
        eval_before: Evaluation | None,
        eval_after: Evaluation | None,
        model_dir: str,
    ) -> RunReport:
        """The report of a run whose events arrived in this order.

        Raises:
            ProtocolError: a step that counts was never told.
        """
        steps = counted_steps(events)
        return cls(
            run_id=run_id,
            losses=tuple(step.loss for step in steps),
            samples=sum(step.num_samples for step in steps),
            seconds=sum(step.seconds for step in steps),
            traffic=summed_by_boundary(one for step in steps for one in step.traffic),
            sent=sum((step.sent for step in steps), ByteCounts()),
            eval_before=eval_before,
            eval_after=eval_after,
            model_dir=model_dir,
        )

    @property
    def samples_per_second(self) -> float:
        """Training speed; 0 where no step was run."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        """The `--json` document; a loss or perplexity that is no finite number becomes null."""
        document = {
            "run_id": self.run_id,
            "model_dir": self.model_dir,
            "steps": len(self.losses),
            "samples": self.samples,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "eval_before": _eval_fields(self.eval_before),
            "eval": _eval_fields(self.eval_after),
            "bytes_by_kind": kind_fields(self.sent),
            "bytes": {str(t.boundary): _byte_fields(t) for t in self.traffic},
            "losses": [_finite(loss) for loss in self.losses],
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the document whole or not at all.

        Raises:
            BadOption: the file cannot be written.
        """
        partial = path.with_name(f".{path.name}.swarm-ft-partial")
        try:
            partial.write_text(self.to_json(), encoding="utf-8")
            os.replace(partial, path)
        except OSError as exc:
            partial.unlink(missing_ok=True)
            raise BadOption(f"--json '{path}': cannot be written: {exc.strerror}") from exc

    def summary_lines(self) -> list[str]:
        """The summary in plain lines, without the table of bytes."""
        lines = []
        if self.losses:
            lines.append(
                f"training loss        {self.losses[0]:.3f} -> {self.losses[-1]:.3f}   "
                f"({len(self.losses)} steps, {self.samples} samples in {self.seconds:.1f} s, "
                f"{self.samples_per_second:.1f} samples/s)"
            )
        if self.eval_before and self.eval_after:
            before, after = self.eval_before, self.eval_after
            lines.append(f"evaluation loss      {before.loss:.3f} -> {after.loss:.3f}")
            lines.append(f"perplexity           {before.perplexity:.1f} -> {after.perplexity:.1f}")
        lines.append(f"result               {self.model_dir}")
        return lines

    def print_summary(self, console: Console) -> None:
        """The summary for people: bytes by boundary and by kind as tables, then the lines."""
        if self.traffic:
            console.print(_traffic_table(self.traffic))
        for line in kind_lines(self.sent):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in self.summary_lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def counted_steps(events: Iterable[RunEvent]) -> tuple[StepCommitted, ...]:
    """Steps that count in the end, from 0 on, without a gap.

    A step not above the last one means that the run went back, or that it is told again from
    its beginning: what was known from that step on is void.

    Raises:
        ProtocolError: a step is missing.
    """
    steps: list[StepCommitted] = []
    for event in events:
        if not isinstance(event, StepCommitted):
            continue
        if event.step > len(steps):
            raise ProtocolError(f"run events: expected step {len(steps)}, got step {event.step}")
        del steps[event.step :]
        steps.append(event)
    return tuple(steps)


def _byte_fields(traffic: Traffic) -> dict[str, int]:
    return {
        "forward": traffic.forward_bytes,
        "backward": traffic.backward_bytes,
        "forward_uncompressed": traffic.forward_uncompressed_bytes,
        "backward_uncompressed": traffic.backward_uncompressed_bytes,
        "key_frames": traffic.key_frames,
        "delta_frames": traffic.delta_frames,
    }


def kind_fields(sent: ByteCounts) -> dict[str, dict[str, int]]:
    """Sent and uncompressed bytes of each kind, for JSON."""
    return {
        name: {"sent": sent_bytes, "uncompressed": uncompressed_bytes}
        for name, sent_bytes, uncompressed_bytes in _kinds(sent)
    }


def kind_lines(sent: ByteCounts) -> list[str]:
    """A line for each kind of bytes of which there were any, and one for all if several."""
    kinds = [kind for kind in _kinds(sent) if kind[2]]
    if len(kinds) > 1:
        kinds.append(("everything", sent.sent_bytes, sent.uncompressed_bytes))
    return [f"{name:<20} {_sent(own, plain)}" for name, own, plain in kinds]


def _kinds(sent: ByteCounts) -> tuple[tuple[str, int, int], ...]:
    return (
        ("forward", sent.forward_bytes, sent.forward_uncompressed_bytes),
        ("backward", sent.backward_bytes, sent.backward_uncompressed_bytes),
        ("gradients", sent.gradient_bytes, sent.gradient_uncompressed_bytes),
        ("state", sent.state_bytes, sent.state_bytes),
    )


def _eval_fields(evaluation: Evaluation | None) -> dict[str, float | None] | None:
    if evaluation is None:
        return None
    return {"loss": _finite(evaluation.loss), "perplexity": _finite(evaluation.perplexity)}


def _finite(value: float) -> float | None:
    """JSON has no inf and no NaN."""
    return value if math.isfinite(value) else None


def _traffic_table(traffic: Iterable[Traffic]) -> Table:
    # Narrow enough for 80 columns.
    table = Table(
        title="Bytes sent over each boundary, of uncompressed ones",
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
            _sent(one.forward_bytes, one.forward_uncompressed_bytes),
            _sent(one.backward_bytes, one.backward_uncompressed_bytes),
            f"{one.key_frames} / {one.delta_frames}",
        )
    return table


def _sent(sent_bytes: int, uncompressed_bytes: int) -> str:
    ratio = f" {uncompressed_bytes / sent_bytes:.1f}x" if sent_bytes else ""
    return f"{decimal(sent_bytes)} of {decimal(uncompressed_bytes)}{ratio}"
