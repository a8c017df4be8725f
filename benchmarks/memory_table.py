"""Memory of a stage at a peer, by what trains: rows of benchmarks/reports/memory.md.

    python -m benchmarks.memory_table

Makes checkpoints of random weights with blocks of real models' shapes, and trains two steps of two
microbatches, one after the other, at a stage that is one block, some with an end of the model. What
its engine counts is there however many microbatches are, and held of one, with and without gradient
checkpointing; temporaries and the sum are the forecast of `swarm-ft plan`. Beside it the most that
was resident (VmHWM) beyond what was before, from the weights' first byte to the last step. Each row
has a process of its own, since what a process had once it may keep.
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
from swarm_ft.stage.rehearsal import rehearse_stage

MIB = 1 << 20
FIRST, BLOCK, LAST = LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)
FEW: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 64, "pad_token_id": 0}
"""Blocks, and words."""


def _gpt2(words: int) -> PretrainedConfig:
    return GPT2Config(n_layer=3, vocab_size=words, bos_token_id=0, eos_token_id=0)


def _qwen3(words: int, blocks: int = 3) -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        **{**FEW, "vocab_size": words, "num_hidden_layers": blocks},
    )


CONFIGS: dict[str, PretrainedConfig] = {
    "GPT-2 (768)": _gpt2(64),
    "Qwen3 0.6B (1024)": _qwen3(64),
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
    "OLMoE of 16 experts (2048)": OlmoeConfig(num_experts=16, **FEW),
    "Mistral 7B (4096)": MistralConfig(**FEW),
}
COLUMNS = (
    *("stage", "what trains", "MiB held", "a microbatch", "with `--gradient-checkpointing`"),
    *("temporaries", "forecast", "most resident", "of the forecast"),
)
ENDS: dict[str, tuple[PretrainedConfig, LayerRange]] = {
    "GPT-2, embeddings (50257) and a block": (_gpt2(50257), FIRST),
    "GPT-2, a block and head (50257)": (_gpt2(50257), LAST),
    "Qwen3 0.6B, embeddings (151936) and a block": (_qwen3(151936), FIRST),
    "Qwen3 0.6B, a block and head (151936)": (_qwen3(151936), LAST),
}
SEVERAL: dict[str, tuple[PretrainedConfig, LayerRange]] = {
    "Qwen3 0.6B, 3 blocks": (_qwen3(64, blocks=5), LayerRange(1, 4)),
}
STAGES = {name: (config, BLOCK) for name, config in CONFIGS.items()} | ENDS | SEVERAL
LORA = {"adapter": Adapter.LORA}
METHODS: dict[str, dict[str, Any]] = {
    "all, `--optim adamw`": {},
    "all, `--optim adamw-8bit`": {"optim": Optim.ADAMW_8BIT},
    "all, `--optim adafactor`": {"optim": Optim.ADAFACTOR},
    "all, `--optim sgd`": {"optim": Optim.SGD},
    "LoRA": LORA,
    "LoRA, `--base-dtype bfloat16`": {**LORA, "base_dtype": BaseDtype.BFLOAT16},
    "LoRA, `--load-in-8bit`": {**LORA, "load_in_8bit": True},
    "LoRA, `--load-in-4bit`": {**LORA, "load_in_4bit": True},
}


OF_ENDS = ("all, `--optim adamw`", "LoRA", "LoRA, `--load-in-4bit`")


def main() -> None:
    """Print the table."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    if options.directory:
        _, layers = STAGES[options.stages]
        changes, sizes = METHODS[options.method], (options.seq_length, options.in_flight)
        sys.stdout.write(_row(options.directory, changes, *sizes, layers))
        return
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for name in options.stages.split(";") if options.stages else CONFIGS | ENDS:
        with TemporaryDirectory() as directory:
            model = AutoModelForCausalLM.from_config(STAGES[name][0], dtype=torch.bfloat16)
            model.save_pretrained(directory)
            del model
            some = options.method.split(";") if options.method else METHODS
            for method in OF_ENDS if name in ENDS else some:
                cells = _measured(directory, name, method, options)
                sys.stdout.write(f"| {name} | {method} | {cells} |\n")
                sys.stdout.flush()


