"""What a block takes at a peer, by what trains and how the rest is held: rows of docs/memory.md.

    python -m benchmarks.memory_table

Makes checkpoints of random weights with blocks of real models' shapes, trains one microbatch of one
step at a stage that is one block, and prints what its engine counts: what is there however many
microbatches are, what one microbatch holds with and without gradient checkpointing, and what the
plan takes the first for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, ModelSpec, Optim, RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.engine import StageEngine

MIB = 1 << 20
BLOCK = LayerRange(1, 2)
CONFIGS: dict[str, PretrainedConfig] = {
    "GPT-2 (768)": GPT2Config(n_layer=3, vocab_size=64, bos_token_id=0, eos_token_id=0),
    "Llama 3.2 1B (2048)": LlamaConfig(
        num_hidden_layers=3,
        vocab_size=64,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    ),
}
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
    sys.stdout.write(
        "| block of | what trains | holds | the plan says | a microbatch | with gc |\n"
    )
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for name, config in CONFIGS.items():
        with TemporaryDirectory() as directory:
            path = Path(directory)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
            checkpoint = open_checkpoint(str(path))
            model = checkpoint.describe()
            for method, changes in METHODS.items():
                row = _row(checkpoint, model, changes, options.seq_length)
                cells = " | ".join(f"{value / MIB:.1f}" for value in row)
                sys.stdout.write(f"| {name} | {method} | {cells} |\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of the one sample")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def _row(
    checkpoint: Checkpoint, model: ModelSpec, changes: dict[str, Any], seq_length: int
) -> list[float]:
    """Bytes: held, planned, of a microbatch, and of one with gradient checkpointing."""
    held, microbatches, planned = 0, [], 0.0
    for recomputes in (False, True):
        train = TrainSpec(
            num_samples=1,
            num_steps=1,
            batch_size=1,
            micro_batch_size=1,
            seq_length=seq_length,
            gradient_checkpointing=recomputes,
            **changes,
        )
        spec = RunSpec(model=model, train=train)
        engine = StageEngine(
            checkpoint, spec, BLOCK, device=torch.device("cpu"), dtype=torch.float32
        )
        _step(engine, torch.zeros(1, seq_length, model.hidden_size))
        held, planned = engine.state_bytes, spec.held_bytes(BLOCK)
        microbatches.append(engine.microbatch_bytes)
    return [held, planned, *microbatches]


def _step(engine: StageEngine, x: torch.Tensor) -> None:
    engine.load()
    engine.begin_step(StepNumber(0), x.shape[1] - 1)
    output = engine.forward(MicrobatchIndex(0), x)
    engine.backward(MicrobatchIndex(0), torch.ones_like(output))
    engine.weight_gradients(MicrobatchIndex(0))


if __name__ == "__main__":
    main()
