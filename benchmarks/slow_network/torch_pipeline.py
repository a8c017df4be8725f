"""PyTorch's own pipelines over a lab's links: torch.distributed.pipelining on Gloo.

A process a stage, each on a host of its own; `torch_worker` is what runs there. Activations and
gradients travel straight to the neighbour, as they are.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version

from benchmarks.lab import Lab, LabProcesses
from benchmarks.slow_network.meter import read_steps
from benchmarks.slow_network.work import Measured, Trial, Work

WORKER = "benchmarks.slow_network.torch_worker"
STEP_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class TorchPipeline:
    """A setting.

    Gloo sends a tensor once its receiver has requested it, and requests wait in line behind what
    is sent the other way. So schedules which receive just before they compute leave links idle:
    all of torch's do, 1F1B most, which requests a gradient behind the activation that it sends.

    Attributes:
        schedule: one of torch's, by its name there; every peer has one stage of it. LoopedBFS is
            then GPipe, and Interleaved1F1B is 1F1B with twice as many microbatches under way.
        dtype: of what travels.
        receive_ahead: request all tensors as a step begins, into the buffers that torch has for
            them anyway. Only where torch keeps receives apart from compute: not for GPipe and 1F1B.
        model: directory of a GPT-2 that is trained; None emulates its time.
    """

    schedule: str = "GPipe"
    dtype: str = "float32"
    receive_ahead: bool = False
    model: str | None = None

    @property
    def value_bytes(self) -> int:
        """The bytes of a value on the wire."""
        return 4 if self.dtype == "float32" else 2

    @property
    def name(self) -> str:
        """The name in a table."""
        ahead = ", receives ahead" if self.receive_ahead else ""
        return f"torch {self.schedule} {self.dtype}{ahead}"


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """The configuration of a worker.

    Attributes:
        rank: of its stage.
        address: of the first host.
        work: as the lab does it; its stages are the world.
    """

    rank: int
    address: str
    work: Work
    setting: TorchPipeline

    def to_json(self) -> str:
        """Encode as an argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StageJob:
        """Parse the text that `to_json` wrote."""
        fields = json.loads(text)
        work, setting = Work(**fields.pop("work")), TorchPipeline(**fields.pop("setting"))
        return cls(work=work, setting=setting, **fields)


def measure_torch_pipeline(lab: Lab, trial: Trial, setting: TorchPipeline) -> Measured:
    """Take one step to warm up and those that count.

    Raises:
        RuntimeError: a worker ended before its time.
        TimeoutError: a step took longer than STEP_TIMEOUT_S.
    """
    work = trial.lab_work
    hosts = [host for (host,) in trial.lab_network.hosts(lab, work)]
    last = f"stage-{work.stages - 1}"
    losses: list[float] = []
    with LabProcesses() as processes:
        for rank, host in enumerate(hosts):
            job = StageJob(rank=rank, address=hosts[0].address, work=work, setting=setting)
            processes.start(f"stage-{rank}", host, WORKER, job.to_json())

        def step() -> float:
            words = processes.request(last, STEP_TIMEOUT_S)
            losses.append(words["loss"])
            return float(words["seconds"])

        step()
        reading = read_steps(lab, hosts, step, trial.steps)
    sent_bytes = trial.work.microbatch_bytes * setting.value_bytes / 4
    return Measured(
        system=setting.name,
        step_s=tuple(map(trial.imitated_s, reading.step_s)),
        cpus_used=reading.cpus_used,
        forward_bytes=sent_bytes,
        backward_bytes=sent_bytes,
        notes={"torch": version("torch"), "sent_bytes": reading.sent_bytes, "losses": losses},
    )
