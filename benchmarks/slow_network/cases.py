"""One line of the table: a system on a network, what it did, and the least that was possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.lab import Lab
from benchmarks.slow_network.hivemind_experts import RemoteExperts, measure_hivemind
from benchmarks.slow_network.limit import Order, Transfers, step_limit_s
from benchmarks.slow_network.swarm import Setting, measure_swarm
from benchmarks.slow_network.torch_pipeline import TorchPipeline, measure_torch_pipeline
from benchmarks.slow_network.work import Measured, Trial

SWARM_DILATION = 4.0
"""Eight peers of ours encode and decode on two cores; the others' tensors travel as they are."""
Measure = Callable[[Lab, Path, Trial], Measured]


@dataclass(frozen=True, kw_only=True)
class System:
    """Something that trains pipelines.

    Attributes:
        name: as an option names it.
        measure: runs it.
        order: of its passes; None where activations take other ways than from stage to stage.
        is_uncompressed: sends what it computes, at most rounded to 16 bits.
        dilation: with which this machine's CPUs are not what limits it, if not told otherwise.
    """

    name: str
    measure: Measure
    order: Order | None
    is_uncompressed: bool
    dilation: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """See the module's docstring.

    Attributes:
        samples_per_s: in the median of the steps that count.
        limit_per_s: what no software passes that sends as many bytes in that order, if it has one.
    """

    system: str
    trial: Trial
    samples_per_s: float
    limit_per_s: float | None
    measured: Measured

    @property
    def efficiency(self) -> float | None:
        """Of the limit."""
        return self.samples_per_s / self.limit_per_s if self.limit_per_s else None


def swarm_system(codecs: str) -> System:
    """swarm-ft with codecs, see `Setting.parse`."""
    setting = Setting.parse(codecs)
    return System(
        name=codecs,
        measure=lambda lab, folder, trial: measure_swarm(lab, folder, trial, setting),
        order=Order.SPLIT,
        is_uncompressed=setting.fw in ("none", "fp16", "bf16"),
        dilation=SWARM_DILATION,
    )


def torch_system(schedule: str, dtype: str, order: Order, *, ahead: bool = False) -> System:
    """PyTorch's own pipeline."""
    setting = TorchPipeline(schedule=schedule, dtype=dtype, receive_ahead=ahead)
    return System(
        name=setting.name,
        measure=lambda lab, _folder, trial: measure_torch_pipeline(lab, trial, setting),
        order=order,
        is_uncompressed=True,
    )


def hivemind_system(compression: str) -> System:
    """Hivemind's remote modules."""
    setting = RemoteExperts(compression=compression)
    return System(
        name=setting.name,
        measure=lambda lab, _folder, trial: measure_hivemind(lab, trial, setting),
        order=None,
        is_uncompressed=False,
    )


OTHERS = {
    "gpipe": torch_system("GPipe", "float32", Order.GPIPE),
    "gpipe-bf16": torch_system("GPipe", "bfloat16", Order.GPIPE),
    "gpipe-ahead": torch_system("LoopedBFS", "float32", Order.GPIPE, ahead=True),
    "1f1b": torch_system("1F1B", "float32", Order.ONE_F_ONE_B),
    "1f1b-bf16": torch_system("1F1B", "bfloat16", Order.ONE_F_ONE_B),
    "1f1b-ahead": torch_system("Interleaved1F1B", "float32", Order.ONE_F_ONE_B, ahead=True),
    "1f1b-ahead-bf16": torch_system("Interleaved1F1B", "bfloat16", Order.ONE_F_ONE_B, ahead=True),
    "hivemind-fp16": hivemind_system("FLOAT16"),
    "hivemind-8bit": hivemind_system("UNIFORM_8BIT"),
}
"""Systems that are not ours, by their names as options."""


def system_named(name: str) -> System:
    """One of OTHERS, or swarm-ft with codecs."""
    return OTHERS.get(name) or swarm_system(name)


def run_case(system: System, trial: Trial, folder: Path) -> Row:
    """Build a lab, run the system in it, take everything down."""
    with Lab() as lab:
        measured = system.measure(lab, folder, trial)
    return Row(
        system=measured.system,
        trial=trial,
        samples_per_s=trial.work.batch_size / median(measured.step_s),
        limit_per_s=_limit_per_s(system, trial, measured),
        measured=measured,
    )


def _limit_per_s(system: System, trial: Trial, measured: Measured) -> float | None:
    if system.order is None:
        return None
    transfers = Transfers.of(trial.network, measured)
    limit_s = step_limit_s(trial.work, trial.network, transfers, system.order)
    return trial.work.batch_size / limit_s
