"""One line of the table: a system on a network, what it did, and the least that was possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.lab import Lab
from benchmarks.slow_network.hivemind_experts import RemoteExperts, measure_hivemind
from benchmarks.slow_network.limit import Order, Transfers, step_limit_s
from benchmarks.slow_network.swarm import Setting, measure_swarm
from benchmarks.slow_network.torch_pipeline import TorchPipeline, measure_torch_pipeline
from benchmarks.slow_network.work import Measured, Trial

SWARM_DILATION = 4.0
"""Eight peers of ours encode and decode on two cores; the others' tensors travel as they are."""
S = TypeVar("S")
Measure = Callable[[Lab, Path, Trial], Measured]


@dataclass(frozen=True, kw_only=True)
class System:
    """Something that trains pipelines.

    Attributes:
        name: as an option names it.
        measure: runs it.
        order: of its passes; None where activations take other ways than from stage to stage, or
            compute is real and its time not known.
        dilation: the default, with which this machine's CPUs do not limit it.
    """

    name: str
    measure: Measure
    order: Order | None
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
        """The speed as a share of the limit."""
        return self.samples_per_s / self.limit_per_s if self.limit_per_s else None


TORCH = {
    "gpipe": TorchPipeline(schedule="GPipe"),
    "gpipe-bf16": TorchPipeline(schedule="GPipe", dtype="bfloat16"),
    "gpipe-ahead": TorchPipeline(schedule="LoopedBFS", receive_ahead=True),
    "gpipe-ahead-bf16": TorchPipeline(schedule="LoopedBFS", dtype="bfloat16", receive_ahead=True),
    "1f1b": TorchPipeline(schedule="1F1B"),
    "1f1b-bf16": TorchPipeline(schedule="1F1B", dtype="bfloat16"),
    "1f1b-ahead": TorchPipeline(schedule="Interleaved1F1B", receive_ahead=True),
    "1f1b-ahead-bf16": TorchPipeline(
        schedule="Interleaved1F1B", dtype="bfloat16", receive_ahead=True
    ),
}
"""Settings of PyTorch's pipelines, by their names as options."""
HIVEMIND = {
    "hivemind-fp16": RemoteExperts(compression="FLOAT16"),
    "hivemind-8bit": RemoteExperts(compression="UNIFORM_8BIT"),
}
"""So too of hivemind's remote modules."""


def system_named(
    name: str, *, model: str | None = None, trace: Path | None = None, tls: bool = True
) -> System:
    """One of TORCH or HIVEMIND, or swarm-ft with codecs, see `Setting.parse`.

    Args:
        name: as an option has it.
        model: directory of a GPT-2 that is trained; None emulates its time.
        trace: where swarm-ft is to write what every peer did when.
        tls: its links are encrypted; others' never are.
    """
    if name in TORCH:
        return _torch_system(name, replace(TORCH[name], model=model))
    if name in HIVEMIND:
        experts = HIVEMIND[name]
        return System(name=name, measure=partial(_in_lab, measure_hivemind, experts), order=None)
    setting = Setting.parse(name, model=model, trace=trace, tls=tls)
    return System(
        name=name,
        measure=lambda lab, folder, trial: measure_swarm(lab, folder, trial, setting),
        order=None if model else Order.SPLIT,
        dilation=1.0 if model else SWARM_DILATION,
    )


def _torch_system(name: str, setting: TorchPipeline) -> System:
    order = Order.GPIPE if name.startswith("gpipe") else Order.ONE_F_ONE_B
    return System(
        name=name,
        measure=partial(_in_lab, measure_torch_pipeline, setting),
        order=None if setting.model else order,
    )


def _in_lab(
    measure: Callable[[Lab, Trial, S], Measured], setting: S, lab: Lab, _folder: Path, trial: Trial
) -> Measured:
    return measure(lab, trial, setting)


def run_case(system: System, trial: Trial, folder: Path) -> Row:
    """Build a lab, run the system in it, take everything down."""
    network = trial.network
    with Lab(network.congestion_control, idle_restart=network.idle_restart) as lab:
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
