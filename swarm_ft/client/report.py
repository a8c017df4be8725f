"""The closing summary of a run and its `--json` document. Reads no file."""

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

from swarm_ft.errors import BadOption
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic

if TYPE_CHECKING:
    from rich.console import Console

    from swarm_ft.client.evaluate import Evaluation
    from swarm_ft.client.progress import StepTotals
    from swarm_ft.ids import RunId


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What came of a run.

    Attributes:
        losses: one for each step that counts, mean over its target tokens.
        totals: over these steps.
        eval_before: of the held-out text before training; None where there was none.
        eval_after: the same on the exported weights, uncompressed.
        model_dir: the exported checkpoint.
    """

    run_id: RunId
    losses: tuple[float, ...]
    totals: StepTotals
    eval_before: Evaluation | None
    eval_after: Evaluation | None
    model_dir: str

    @property
    def samples_per_second(self) -> float:
        """Training speed; 0 where no step was run."""
        totals = self.totals
        return totals.num_samples / totals.seconds if totals.seconds > 0 else 0.0

    def to_json(self) -> str:
        """The `--json` document; a loss or perplexity that is no finite number becomes null."""
        document = {
            "run_id": self.run_id,
            "model_dir": self.model_dir,
            "steps": len(self.losses),
            "samples": self.totals.num_samples,
            "seconds": self.totals.seconds,
            "samples_per_second": self.samples_per_second,
            "eval_before": _eval_fields(self.eval_before),
            "eval": _eval_fields(self.eval_after),
            "bytes_by_kind": kind_fields(self.totals.sent),
            "bytes": {str(t.boundary): _byte_fields(t) for t in self.totals.traffic},
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
        lines, totals = [], self.totals
        if self.losses:
            lines.append(
                f"training loss        {self.losses[0]:.3f} -> {self.losses[-1]:.3f}   "
                f"({len(self.losses)} steps, {totals.num_samples} samples in "
                f"{totals.seconds:.1f} s, {self.samples_per_second:.1f} samples/s)"
            )
        if self.eval_before and self.eval_after:
            before, after = self.eval_before, self.eval_after
            lines.append(f"evaluation loss      {before.loss:.3f} -> {after.loss:.3f}")
            lines.append(f"perplexity           {before.perplexity:.1f} -> {after.perplexity:.1f}")
        lines.append(f"result               {self.model_dir}")
        return lines

    def print_summary(self, console: Console) -> None:
        """The summary for people: bytes by boundary and by kind as tables, then the lines."""
        if self.totals.traffic:
            console.print(_traffic_table(self.totals.traffic))
        for line in kind_lines(self.totals.sent):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in self.summary_lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)


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
