"""Checkpoints of random weights with real models' shapes, and engines of all stages in one process.

What parity and memory share. Engines are the project's own, on the GPU where there is one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainSpec
from swarm_ft.stage.adapters import with_adapters
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.engine import StageEngine

SEED = 7


def device_here() -> torch.device:
    """Return the GPU, or else the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def gpt2(width: int, blocks: int, words: int, positions: int = 1024) -> PretrainedConfig:
    """GPT-2's shape; heads of 64, or 8 where it is small. Its head is its own."""
    return GPT2Config(
        n_embd=width,
        n_layer=blocks,
        n_head=max(1, width // (64 if width >= 256 else 8)),
        n_positions=positions,
        vocab_size=words,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


def llama(width: int, inner: int, blocks: int, words: int) -> PretrainedConfig:
    """Llama's shape: a quarter as many heads of keys and values."""
    heads = max(4, width // 128)
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=words,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )


def qwen3(width: int, inner: int, blocks: int, words: int) -> PretrainedConfig:
    """Qwen 3's shape: norms of queries and keys, half as many heads of keys and values."""
    heads = max(4, width // 64)
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=max(8, width // heads),
        vocab_size=words,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


@contextmanager
def checkpoint_of(config: PretrainedConfig) -> Iterator[Checkpoint]:
    """Write a checkpoint of random bfloat16 weights and delete it with the context."""
    with tempfile.TemporaryDirectory(prefix="gpu-model-") as directory:
        save_random(config, Path(directory))
        yield open_checkpoint(directory)


def save_random(config: PretrainedConfig, directory: Path) -> None:
    """Write one; weights are drawn where that is fastest."""
    torch.manual_seed(SEED)
    with device_here():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def spec_of(checkpoint: Checkpoint, *, batch_size: int, tokens: int, **changes: object) -> RunSpec:
    """Describe a run of one sample a microbatch and one step after the other."""
    fields: dict[str, Any] = {
        "num_samples": batch_size,
        "num_steps": 8,
        "batch_size": batch_size,
        "micro_batch_size": 1,
        "seq_length": tokens,
        "seed": SEED,
        **changes,
    }
    spec = RunSpec(model=checkpoint.describe(), train=TrainSpec(**fields))
    return with_adapters(checkpoint, spec)


@dataclass
class Chain:
    """The engines of all stages, driven as a swarm drives them, without codecs."""

    spec: RunSpec
    stages: list[StageEngine]

    @classmethod
    def loaded(
        cls,
        checkpoint: Checkpoint,
        spec: RunSpec,
        num_stages: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Chain:
        """Its weights read.

        Args:
            device: None: the GPU, or else the CPU.
        """
        layers = split_evenly(LayerRange(0, spec.model.num_blocks), num_stages)
        stages = [
            StageEngine(checkpoint, spec, part, device=device or device_here(), dtype=dtype)
            for part in layers
        ]
        for stage in stages:
            stage.load()
        return cls(spec, stages)

    def without_split(self) -> Chain:
        """Weights' gradients come with torch's own backward passes from now on.

        A base in 8 or 4 bits is unpacked by the same layers: those stay as they are.
        """
        train = self.spec.train
        for stage in self.stages if not (train.load_in_8bit or train.load_in_4bit) else ():
            stage.weights.linears.restore()
        return self

    def step(self, number: int, tokens: Tensor, depth: int) -> float:
        """Run a step that keeps `depth` microbatches' weight passes waiting; return its mean loss.

        Args:
            tokens: int64 [B, T], a microbatch each row.
        """
        num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
        for stage in self.stages:
            stage.begin_step(StepNumber(number), num_targets)
        total = 0.0
        for index, row in enumerate(tokens):
            total += self._microbatch(MicrobatchIndex(index), row[None])
            if index >= depth:
                self._complete(index - depth)
        for index in range(max(0, len(tokens) - depth), len(tokens)):
            self._complete(index)
        return total / num_targets

    def apply(self) -> None:
        """Run the optimizer's step, without clipping."""
        for stage in self.stages:
            stage.squared_grad_norm()
            stage.apply(1.0, 1e-4)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by name, float32 on the device, without a copy."""
        return {
            name: parameter.grad
            for stage in self.stages
            for name, parameter in stage.weights.module.trainable().items()
            if parameter.grad is not None
        }

    def _microbatch(self, index: MicrobatchIndex, tokens: Tensor) -> float:
        *upstream, last = self.stages
        x = tokens
        for stage in upstream:
            x = stage.forward(index, x)
        made = last.forward_backward(index, x, tokens)
        gradient = made.input_gradient
        for stage in reversed(upstream):
            if gradient is not None:
                gradient = stage.backward(index, gradient)
        return made.loss_sum

    def _complete(self, index: int) -> None:
        for stage in self.stages:
            stage.weight_gradients(MicrobatchIndex(index))


def some_tokens(spec: RunSpec, count: int) -> Tensor:
    """Int64 [count, T], drawn at random."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (count, spec.train.seq_length)
    return torch.randint(spec.model.vocab_size, shape, generator=generator)
