"""A real swarm on one GPU over paced links, beside torch's pipelines and published rows.

Stages share the GPU, which takes turns between them: tokens a second are those of one GPU with all
stages' work. Links carry what two neighbours send each other and are paced in user space, alike on
every machine: bytes of TCP's payload, both directions each at the rate.
"""

from __future__ import annotations

import json
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.processes import Processes, free_ports
from benchmarks.gpu.report import Row, ratio
from benchmarks.gpu.stages import gpt2, llama, save_random, spec_of
from benchmarks.gpu.swarm_run import Cell, cells, streamed, swarm_up
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, LrSchedule, RunSpec
from swarm_ft.stage.checkpoint import open_checkpoint

RATES_MBPS = (100.0, 1000.0, 500.0, 300.0, 10_000.0, 25.0, 10.0)
"""The most telling first, the slowest last."""
REHEARSED_MBPS = (0.0, 10.0)
PUBLISHED_MBPS = (1000.0, 500.0, 300.0, 100.0)
PUBLISHED: Mapping[str, tuple[int, ...]] = {
    "FP32": (2600, 2482, 1761, 751),
    "AQ-SGD": (4749, 4311, 4369, 3310),
    "TAH-Quant": (5650, 5749, 5120, 4045),
}
"""Tokens a second, arXiv 2506.01352, of eight stages of GPT-2 XL on GPUs of their own."""
CODECS: Mapping[str, dict[str, Any]] = {
    "aq3+z / q3+z (default)": {},
    "aq4, first aq2 / q8": {
        "forward_codec": "aq4",
        "backward_codec": "q8",
        "key_codec": "fp16",
        "fill_codec": "aq2",
        "fill_microbatches": 4,
    },
}
TORCH = ("torch 1F1B bfloat16, receives ahead", "torch 1F1B bfloat16", "torch GPipe float32")
PIPE = "benchmarks.gpu.torch_pipe"
LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 16, "base_dtype": BaseDtype.BFLOAT16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is trained.

    Attributes:
        counts: of stages, one swarm after the other.
        steps: that count at each rate.
    """

    name: str
    config: Callable[[], PretrainedConfig]
    trains: dict[str, Any] = field(default_factory=dict)
    counts: tuple[int, ...]
    rates_mbps: tuple[float, ...]
    tokens: int
    batch_size: int
    dtype: str
    steps: int = 2


def rows(scene: Scene) -> Iterator[Row]:
    """GPT-2 XL's shape."""
    if scene.rehearse:
        rehearsed = Shape(
            name="GPT-2, small",
            config=lambda: gpt2(64, 4, 128, 32),
            counts=(4,),
            rates_mbps=REHEARSED_MBPS,
            tokens=32,
            batch_size=8,
            dtype="float32",
        )
        return _shape_rows(rehearsed, scene)
    xl = Shape(
        name="GPT-2 XL",
        config=lambda: gpt2(1600, 48, 50257),
        counts=(8, 4),
        rates_mbps=RATES_MBPS,
        tokens=1024,
        batch_size=32,
        dtype="bfloat16",
    )
    return _shape_rows(xl, scene)


def adapter_rows(scene: Scene) -> Iterator[Row]:
    """Llama-3-8B's shape with adapters, its base in bfloat16."""
    if scene.rehearse:
        rehearsed = Shape(
            name="Llama, small, LoRA",
            config=lambda: llama(64, 96, 2, 128),
            trains=LORA,
            counts=(2,),
            rates_mbps=REHEARSED_MBPS,
            tokens=32,
            batch_size=4,
            dtype="float32",
        )
        return _shape_rows(rehearsed, scene)
    eight = Shape(
        name="Llama-3-8B, LoRA",
        config=lambda: llama(4096, 14336, 32, 128256),
        trains=LORA,
        counts=(8, 4),
        rates_mbps=RATES_MBPS,
        tokens=1024,
        batch_size=16,
        dtype="bfloat16",
    )
    return _shape_rows(eight, scene)