def _measured(directory: str, stage: str, method: str, options: argparse.Namespace) -> str:
    """Measure the cells of a row in a process of its own."""
    words = ["--directory", directory, "--stages", stage, "--method", method]
    words += ["--seq-length", str(options.seq_length), "--threads", str(options.threads)]
    words += ["--in-flight", str(options.in_flight)]
    command = [sys.executable, "-m", __spec__.name, *words]
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    # What is freed is the system's again; or it is as it is at a peer.
    environment = {**os.environ, **({} if options.keeping else returning)}
    ran = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=environment)
    return ran.stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of the one sample")
    parser.add_argument("--in-flight", type=int, default=1, help="microbatches held at once")
    parser.add_argument("--stages", default="", help="with semicolons; all, if none is named")
    parser.add_argument("--directory", type=Path, help="of one checkpoint; else all, made here")
    parser.add_argument("--method", default="", help="so too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keeping", action="store_true", help="let malloc keep what it would")
    return parser


def _row(
    directory: Path, changes: dict[str, Any], seq_length: int, in_flight: int, layers: LayerRange
) -> str:
    checkpoint = open_checkpoint(str(directory))
    spec = _spec(checkpoint, changes, seq_length)
    engine = _engine(checkpoint, spec, layers)
    _train(_engine(checkpoint, spec, layers), spec, 8, 1)  # what libraries keep of a first time
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at what is there
    before = status_bytes("VmRSS")
    _train(engine, spec, seq_length, in_flight)
    peak = status_bytes("VmHWM") - before
    state_bytes, microbatch = engine.state_bytes, engine.microbatch_bytes
    again = replace(spec, train=replace(spec.train, gradient_checkpointing=True))
    found, recomputing = (rehearse_stage(checkpoint, one, layers) for one in (spec, again))
    if found is None or recomputing is None:
        raise SystemExit("its code asks for values")
    if (found.held, found.microbatch) != (state_bytes, microbatch):
        raise SystemExit(f"held {state_bytes}, a microbatch {microbatch}; rehearsed {found}")
    most = found.most(in_flight)
    values = (
        state_bytes,
        microbatch,
        recomputing.microbatch,
        found.temporaries(in_flight),
        most,
        peak,
    )
    cells = " | ".join(f"{value / MIB:.1f}" for value in values)
    return f"{cells} | {peak / most:.2f}"


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


def _engine(checkpoint: Checkpoint, spec: RunSpec, layers: LayerRange) -> StageEngine:
    return StageEngine(checkpoint, spec, layers, device=torch.device("cpu"), dtype=torch.float32)


def _train(engine: StageEngine, spec: RunSpec, seq_length: int, in_flight: int) -> None:
    """Two steps, in which one microbatch more comes than are held at once."""
    torch.manual_seed(0)
    engine.load()
    for step in range(2):
        engine.begin_step(StepNumber(step), (in_flight + 1) * (seq_length - 1))
        for number in range(in_flight + 1):
            _forward(engine, spec, seq_length, MicrobatchIndex(number))
            if number >= in_flight - 1:
                _finish(engine, spec, seq_length, MicrobatchIndex(number - in_flight + 1))
        for number in range(2, in_flight + 1):
            _finish(engine, spec, seq_length, MicrobatchIndex(number))
        engine.squared_grad_norm()
        engine.apply(1.0, 1e-4)


def _forward(engine: StageEngine, spec: RunSpec, seq_length: int, number: MicrobatchIndex) -> None:
    tokens = torch.randint(spec.model.vocab_size, (1, seq_length))
    hidden = torch.randn(1, seq_length, spec.model.hidden_size)
    if engine.is_last:
        engine.forward_backward(number, hidden, tokens)
    else:
        engine.forward(number, tokens if engine.is_first else hidden)


def _finish(engine: StageEngine, spec: RunSpec, seq_length: int, number: MicrobatchIndex) -> None:
    if not engine.is_last:
        engine.backward(number, torch.ones(1, seq_length, spec.model.hidden_size))
    engine.weight_gradients(number)


if __name__ == "__main__":
    main()
