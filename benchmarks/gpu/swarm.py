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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.gpu.link_check import passed_mbps
from benchmarks.gpu.parts import Scene
from benchmarks.gpu.processes import Processes, free_ports
from benchmarks.gpu.report import Row, ratio
from benchmarks.gpu.stages import gpt2, llama, save_random, spec_of
from benchmarks.gpu.swarm_run import Cell, Mark, cells, streamed, swarm_up
from swarm_ft.errors import SwarmError
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, LrSchedule, RunSpec
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.stage.checkpoint import open_checkpoint

RATES_MBPS = (100.0, 1000.0, 500.0, 300.0, 10_000.0, 25.0, 10.0)
"""The most telling first, the slowest last."""
REHEARSED_MBPS = (0.0, 1.0)
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
MANY_STEPS = 100_000
SLOW_STEP_S = 8.0
"""Of a step that takes longer one counts."""
Measured = tuple[Row, float, float]
"""A row, its Mbps, and its tokens a second; 0 if it is no speed."""
LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 16, "base_dtype": BaseDtype.BFLOAT16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model and how it trains.

    Attributes:
        trains: fields of a `TrainSpec`.
        stages: processes.
        steps: that count at each rate.
    """

    name: str
    config: Callable[[], PretrainedConfig]
    trains: dict[str, Any] = field(default_factory=dict)
    stages: int
    rates_mbps: tuple[float, ...] = RATES_MBPS
    tokens: int = 1024
    batch_size: int
    dtype: str = "bfloat16"
    steps: int = 2


SMALL = Shape(
    name="GPT-2, small",
    config=lambda: gpt2(64, 4, 128, 32),
    stages=4,
    rates_mbps=REHEARSED_MBPS,
    tokens=32,
    batch_size=8,
    dtype="float32",
)
SMALL_ADAPTERS = replace(
    SMALL,
    name="Llama, small, LoRA",
    config=lambda: llama(64, 96, 4, 128),
    trains=LORA,
    batch_size=4,
)
XL = Shape(name="GPT-2 XL", config=lambda: gpt2(1600, 48, 50257), stages=8, batch_size=32)
EIGHT_B = Shape(
    name="Llama-3-8B, LoRA",
    config=lambda: llama(4096, 14336, 32, 128256),
    trains=LORA,
    stages=8,
    batch_size=16,
)


def rows(scene: Scene) -> Iterator[Row]:
    """GPT-2 XL's shape in eight stages."""
    return _shape_rows(SMALL if scene.rehearse else XL, scene)


def rows_of_4(scene: Scene) -> Iterator[Row]:
    """Yield the rows of half as many stages."""
    return _shape_rows(_in_half(SMALL if scene.rehearse else XL), scene)


def adapter_rows(scene: Scene) -> Iterator[Row]:
    """Llama-3-8B's shape with adapters, its base in bfloat16, in eight stages."""
    return _shape_rows(SMALL_ADAPTERS if scene.rehearse else EIGHT_B, scene)


def adapter_rows_of_4(scene: Scene) -> Iterator[Row]:
    """Yield the rows of half as many stages."""
    return _shape_rows(_in_half(SMALL_ADAPTERS if scene.rehearse else EIGHT_B), scene)


