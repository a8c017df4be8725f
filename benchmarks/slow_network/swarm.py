"""swarm-ft itself on the lab's links: real processes, of which only the compute is emulated."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.lab import Host, Lab, LabSwarm, Link
from benchmarks.lab.homes import Home, Internet
from benchmarks.slow_network.work import Measured, Trial, Work
from swarm_ft.codec.spec import (
    CodecName,
    CodecSpec,
    Direction,
    parse_codec_spec,
    parse_dp_spec,
    parse_key_spec,
)
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.stage.checkpoint import open_checkpoint

PEER = "benchmarks.slow_network.emulated_peer"
JOB = "benchmarks.slow_network.job"
PLAINTEXT = ", plaintext"
"""Behind the name of a setting whose links are not encrypted."""
FILL_MICROBATCHES = DRAIN_MICROBATCHES = 4
"""Of each replica: after so many, links have caught up with stages."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a swarm.

    Attributes:
        dp: between replicas.
        fill: of the activations that fill the pipeline; empty: as fw.
        drain: of the gradients that drain it; empty: as bw.
        model: directory of a GPT-2 that is trained; None emulates its time.
        trace: where to write what every peer did when.
        tls: links are encrypted.
    """

    fw: str
    bw: str
    dp: str = "none"
    key: str = "fp16"
    fill: str = ""
    drain: str = ""
    buffer_bits: int = 16
    model: str | None = None
    trace: Path | None = None
    tls: bool = True

    @classmethod
    def parse(
        cls, text: str, *, model: str | None = None, trace: Path | None = None, tls: bool = True
    ) -> Setting:
        """`FW/BW`, `FW~FILL/BW~DRAIN`, `FW/BW/DP`, or one of them with `@KEY`.

        Raises:
            ValueError: it is none of these.
            BadCodec: it names no codec.
        """
        codecs, _, key = text.partition("@")
        if codecs.count("/") not in {1, 2}:
            raise ValueError(
                f"system '{text}': expected FW[~FILL]/BW[~DRAIN][/DP][@KEY], or another's name"
            )
        forward, backward, dp = (*codecs.split("/"), "none")[:3]
        (fw, fill), (bw, drain) = _parted(forward), _parted(backward)
        for way, named in ((Direction.FORWARD, (fw, fill)), (Direction.BACKWARD, (bw, drain))):
            for codec in filter(None, named):
                parse_codec_spec(codec, way)
        parse_dp_spec(dp)
        parse_key_spec(key or "fp16")
        setting = cls(fw=fw, fill=fill, bw=bw, drain=drain, dp=dp, key=key or "fp16")
        return replace(setting, model=model, trace=trace, tls=tls)

    def __str__(self) -> str:
        fill, drain = (f"~{text}" * bool(text) for text in (self.fill, self.drain))
        dp, key = f"/{self.dp}" * (self.dp != "none"), f"@{self.key}" * self.fw.startswith("aq")
        return f"{self.fw}{fill}/{self.bw}{drain}{dp}{key}{PLAINTEXT * (not self.tls)}"


def _parted(codecs: str) -> tuple[str, str]:
    """Split into a direction's codec and that of its awaited microbatches, empty if none."""
    codec, _, waited_for = codecs.partition("~")
    return codec, waited_for


def measure_swarm(lab: Lab, folder: Path, trial: Trial, setting: Setting) -> Measured:
    """Measure steps of a swarm after its first, which visits every sample for the first time.

    Args:
        folder: for logs; made.
        trial: each of its steps visits all samples there are once.
        setting: how the swarm sends.
    """
    work = trial.lab_work
    with ExitStack() as stack:
        hub, hosts = _hosts(lab, stack, trial)
        swarm = stack.enter_context(LabSwarm(folder, hub, tls=setting.tls))
        for stage, replicas in enumerate(hosts):
            for replica, host in enumerate(replicas):
                name = f"peer-{stage}.{replica}"
                if setting.model is None:
                    _emulate(swarm, name, host, stage, work)
                else:
                    layers = str(_layers(setting.model, work)[stage])
                    swarm.peer(name, host, layers, "--models", str(setting.model))
        used = partial(_cpu_s, lab, (swarm.hub, *chain(*hosts)))
        lines = list(_run_job(swarm, work, setting, trial.steps, used))
    return _measured(lines, setting, trial)


def _hosts(lab: Lab, stack: ExitStack, trial: Trial) -> tuple[Host, list[list[Host]]]:
    """Make the host of coordinator and client, and the hosts of peers."""
    work, network = trial.lab_work, trial.lab_network
    link = Link(delay_ms=network.delay_ms)
    if network.nat is None:
        hosts = network.hosts(lab, work)
        return lab.host(link), hosts
    internet = stack.enter_context(Internet())
    return internet.household(Home("open", link=link)).machines[0], network.homes(internet, work)


