"""One line of the table: a system on a network, what it did, and the least that was possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.lab import Lab
from benchmarks.slow_network.limit import Order, Transfers, step_limit_s
from benchmarks.slow_network.swarm import Setting, measure_swarm
from benchmarks.slow_network.work import Measured, Trial

Measure = Callable[[Lab, Path, Trial], Measured]


@dataclass(frozen=True, kw_only=True)
class System:
    """Something that trains pipelines.

    Attributes:
        name: as an option names it.
        measure: runs it.
        order: of its passes.
        is_uncompressed: sends what it computes, at most rounded to 16 bits.
    """

    name: str
    measure: Measure
    order: Order
    is_uncompressed: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """See the module's docstring.

    Attributes:
        samples_per_s: in the median of the steps that count.
        limit_per_s: what no software passes that sends as many bytes in that order.
    """

    system: str
    trial: Trial
    samples_per_s: float
    limit_per_s: float
    measured: Measured

    @property
    def efficiency(self) -> float:
        """Of the limit."""
        return self.samples_per_s / self.limit_per_s


def swarm_system(codecs: str) -> System:
    """swarm-ft with codecs, see `Setting.parse`."""
    setting = Setting.parse(codecs)
    return System(
        name=codecs,
        measure=lambda lab, folder, trial: measure_swarm(lab, folder, trial, setting),
        order=Order.SPLIT,
        is_uncompressed=setting.fw in ("none", "fp16", "bf16"),
    )


def run_case(system: System, trial: Trial, folder: Path) -> Row:
    """Build a lab, run the system in it, take everything down."""
    with Lab() as lab:
        measured = system.measure(lab, folder, trial)
    return Row(
        system=measured.system,
        trial=trial,
        samples_per_s=trial.work.batch_size / median(measured.step_s),
        limit_per_s=trial.work.batch_size / _limit_s(system, trial, measured),
        measured=measured,
    )


def _limit_s(system: System, trial: Trial, measured: Measured) -> float:
    transfers = Transfers.of(trial.network, measured)
    return step_limit_s(trial.work, trial.network, transfers, system.order)