def _in_half(shape: Shape) -> Shape:
    return replace(shape, stages=shape.stages // 2)


def _shape_rows(shape: Shape, scene: Scene) -> Iterator[Row]:
    """Measure the swarm in half of the time and torch in the rest, then compare them."""
    shape = replace(shape, rates_mbps=tuple(scene.rates_mbps) or shape.rates_mbps)
    for mbps, passed in passed_mbps(shape.rates_mbps):
        yield {"table": "links", "asked for": link_words(mbps), "Mbps passed": passed}
    with tempfile.TemporaryDirectory(prefix="gpu-swarm-model-") as directory:
        began_s = time.monotonic()
        save_random(shape.config(), Path(directory))
        spec = _spec(directory, shape)
        yield {"table": "set up", "what": f"{shape.name}: weights written", "s": _since(began_s)}
        ours: dict[float, float] = {}
        theirs: dict[float, float] = {}
        swarm_end_s = time.monotonic() + scene.left_s / 2
        work = _swarm_rows(shape, spec, swarm_end_s, scene.pairs or len(CODECS))
        yield from _noted("swarm-ft", shape, work, ours)
        torch_end_s = time.monotonic() + scene.left_s
        yield from _noted("torch", shape, _torch_rows(shape, spec, torch_end_s), theirs)
    for mbps, tokens_s in ours.items():
        yield {
            "table": "swarm-ft's best beside the best of torch's in this run",
            "model": shape.name,
            "stages": shape.stages,
            "link": link_words(mbps),
            "swarm-ft tokens/s": tokens_s,
            "torch tokens/s": theirs.get(mbps),
            "times torch": ratio(tokens_s, theirs.get(mbps)),
        }


def _noted(
    system: str, shape: Shape, measured: Iterable[Measured], best: dict[float, float]
) -> Iterator[Row]:
    """Yield the rows and put the most tokens a second by Mbps into `best`; errors are rows too."""
    try:
        for row, mbps, tokens_s in measured:
            if tokens_s:
                best[mbps] = max(best.get(mbps, 0.0), tokens_s)
            yield row
    except (RuntimeError, TimeoutError, SwarmError) as error:
        yield {
            "table": "trouble",
            "model": shape.name,
            "stages": shape.stages,
            "system": system,
            "what": f"{type(error).__name__}: {error}",
        }


# ---- the swarm


def _swarm_rows(shape: Shape, base: RunSpec, until_s: float, pairs: int) -> Iterator[Measured]:
    found: queue.SimpleQueue[tuple[str, Cell | Mark] | None] = queue.SimpleQueue()
    work = _swarm_work(shape, base, until_s, pairs, found)
    for codecs, seen in streamed(work, found):
        if isinstance(seen, Mark):
            yield _mark_row(shape, codecs, seen), 0.0, 0.0
            continue
        crossings = shape.batch_size * (shape.stages - 1)
        row, tokens_s = _row(shape, f"swarm-ft {codecs}", seen.mbps, seen.step_s)
        row["MB forward"] = seen.forward_bytes / crossings / 1e6
        row["MB backward"] = seen.backward_bytes / crossings / 1e6
        row["loss"] = seen.loss
        yield row, seen.mbps, tokens_s


async def _swarm_work(
    shape: Shape,
    base: RunSpec,
    until_s: float,
    pairs: int,
    found: queue.SimpleQueue[tuple[str, Cell | Mark] | None],
) -> None:
    """Put what runs by so many pairs of codecs show into a queue.

    One that would show no speed is left out.
    """
    began_s, least_s = time.monotonic(), 0.0
    async with swarm_up(base.model.num_blocks, shape.stages, _device(), shape.dtype) as swarm:
        found.put(("", Mark(0.0, "peers up", _since(began_s))))
        for number, (codecs, changes) in enumerate(list(CODECS.items())[:pairs]):
            began_s = time.monotonic()
            if began_s + least_s > until_s:
                found.put((codecs, Mark(0.0, "not run, it would take", least_s)))
                continue
            spec = replace(base, train=replace(base.train, **changes))
            end_s = began_s + (until_s - began_s) / (pairs - number)
            times = {"end_s": end_s, "last_s": until_s}
            async for seen in cells(swarm, spec, shape.rates_mbps, shape.steps, **times):
                if isinstance(seen, Cell):
                    least_s = least_s or _since(began_s)
                found.put((codecs, seen))


def _mark_row(shape: Shape, codecs: str, mark: Mark) -> Row:
    return {
        "table": "steps",
        "model": shape.name,
        "stages": shape.stages,
        "link": link_words(mark.mbps),
        "codecs": codecs,
        "what": mark.what,
        "s": mark.seconds,
        "loss": mark.loss,
    }


def _row(shape: Shape, system: str, mbps: float, step_s: float) -> tuple[dict[str, Any], float]:
    """Return the cells that measured rows of all systems have, and the tokens a second."""
    tokens_s = shape.batch_size * shape.tokens / step_s
    row = {**_cells(shape, system, mbps), "tokens/s": tokens_s, "s a step": step_s}
    return row | published_ratios(mbps, tokens_s), tokens_s


def _cells(shape: Shape, system: str, mbps: float) -> dict[str, Any]:
    """Return the cells that name a measurement."""
    return {
        "table": "tokens a second",
        "model": shape.name,
        "stages": shape.stages,
        "link": link_words(mbps),
        "system": system,
    }


def published_ratios(mbps: float, tokens_s: float) -> dict[str, float | None]:
    """Tokens a second as multiples of published ones at that rate."""
    if mbps not in PUBLISHED_MBPS:
        return {f"x {name}": None for name in PUBLISHED}
    at = PUBLISHED_MBPS.index(mbps)
    return {f"x {name}": tokens_s / row[at] for name, row in PUBLISHED.items()}


def link_words(mbps: float) -> str:
    """Format a rate in a few characters."""
    if not mbps:
        return "not paced"
    return f"{mbps:g} Mbps" if mbps < 1000 else f"{mbps / 1000:g} Gbps"


def _spec(directory: str, shape: Shape) -> RunSpec:
    """Every step visits all samples, so that the first is a whole epoch."""
    return spec_of(
        open_checkpoint(directory),
        batch_size=shape.batch_size,
        tokens=shape.tokens,
        **{**shape.trains, "num_steps": MANY_STEPS, "lr_schedule": LrSchedule.CONSTANT},
    )


def _device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _since(began_s: float) -> float:
    return time.monotonic() - began_s


# ---- torch's


def _torch_rows(shape: Shape, spec: RunSpec, until_s: float) -> Iterator[Measured]:
    """Measure torch's systems at all rates, the best first; skip those that would take too long."""
    with Processes() as processes:
        last = _start_pipe(processes, shape, spec)
        for system, mbps in product(TORCH, shape.rates_mbps):
            left_s, least_s = until_s - time.monotonic(), links_s(shape, spec, system, mbps)
            steps = 1 + (shape.steps if least_s < SLOW_STEP_S else 1)
            if left_s < max(1.0, 1.2 * steps * least_s):
                note = f"not run: links alone take {least_s:.0f} s a step"
                yield {**_cells(shape, system, mbps), "note": note}, mbps, 0.0
                continue
            for rank in range(shape.stages):
                processes.send(_stage(rank), {"system": system, "mbps": mbps, "steps": steps})
            seconds = processes.receive(last, left_s)["seconds"]
            yield _torch_row(shape, system, mbps, median(seconds[1:]))


def _torch_row(shape: Shape, system: str, mbps: float, step_s: float) -> Measured:
    row, tokens_s = _row(shape, system, mbps, step_s)
    return row, mbps, tokens_s


def links_s(shape: Shape, spec: RunSpec, system: str, mbps: float) -> float:
    """Seconds that the links alone take for a step, of what travels as it is."""
    if not mbps:
        return 0.0
    value_bytes = 4 if "float32" in system else 2
    microbatch_s = shape.tokens * spec.model.hidden_size * value_bytes * 8 / (mbps * 1e6)
    return microbatch_s * (shape.batch_size + shape.stages - 1)


def _start_pipe(processes: Processes, shape: Shape, spec: RunSpec) -> str:
    """Start all stages; the last one's name."""
    (port,) = free_ports(1)
    job = {
        "stages": shape.stages,
        "port": port,
        "spec": RUN_SPEC.to_wire(spec).SerializeToString().hex(),
        "device": _device(),
        "dtype": shape.dtype,
    }
    for rank in range(shape.stages):
        processes.start(_stage(rank), PIPE, [json.dumps({**job, "rank": rank})])
    return _stage(shape.stages - 1)


def _stage(rank: int) -> str:
    return f"stage-{rank}"