def _shape_rows(shape: Shape, scene: Scene) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="gpu-swarm-model-") as directory:
        began_s = time.monotonic()
        save_random(shape.config(), Path(directory))
        yield {"table": "set up", "what": f"{shape.name}: weights written", "s": _since(began_s)}
        for number, num_stages in enumerate(shape.counts):
            share = len(shape.counts) - number
            until_s = time.monotonic() + max(0.0, scene.left_s) / share
            yield from _count_rows(shape, directory, num_stages, scene, until_s)


def _count_rows(
    shape: Shape, directory: str, num_stages: int, scene: Scene, until_s: float
) -> Iterator[Row]:
    """Of one number of stages: the swarm in three fifths of the time, torch in the rest."""
    fastest: dict[float, float] = {}
    whole_s = until_s - time.monotonic()
    try:
        for row, mbps, tokens_s in _swarm_rows(
            shape, directory, num_stages, time.monotonic() + 0.6 * whole_s
        ):
            if mbps >= 0:
                fastest[mbps] = max(fastest.get(mbps, 0.0), tokens_s)
            yield row
    except (RuntimeError, TimeoutError) as error:
        yield _trouble(shape, num_stages, "swarm-ft", error)
    if scene.left_s < 0:
        return
    rivals: dict[float, float] = {}
    try:
        for row, mbps, tokens_s in _torch_rows(shape, directory, num_stages, until_s):
            rivals[mbps] = max(rivals.get(mbps, 0.0), tokens_s)
            yield row
    except (RuntimeError, TimeoutError) as error:
        yield _trouble(shape, num_stages, "torch", error)
    for mbps, tokens_s in fastest.items():
        yield {
            "table": "swarm-ft's best beside the best of torch's in this run",
            "model": shape.name,
            "stages": num_stages,
            "link": link_words(mbps),
            "swarm-ft tokens/s": tokens_s,
            "torch tokens/s": rivals.get(mbps),
            "times torch": ratio(tokens_s, rivals.get(mbps)),
        }


def _trouble(shape: Shape, num_stages: int, system: str, error: Exception) -> Row:
    return {
        "table": "trouble",
        "model": shape.name,
        "stages": num_stages,
        "system": system,
        "what": f"{type(error).__name__}: {error}",
    }


# ---- the swarm

Measured = tuple[Row, float, float]
"""A row, its Mbps, below 0 if it has none, and its tokens a second."""


def _swarm_rows(
    shape: Shape, directory: str, num_stages: int, until_s: float
) -> Iterator[Measured]:
    found: queue.SimpleQueue[tuple[str, Cell | float] | None] = queue.SimpleQueue()
    began_s = time.monotonic()

    async def run() -> None:
        up = swarm_up(_num_blocks(shape), num_stages, _device(), shape.dtype)
        async with up as swarm:
            found.put(("up", _since(began_s)))
            for codecs, changes in CODECS.items():
                spec = _spec(directory, shape, changes)
                share_s = (until_s - time.monotonic()) / (2 if codecs == next(iter(CODECS)) else 1)
                end_s = time.monotonic() + share_s
                async for cell in cells(swarm, spec, shape.rates_mbps, shape.steps, end_s):
                    found.put((codecs, cell))

    for codecs, cell in streamed(run(), found):
        if not isinstance(cell, Cell):
            what = f"{shape.name}, {num_stages} peers up"
            yield {"table": "set up", "what": what, "s": cell}, -1.0, 0.0
            continue
        tokens_s = shape.batch_size * shape.tokens / cell.step_s
        crossings = shape.batch_size * (num_stages - 1)
        row = _row(shape, num_stages, f"swarm-ft {codecs}", cell.mbps, cell.step_s)
        row["MB forward"] = cell.forward_bytes / crossings / 1e6
        row["MB backward"] = cell.backward_bytes / crossings / 1e6
        row["loss"] = cell.loss
        yield row, cell.mbps, tokens_s


def _row(shape: Shape, num_stages: int, system: str, mbps: float, step_s: float) -> dict[str, Any]:
    """What every system's rows have; ratios to published ones where these have that link."""
    tokens_s = shape.batch_size * shape.tokens / step_s
    row: dict[str, Any] = {
        "table": "tokens a second",
        "model": shape.name,
        "stages": num_stages,
        "link": link_words(mbps),
        "system": system,
        "tokens/s": tokens_s,
        "s a step": step_s,
    }
    return row | published_ratios(mbps, tokens_s)


