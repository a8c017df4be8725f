"""swarm-ft itself on the lab's links: real processes, of which only the compute is emulated."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab import Host, Lab, LabSwarm, Link
from benchmarks.slow_network.processes import cpu_s
from benchmarks.slow_network.work import Measured, Trial, Work

PEER = "benchmarks.slow_network.emulated_peer"
JOB = "benchmarks.slow_network.job"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a swarm sends what it sends.

    Attributes:
        dp: between replicas.
        num_values: of a stage's gradient, which replicas sum.
    """

    fw: str
    bw: str
    key: str = "fp16"
    buffer_bits: int = 16
    dp: str = "none"
    replicas: int = 1
    num_values: int = 1

    def __str__(self) -> str:
        dp = f"/{self.dp}" if self.replicas > 1 else ""
        key = f"@{self.key}" if self.fw.startswith("aq") else ""
        return f"swarm-ft {self.fw}/{self.bw}{dp}{key}"


def measure_swarm(lab: Lab, folder: Path, trial: Trial, setting: Setting) -> Measured:
    """Steps of a swarm after its first, in which every sample is visited for the first time.

    Args:
        folder: for logs; made.
        trial: each of its steps visits all samples there are once.
        setting: how the swarm sends.
    """
    work, network, dilation = trial.work, trial.network, trial.dilation
    hosts = network.hosts(lab, work.stages, replicas=setting.replicas, dilation=dilation)
    hub = lab.host(Link(delay_ms=network.delay_ms * dilation))
    with LabSwarm(folder, hub) as swarm:
        for stage, replicas in enumerate(hosts):
            for replica, host in enumerate(replicas):
                peer = _Peer(f"peer-{stage}.{replica}", host, stage)
                _start(swarm, peer, work.dilated(dilation), setting)
        lines = list(_run_job(swarm, work, setting, trial.steps))
    return _measured(lines, setting, trial)


@dataclass(frozen=True)
class _Peer:
    name: str
    host: Host
    stage: int


def _start(swarm: LabSwarm, peer: _Peer, work: Work, setting: Setting) -> None:
    arguments = {
        "--layers": f"{peer.stage}-{peer.stage + 1}",
        "--initial-peers": swarm.initial_peers,
        "--host": peer.host.address,
        "--peer-id": peer.name,
        "--work": json.dumps(asdict(work)),
        "--num-values": str(setting.num_values),
    }
    words = [word for pair in arguments.items() for word in pair]
    swarm.start(peer.name, peer.host, words, module=PEER)


def _run_job(swarm: LabSwarm, work: Work, setting: Setting, steps: int) -> Iterator[dict[str, Any]]:
    """What the job printed of each step, and the CPU seconds of all processes by then."""
    train = {
        "num_samples": work.batch_size,
        "seq_length": work.tokens,
        "batch_size": work.batch_size,
        "micro_batch_size": work.micro_batch_size,
        "num_steps": steps + 1,
        "forward_codec": setting.fw,
        "backward_codec": setting.bw,
        "key_codec": setting.key,
        "dp_codec": setting.dp,
        "buffer_bits": setting.buffer_bits,
    }
    spec = json.dumps({"blocks": work.stages, "channels": work.channels, "train": train})
    arguments = ("--initial-peers", swarm.initial_peers, "--spec", spec)
    process = swarm.begin("job", swarm.hub, arguments, module=JOB)
    pids = [process.pid for process in swarm.processes.values()]
    for line in process.stdout or ():
        yield {**json.loads(line), "cpu_s": cpu_s(pids), "now_s": time.monotonic()}
    if process.wait():
        raise RuntimeError(f"the job failed; see {swarm.folder / 'job.log'}")


def _measured(lines: list[dict[str, Any]], setting: Setting, trial: Trial) -> Measured:
    first, *later = lines
    wall_s = later[-1]["now_s"] - first["now_s"]
    return Measured(
        system=str(setting),
        dilation=trial.dilation,
        step_s=tuple(line["seconds"] / trial.dilation for line in later),
        cpus_used=(later[-1]["cpu_s"] - first["cpu_s"]) / wall_s,
        forward_bytes=later[-1]["forward_bytes"] / trial.crossings,
        backward_bytes=later[-1]["backward_bytes"] / trial.crossings,
        notes={
            "first_epoch_step_s": first["seconds"] / trial.dilation,
            "first_epoch_forward_bytes": first["forward_bytes"] / trial.crossings,
            "gradient_bytes": later[-1]["gradient_bytes"],
        },
    )
