"""What a block takes at a peer, by what trains and how the rest is held: rows of docs/memory.md.

    python -m benchmarks.memory_table

Makes checkpoints of random weights with blocks of real models' shapes, trains one microbatch of one
step at a stage that is one block, and prints what its engine counts: what is there however many
microbatches are, what the plan takes that for, and what one microbatch holds, with and without
gradient checkpointing. Then the most that was resident (VmHWM) beyond what was before, from the
weights' first byte to the optimizer's step, and its ratio to the plan's and the microbatch's. Each
row has a process of its own, since what a process had once it may keep.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3Config,
)

from benchmarks.loading_peak import status_bytes
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, Optim, RunSpec, TrainSpec
from swarm_ft.stage.adapters import with_adapters
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.engine import StageEngine

MIB = 1 << 20
BLOCK = LayerRange(1, 2)
FEW: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
"""Blocks, and words: tables and ends are not measured."""
CONFIGS: dict[str, PretrainedConfig] = {
    "GPT-2 (768)": GPT2Config(n_layer=3, vocab_size=64, bos_token_id=0, eos_token_id=0),
    "Qwen3 0.6B (1024)": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        **FEW,
    ),
    "Gemma 3 1B (1152)": Gemma3TextConfig(
        hidden_size=1152,
        intermediate_size=6912,
        num_attention_heads=4,
        num_key_value_heads=1,
        **FEW,
    ),
    "Llama 3.2 1B (2048)": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        **FEW,
    ),
    "OLMoE 1B-7B (2048)": OlmoeConfig(**FEW),
    "Mistral 7B (4096)": MistralConfig(**FEW),
}
COLUMNS = (
    *("block of", "what trains", "MiB held", "the plan says", "a microbatch"),
    *("with `--gradient-checkpointing`", "most resident", "of plan and microbatch"),
)
LORA = {"adapter": Adapter.LORA}
METHODS: dict[str, dict[str, Any]] = {
    "all, `--optim adamw`": {},
    "all, `--optim adafactor`": {"optim": Optim.ADAFACTOR},
    "all, `--optim sgd`": {"optim": Optim.SGD},
    "LoRA": LORA,
    "LoRA, `--base-dtype bfloat16`": {**LORA, "base_dtype": BaseDtype.BFLOAT16},
    "LoRA, `--load-in-8bit`": {**LORA, "load_in_8bit": True},
    "LoRA, `--load-in-4bit`": {**LORA, "load_in_4bit": True},
}


def main() -> None:
    """Print the table."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    if options.directory:
        sys.stdout.write(_row(options.directory, METHODS[options.method], options.seq_length))
        return
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for name in options.models.split(",") if options.models else CONFIGS:
        with TemporaryDirectory() as directory:
            model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)
            model.save_pretrained(directory)
            del model
            for method in METHODS:
                cells = _measured(directory, method, options)
                sys.stdout.write(f"| {name} | {method} | {cells} |\n")
                sys.stdout.flush()


def _measured(directory: str, method: str, options: argparse.Namespace) -> str:
    """A row's cells, of a process of its own."""
    words = ["--directory", directory, "--method", method, "--seq-length", options.seq_length]
    command = [sys.executable, "-m", __spec__.name, *map(str, words)]
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **returning}  # what is freed is the system's again
    ran = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment)
    return ran.stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of the one sample")
    parser.add_argument("--models", default="", help="with commas; all, if none is named")
    parser.add_argument("--directory", type=Path, help="of one checkpoint; else all, made here")
    parser.add_argument("--method", choices=METHODS, help="of one row")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def _row(directory: Path, changes: dict[str, Any], seq_length: int) -> str:
    checkpoint = open_checkpoint(str(directory))
    spec = _spec(checkpoint, changes, seq_length)
    engine, x = _engine(checkpoint, spec), torch.zeros(1, seq_length, spec.model.hidden_size)
    _step(_engine(checkpoint, spec), x[:, :8])  # what libraries keep of a first time
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is there
    before = status_bytes("VmRSS")
    _step(engine, x)
    peak = status_bytes("VmHWM") - before
    again = replace(spec, train=replace(spec.train, gradient_checkpointing=True))
    recomputing = _engine(checkpoint, again)
    planned = spec.held_bytes(BLOCK)
    held, microbatch = engine.state_bytes, engine.microbatch_bytes
    _step(recomputing, x)
    values = held, planned, microbatch, recomputing.microbatch_bytes, peak
    cells = " | ".join(f"{value / MIB:.1f}" for value in values)
    return f"{cells} | {peak / (planned + microbatch):.2f}"


def _spec(checkpoint: Checkpoint, changes: dict[str, Any], seq_length: int) -> RunSpec:
    train = TrainSpec(
        num_samples=1,
        num_steps=1,
        batch_size=1,
        micro_batch_size=1,
        seq_length=seq_length,
        **changes,
    )
    return with_adapters(checkpoint, RunSpec(model=checkpoint.describe(), train=train))


def _engine(checkpoint: Checkpoint, spec: RunSpec) -> StageEngine:
    return StageEngine(checkpoint, spec, BLOCK, device=torch.device("cpu"), dtype=torch.float32)


def _step(engine: StageEngine, x: torch.Tensor) -> None:
    engine.load()
    engine.begin_step(StepNumber(0), x.shape[1] - 1)
    output = engine.forward(MicrobatchIndex(0), x)
    engine.backward(MicrobatchIndex(0), torch.ones_like(output))
    engine.weight_gradients(MicrobatchIndex(0))
    engine.apply(1.0, 1e-4)


if __name__ == "__main__":
    main()