def published_ratios(mbps: float, tokens_s: float) -> dict[str, float | None]:
    """Tokens a second as multiples of published ones at that rate."""
    if mbps not in PUBLISHED_MBPS:
        return {f"x {name}": None for name in PUBLISHED}
    at = PUBLISHED_MBPS.index(mbps)
    return {f"x {name}": tokens_s / row[at] for name, row in PUBLISHED.items()}


def link_words(mbps: float) -> str:
    """In a few characters."""
    if not mbps:
        return "not paced"
    return f"{mbps:g} Mbps" if mbps < 1000 else f"{mbps / 1000:g} Gbps"


def _spec(directory: str, shape: Shape, changes: Mapping[str, Any]) -> RunSpec:
    """Every step visits all samples, so that the first is a whole epoch."""
    return spec_of(
        open_checkpoint(directory),
        batch_size=shape.batch_size,
        tokens=shape.tokens,
        **{**shape.trains, **changes, "num_steps": 100_000, "lr_schedule": LrSchedule.CONSTANT},
    )


def _num_blocks(shape: Shape) -> int:
    return int(shape.config().num_hidden_layers)


def _device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _since(began_s: float) -> float:
    return time.monotonic() - began_s


# ---- torch's


def _torch_rows(
    shape: Shape, directory: str, num_stages: int, until_s: float
) -> Iterator[Measured]:
    with Processes() as processes:
        last = _start_pipe(processes, shape, directory, num_stages)
        for system, mbps in _torch_cells(shape):
            left_s, steps = until_s - time.monotonic(), shape.steps + 1
            if left_s < max(1.0, steps * _torch_step_s(shape, num_stages, system, mbps)):
                continue
            seconds = _asked(processes, num_stages, last, (system, mbps, steps), left_s)
            step_s = median(seconds[1:])
            row = _row(shape, num_stages, system, mbps, step_s)
            yield row, mbps, shape.batch_size * shape.tokens / step_s


def _torch_cells(shape: Shape) -> Iterator[tuple[str, float]]:
    """The best system at all rates first."""
    for system in TORCH:
        yield from ((system, mbps) for mbps in shape.rates_mbps)


def _torch_step_s(shape: Shape, num_stages: int, system: str, mbps: float) -> float:
    """Seconds that the links alone take for a step."""
    if not mbps:
        return 0.0
    value_bytes = 4 if "float32" in system else 2
    values = shape.tokens * int(shape.config().hidden_size)
    microbatch_s = values * value_bytes * 8 / (mbps * 1e6)
    return microbatch_s * (shape.batch_size + num_stages - 1)


def _start_pipe(processes: Processes, shape: Shape, directory: str, num_stages: int) -> str:
    (port,) = free_ports(1)
    spec = _spec(directory, shape, {})
    told = {
        "stages": num_stages,
        "port": port,
        "model": directory,
        "words": spec.model.vocab_size,
        "channels": spec.model.hidden_size,
        "tokens": shape.tokens,
        "batch_size": shape.batch_size,
        "device": _device(),
        "dtype": shape.dtype,
        "train": {
            "num_samples": shape.batch_size,
            "num_steps": 1,
            "batch_size": shape.batch_size,
            "micro_batch_size": 1,
            "seq_length": shape.tokens,
            **shape.trains,
        },
    }
    for rank in range(num_stages):
        processes.start(f"stage-{rank}", PIPE, [json.dumps({**told, "rank": rank})])
    return f"stage-{num_stages - 1}"


def _asked(
    processes: Processes, num_stages: int, last: str, words: tuple[str, float, int], left_s: float
) -> Sequence[float]:
    """Seconds of each of some steps."""
    system, mbps, steps = words
    for rank in range(num_stages):
        processes.say(f"stage-{rank}", {"system": system, "mbps": mbps, "steps": steps})
    seconds: list[float] = processes.heard(last, left_s)["seconds"]
    return seconds
