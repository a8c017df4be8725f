"""swarm-ft itself on the lab's links: real processes, of which only the compute is emulated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.lab import Host, Lab, LabSwarm, Link
from benchmarks.slow_network.work import Measured, Trial, Work

PEER = "benchmarks.slow_network.emulated_peer"
JOB = "benchmarks.slow_network.job"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a swarm sends what it sends.

    Attributes:
        dp: between replicas.
    """

    fw: str
    bw: str
    dp: str = "none"
    key: str = "fp16"
    buffer_bits: int = 16

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`FW/BW`, `FW/BW/DP`, or one of them with `@KEY`."""
        codecs, _, key = text.partition("@")
        fw, bw, dp = (*codecs.split("/"), "none")[:3]
        return cls(fw=fw, bw=bw, dp=dp, key=key or "fp16")


def measure_swarm(lab: Lab, folder: Path, trial: Trial, setting: Setting) -> Measured:
    """Steps of a swarm after its first, in which every sample is visited for the first time.

    Args:
        folder: for logs; made.
        trial: each of its steps visits all samples there are once.
        setting: how the swarm sends.
    """
    work, network = trial.lab_work, trial.lab_network
    hosts = network.hosts(lab, work)
    with LabSwarm(folder, lab.host(Link(delay_ms=network.delay_ms))) as swarm:
        for stage, replicas in enumerate(hosts):
            for replica, host in enumerate(replicas):
                _start_peer(swarm, f"peer-{stage}.{replica}", host, stage, work)
        used = partial(_cpu_s, lab, (swarm.hub, *chain(*hosts)))
        lines = list(_run_job(swarm, work, setting, trial.steps, used))
    return _measured(lines, setting, trial)


def _start_peer(swarm: LabSwarm, name: str, host: Host, stage: int, work: Work) -> None:
    arguments = {
        "--layers": f"{stage}-{stage + 1}",
        "--initial-peers": swarm.initial_peers,
        "--host": host.address,
        "--peer-id": name,
        "--work": json.dumps(asdict(work)),
    }
    words = [word for pair in arguments.items() for word in pair]
    swarm.start(name, host, words, module=PEER)


def _cpu_s(lab: Lab, hosts: Iterable[Host]) -> float:
    return sum(map(lab.cpu_s, hosts))


def _run_job(
    swarm: LabSwarm, work: Work, setting: Setting, steps: int, cpu_s: Callable[[], float]
) -> Iterator[dict[str, Any]]:
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
    for line in process.stdout or ():
        yield {**json.loads(line), "cpu_s": cpu_s(), "now_s": time.monotonic()}
    if process.wait():
        raise RuntimeError(f"the job failed; see {swarm.folder / 'job.log'}")


def _measured(lines: list[dict[str, Any]], setting: Setting, trial: Trial) -> Measured:
    first, *later = lines
    wall_s = later[-1]["now_s"] - first["now_s"]
    dp = f"/{setting.dp}" if trial.work.replicas > 1 else ""
    key = f"@{setting.key}" if setting.fw.startswith("aq") else ""
    return Measured(
        system=f"swarm-ft {setting.fw}/{setting.bw}{dp}{key}",
        step_s=tuple(trial.imitated_s(line["seconds"]) for line in later),
        cpus_used=(later[-1]["cpu_s"] - first["cpu_s"]) / wall_s,
        forward_bytes=trial.imitated_bytes(later[-1]["forward_bytes"]),
        backward_bytes=trial.imitated_bytes(later[-1]["backward_bytes"]),
        gradient_bytes=later[-1]["gradient_bytes"] * trial.scale.shrink / trial.work.num_peers,
        notes={
            "first_epoch_step_s": trial.imitated_s(first["seconds"]),
            "first_epoch_forward_bytes": trial.imitated_bytes(first["forward_bytes"]),
        },
    )
