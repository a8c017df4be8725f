"""A stage's peak memory while it loads or writes its result, against the memory that stays.

    python -m benchmarks.loading_peak
    python -m benchmarks.loading_peak --written

Makes two checkpoints of random weights, a GPT-2 (768 wide, 12 blocks, float32) and a Llama (1024
wide, 8 blocks, bfloat16), and loads stages of them, each in a process of its own, since what a
process had once it may keep. `peak` is the most that was resident (VmHWM) beyond what was before,
`stays` what weights and buffers take. With `--written` a result is written after that, too: of the
GPT-2 trained whole, of the Llama with LoRA merged, its base held in bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, RunSpec, TrainSpec
from swarm_ft.snapshots.local_files import PLAIN
from swarm_ft.stage.adapters import with_adapters
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.engine import StageEngine

MIB = 1 << 20
LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
CONFIGS = {
    "gpt2": (GPT2Config(), torch.float32),
    "llama": (LlamaConfig(num_hidden_layers=8, vocab_size=32000, **LLAMA), torch.bfloat16),
}
STAGES = {"gpt2": ("0-12", "0-6", "6-12"), "llama": ("0-8", "2-6")}


def main() -> None:
    """Print a row a stage."""
    options = _parser().parse_args()
    if options.directory:
        sys.stdout.write(_row(options.directory, options.layers, written=options.written))
        return
    what = ["--written"] if options.written else []
    sys.stdout.write("model   layers    stays     peak  peak/stays\n")
    with TemporaryDirectory() as directory:
        for name, (config, dtype) in CONFIGS.items():
            path = Path(directory) / name
            AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path)
            for layers in STAGES[name]:
                _measure(path, layers, what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--directory", type=Path, help="of one checkpoint; else all, made here")
    parser.add_argument("--layers", default="", help="of one stage")
    parser.add_argument("--written", action="store_true", help="while the result is written")
    return parser


def _measure(directory: Path, layers: str, what: list[str]) -> None:
    words = ["--directory", str(directory), "--layers", layers, *what]
    subprocess.run([sys.executable, "-m", __spec__.name, *words], check=True)


def _row(directory: Path, layers_text: str, *, written: bool) -> str:
    checkpoint = open_checkpoint(str(directory))
    spec = _spec(checkpoint, adapts=written and directory.name == "llama")
    layers = parse_layers(layers_text) or spec.model.layers
    engine = StageEngine(checkpoint, spec, layers, device=torch.device("cpu"), dtype=torch.float32)
    before = status_bytes("VmRSS")
    engine.load()
    if written:
        PLAIN.write_pieces(directory.with_suffix(".result"), engine.export())
    module = engine.weights.module
    stays = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
    peak = status_bytes("VmHWM") - before
    return (
        f"{directory.name:<7} {layers_text:<6} {stays / MIB:6.0f} MiB {peak / MIB:4.0f} MiB  "
        f"{peak / stays:.2f}\n"
    )


def _spec(checkpoint: Checkpoint, *, adapts: bool) -> RunSpec:
    train = TrainSpec(num_samples=8, num_steps=1, seq_length=32)
    if adapts:
        adapter, base = Adapter.LORA, BaseDtype.BFLOAT16
        train = replace(train, adapter=adapter, base_dtype=base, merge=True)
    return with_adapters(checkpoint, RunSpec(model=checkpoint.describe(), train=train))


def status_bytes(key: str) -> int:
    """Return bytes that Linux reports about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
