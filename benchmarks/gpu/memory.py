"""A stage's forecast memory beside the peak of the GPU's allocator.

Each row has a stage that is one block, or several, of a real model's shape, and trains two steps
with some microbatches in flight. The forecast is that of `swarm-ft plan`, found out without
memory (`stage.rehearsal`). On a CPU the most that was resident (VmHWM) stands for the allocator's,
with all that libraries keep: it shows that the row runs, and little else.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row, ratio
from benchmarks.gpu.stages import checkpoint_of, device_here, gpt2, llama, qwen3, spec_of
from benchmarks.loading_peak import status_bytes
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, Optim, RunSpec
from swarm_ft.stage.checkpoint import Checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.rehearsal import rehearse_stage

MIB = 1 << 20
STEPS = 2
LORA: dict[str, Any] = {"adapter": Adapter.LORA}
METHODS: dict[str, dict[str, Any]] = {
    "all, adamw": {},
    "all, adamw-8bit": {"optim": Optim.ADAMW_8BIT},
    "all, checkpointing": {"gradient_checkpointing": True},
    "LoRA": LORA,
    "LoRA, base in bfloat16": {**LORA, "base_dtype": BaseDtype.BFLOAT16},
    "LoRA, base in 8 bits": {**LORA, "load_in_8bit": True},
    "LoRA, base in 4 bits": {**LORA, "load_in_4bit": True},
}
DTYPES = torch.bfloat16, torch.float32
REHEARSED_METHODS = ("all, adamw", "LoRA, base in 4 bits")


@dataclass(frozen=True, slots=True)
class Case:
    """A stage.

    Attributes:
        layers: of the model's blocks.
        in_flight: microbatches at once.
    """

    model: str
    layers: LayerRange
    tokens: int
    in_flight: int


def rows(scene: Scene) -> Iterator[Row]:
    """All that trains in the first stages, in bfloat16; of all others so too; then in float32."""
    methods = {name: METHODS[name] for name in REHEARSED_METHODS} if scene.rehearse else METHODS
    with ExitStack() as stack:
        checkpoints: dict[str, Checkpoint] = {}
        for dtype, (case, config) in product(DTYPES, cases(scene.rehearse)):
            words = config.to_json_string()
            if words not in checkpoints:
                checkpoints[words] = stack.enter_context(checkpoint_of(config))
            for method, changes in methods.items():
                yield _row(case, method, changes, checkpoints[words], dtype)
                if scene.left_s < 0:
                    return


def cases(rehearse: bool) -> list[tuple[Case, PretrainedConfig]]:
    """Stages in the middle, of the largest models first, with the embeddings, with the head."""
    first, middle, last = LayerRange(0, 2), LayerRange(1, 3), LayerRange(2, 4)
    if rehearse:
        return [
            (Case("GPT-2, small", middle, 32, 2), gpt2(64, 4, 97, 64)),
            (Case("Llama, small, head", last, 32, 2), llama(64, 96, 4, 97)),
        ]
    # Stages in the middle have no words, and few are written soon.
    return [
        (Case("Llama-3-8B (4096)", middle, 1024, 4), llama(4096, 14336, 4, 1000)),
        (Case("GPT-2 XL (1600)", middle, 1024, 4), gpt2(1600, 4, 1000)),
        (Case("GPT-2 XL, head", last, 1024, 4), gpt2(1600, 4, 50257)),
        (Case("GPT-2 XL, embeddings", first, 1024, 4), gpt2(1600, 4, 50257)),
        (Case("Qwen3 0.6B (1024)", middle, 1024, 4), qwen3(1024, 3072, 4, 1000)),
        (Case("Llama-3-8B, head", last, 1024, 2), llama(4096, 14336, 4, 128256)),
    ]


def _row(
    case: Case,
    method: str,
    changes: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> Row:
    cells: dict[str, Any] = {
        "stage": case.model,
        "blocks": str(case.layers),
        "trains": method,
        "dtype": str(dtype).removeprefix("torch."),
        "in flight": case.in_flight,
    }
    began_s = time.monotonic()
    try:
        spec = spec_of(checkpoint, batch_size=case.in_flight + 1, tokens=case.tokens, **changes)
        found = rehearse_stage(checkpoint, spec, case.layers)
        engine = StageEngine(checkpoint, spec, case.layers, device=device_here(), dtype=dtype)
        peak, reserved = most_while_training(engine, spec, case)
    except Exception as error:  # noqa: BLE001 - the other rows are to run
        return {**cells, "trouble": f"{type(error).__name__}: {error}"[:300]}
    forecast = None if found is None else found.most(case.in_flight)
    cells |= {
        "MiB held": engine.state_bytes / MIB,
        "a microbatch": engine.microbatch_bytes / MIB,
        "forecast": None if forecast is None else forecast / MIB,
        "most allocated": peak / MIB,
        "of the forecast": ratio(peak, forecast),
        "most reserved": None if reserved is None else reserved / MIB,
        "s": time.monotonic() - began_s,
    }
    return cells


def most_while_training(engine: StageEngine, spec: RunSpec, case: Case) -> tuple[int, int | None]:
    """Bytes at once, from the weights' first to the last step's; what the allocator took for it."""
    gc.collect()
    if not torch.cuda.is_available():
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is there
        before = status_bytes("VmRSS")
        train(engine, spec, case)
        return status_bytes("VmHWM") - before, None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(engine, spec, case)
    return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()


def train(engine: StageEngine, spec: RunSpec, case: Case) -> None:
    """Two steps, in which one microbatch more comes than are held at once."""
    torch.manual_seed(0)
    engine.load()
    for step in range(STEPS):
        engine.begin_step(StepNumber(step), (case.in_flight + 1) * (case.tokens - 1))
        for number in range(case.in_flight + 1):
            _forward(engine, spec, number)
            if number >= case.in_flight - 1:
                _finish(engine, spec, number - case.in_flight + 1)
        for number in range(2, case.in_flight + 1):
            _finish(engine, spec, number)
        engine.squared_grad_norm()
        engine.apply(1.0, 1e-4)


def _forward(engine: StageEngine, spec: RunSpec, number: int) -> None:
    index, shape = MicrobatchIndex(number), (1, spec.train.seq_length)
    tokens = torch.randint(spec.model.vocab_size, shape)
    hidden = torch.randn(*shape, spec.model.hidden_size)
    if engine.is_last:
        engine.forward_backward(index, hidden, tokens)
    else:
        engine.forward(index, tokens if engine.is_first else hidden)


def _finish(engine: StageEngine, spec: RunSpec, number: int) -> None:
    index = MicrobatchIndex(number)
    if not engine.is_last:
        engine.backward(index, torch.ones(1, spec.train.seq_length, spec.model.hidden_size))
    engine.weight_gradients(index)