def _waited_for_bytes(codec: str, way: Direction, work: Work) -> float | None:
    """Return the bytes of an awaited microbatch; None if it has no codec of its own."""
    if not codec:
        return None
    spec = parse_codec_spec(codec, way)
    values = work.micro_batch_size * work.tokens * work.channels
    return values * bits_per_value(spec) / 8


def bits_per_value(spec: CodecSpec) -> float:
    """Estimate the bits of a value of a sample from its codec's name.

    Steps, headers and tables are left out: they are some hundredths of a bit.

    - `none`, `fp16`, `bf16`: 32 and 16; an entropy stage is taken to save nothing.
    - `qB`, `aqB`: B; with `+z` that is a rate already.
    - `topK`, `aqtopK`: of every hundred values K take 16 bits and their place, which is
      2 + log2(100 / K) bits by Elias and Fano, or one for each value, whichever is less.
    - `qcS`: the entropy of a normal value on a grid of S times its spread, log2(sqrt(2 pi e) / S).
    - `aqcS`: the same, which is the most that a change takes that spreads less than the value.
    - `qkS`, `aqkS`: what they took where models were trained; whatever is emulated.
    """
    match spec.name:
        case CodecName.TOP | CodecName.AQTOP:
            share = spec.number / 100
            return share * 16 + min(1.0, share * (2 + math.log2(1 / share)))
        case CodecName.QC | CodecName.AQC:
            return max(0.0, math.log2(math.sqrt(2 * math.pi * math.e) / spec.number))
        case CodecName.QK | CodecName.AQK:
            return spec.nominal_bits
        case _:
            return spec.number


def _layers(model: str, work: Work) -> Sequence[LayerRange]:
    num_blocks = open_checkpoint(model).describe().num_blocks
    return split_evenly(LayerRange(0, num_blocks), work.stages)


def _emulate(swarm: LabSwarm, name: str, host: Host, stage: int, work: Work) -> None:
    arguments = {
        "--layers": f"{stage}-{stage + 1}",
        "--host": host.address,
        "--peer-id": name,
        "--work": json.dumps(asdict(work)),
    }
    words = [word for pair in arguments.items() for word in pair]
    swarm.start(name, host, (*words, *swarm.ways[Role.PEER]), module=PEER)


def _cpu_s(lab: Lab, hosts: Iterable[Host]) -> float:
    return sum(map(lab.cpu_s, hosts))


def _run_job(
    swarm: LabSwarm, work: Work, setting: Setting, steps: int, cpu_s: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Run the job; yield its report on each step, with the CPU seconds of all processes."""
    train = {
        "num_steps": steps + 1,
        "forward_codec": setting.fw,
        "backward_codec": setting.bw,
        "key_codec": setting.key,
        "dp_codec": setting.dp,
        "fill_codec": setting.fill,
        "fill_microbatches": FILL_MICROBATCHES * work.replicas,
        "drain_codec": setting.drain,
        "drain_microbatches": DRAIN_MICROBATCHES * work.replicas,
        "buffer_bits": setting.buffer_bits,
    }
    arguments = [
        *swarm.client_way,
        "--work",
        json.dumps(asdict(work)),
        "--train",
        json.dumps(train),
    ]
    arguments += ["--model", setting.model] if setting.model else []
    arguments += ["--trace", str(setting.trace.absolute())] if setting.trace else []
    process = swarm.begin("job", swarm.hub, arguments, module=JOB)
    for line in process.stdout or ():
        yield {**json.loads(line), "cpu_s": cpu_s(), "now_s": time.monotonic()}
    if process.wait():
        log = (swarm.folder / "job.log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(
            f"the job failed: {(log.strip().splitlines() or ['it does not say why'])[-1]}"
        )


def _measured(lines: list[dict[str, Any]], setting: Setting, trial: Trial) -> Measured:
    first, *later = lines
    wall_s = later[-1]["now_s"] - first["now_s"]
    return Measured(
        system=f"swarm-ft {setting}",
        step_s=tuple(trial.imitated_s(line["seconds"]) for line in later),
        cpus_used=(later[-1]["cpu_s"] - first["cpu_s"]) / wall_s,
        forward_bytes=trial.imitated_bytes(later[-1]["forward_bytes"]),
        backward_bytes=trial.imitated_bytes(later[-1]["backward_bytes"]),
        fill_bytes=_waited_for_bytes(setting.fill, Direction.FORWARD, trial.work),
        drain_bytes=_waited_for_bytes(setting.drain, Direction.BACKWARD, trial.work),
        gradient_bytes=later[-1]["gradient_bytes"] * trial.scale.shrink / trial.work.num_peers,
        notes={
            "losses": [line["loss"] for line in lines],
            "first_epoch_step_s": trial.imitated_s(first["seconds"]),
            "first_epoch_forward_bytes": trial.imitated_bytes(first["forward_bytes"]),
        },
    )
