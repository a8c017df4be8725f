"""The README's table of hours and memory by model, number of machines and link.

    python -m benchmarks.plan_table

No weights are read: each model is a config and a sparse file of zeros with the real shapes. The
job, the memory of each stage and the hours are those that `swarm-ft plan` computes, on machines
whose speed is an assumption (`--tflops`), in a swarm that has not measured a run yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from swarm_ft.api.forecasts import read_model
from swarm_ft.client.forecast import Forecast, duration_words, forecast
from swarm_ft.client.options import PlanOptions
from swarm_ft.ids import PeerId
from swarm_ft.protocol.machines.step_cost import prior
from swarm_ft.protocol.messages.capacity import Machine, PlacedPeer
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, TrainOptions
from swarm_ft.stage.rehearsal import rehearse_stage

SAMPLES, EPOCHS, TOKENS, BATCH = 1000, 3, 1024, 32
ROUND_TRIP_S = 0.03
MEMORY_BYTES = 24 << 30


@dataclass(frozen=True)
class Job:
    """A row of the table.

    Attributes:
        name: Model and method, as the table shows them.
        config: Configuration of the model.
        machines: Number of stages, each on a machine of its own.
        options: Options of the job beside the common ones.
    """

    name: str
    config: PretrainedConfig
    machines: int
    options: Mapping[str, Any] = field(default_factory=dict)


GPT2_XL = GPT2Config(n_layer=48, n_embd=1600, n_head=25, bos_token_id=0, eos_token_id=0)
QWEN3_06B = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
LLAMA3_8B = LlamaConfig(
    vocab_size=128256,
    intermediate_size=14336,
    num_key_value_heads=8,
    pad_token_id=0,
)
LORA_4BIT = {"adapter": Adapter.LORA, "load_in_4bit": True}
JOBS = (
    Job("Qwen3 0.6B, all weights", QWEN3_06B, 2),
    Job("GPT-2 XL 1.5B, all weights", GPT2_XL, 4),
    Job("GPT-2 XL 1.5B, all weights", GPT2_XL, 8),
    Job("Llama 3 8B, LoRA in 4 bits", LLAMA3_8B, 4, LORA_4BIT),
)


def write_blank(config: PretrainedConfig, folder: Path) -> None:
    """Write a checkpoint of zeros in bfloat16; its tensors take no room on the disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config.dtype = torch.bfloat16
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def forecasts(job: Job, speeds_mbps: list[float], tflops: float) -> Iterator[Forecast]:
    """Yield the forecast of a job for each speed of the machines' links."""
    train = TrainOptions(
        batch_size=BATCH, micro_batch_size=1, seq_length=TOKENS, **dict(job.options)
    )
    with TemporaryDirectory(prefix="plan-table-") as folder:
        write_blank(job.config, Path(folder))
        checkpoint, spec = read_model(
            PlanOptions(model=folder, num_samples=SAMPLES, epochs=EPOCHS, train=train)
        )
        stages = list(_stages(spec.model.num_blocks, job.machines))
        memory = {layers: rehearse_stage(checkpoint, spec, layers) for layers in stages}
    for mbps in speeds_mbps:
        rate = mbps * 1e6 / 8
        machine = Machine(
            flops_per_s=tflops * 1e12,
            up_bytes_per_s=rate,
            down_bytes_per_s=rate,
            round_trip_s=ROUND_TRIP_S,
        )
        placed = [
            PlacedPeer(
                peer_id=PeerId(f"peer-{n}"),
                layers=layers,
                memory_bytes=MEMORY_BYTES,
                machine=machine,
            )
            for n, layers in enumerate(stages)
        ]
        yield forecast(spec, placed, memory, prior())


def _stages(num_layers: int, machines: int) -> Iterator[LayerRange]:
    cuts = [num_layers * n // machines for n in range(machines + 1)]
    for start, stop in pairwise(cuts):
        yield LayerRange(start, stop)


def row(job: Job, speeds_mbps: list[float], tflops: float) -> str:
    """Return the row of a job, with its time for each speed of the links."""
    found = list(forecasts(job, speeds_mbps, tflops))
    most = max(stage.memory.total for stage in found[0].stages if stage.memory) / 1e9
    times = (duration_words(one.seconds_range.low, one.seconds_range.high) for one in found)
    return f"| {job.name} | {job.machines} | {most:.1f} | {' | '.join(times)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbps", default="20,100", help="speeds of links, each way")
    parser.add_argument("--tflops", type=float, default=10.0, help="of a machine while it trains")
    parser.add_argument("--only", default="", help="part of a job's name")
    options = parser.parse_args()
    speeds = [float(word) for word in options.mbps.split(",")]
    links = " | ".join(f"{speed:g} Mbps" for speed in speeds)
    sys.stdout.write(f"| model | machines | GB on a card | {links} |\n")
    sys.stdout.write("|---" * (3 + len(speeds)) + "|\n")
    for job in JOBS:
        if options.only in job.name:
            sys.stdout.write(f"{row(job, speeds, options.tflops)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
