"""Small random checkpoints made on the spot, and a pipeline of engines in one process."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import split_evenly
from swarm_ft.protocol.spec.run_spec import LrSchedule, RunSpec, TrainSpec
from swarm_ft.protocol.spec.sample_rows import Samples, Words, counts_of, samples_in
from swarm_ft.protocol.spec.training_plan import clip_factor, learning_rate_at, step_microbatches
from swarm_ft.stage.base import Lengths
from swarm_ft.stage.checkpoint import Checkpoint, open_checkpoint
from swarm_ft.stage.engine import StageEngine
from tests.states import weights_digest

NUM_BLOCKS = 4
VOCAB_SIZE = 97
SEQ_LENGTH = 12
NUM_SAMPLES = 11

_ROPE = {
    "num_hidden_layers": NUM_BLOCKS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _gpt2(**changes: Any) -> GPT2Config:
    sizes = {"n_layer": NUM_BLOCKS, "n_embd": 32, "n_head": 2, "n_positions": 64}
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2Config(**sizes, **ids, **changes)


CONFIGS = {
    "gpt2-tied": _gpt2(),
    "gpt2-untied": _gpt2(tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True),
    "llama": LlamaConfig(**_ROPE, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}),
    "llama-tied": LlamaConfig(**_ROPE, tie_word_embeddings=True, pad_token_id=3),
    "mistral": MistralConfig(**_ROPE, sliding_window=SEQ_LENGTH),
    "qwen2-tied": Qwen2Config(**_ROPE, tie_word_embeddings=True),
}


def save_random_model(
    config: PretrainedConfig, directory: Path, *, auto: Any = AutoModelForCausalLM, **how: Any
) -> Path:
    """A model whose every parameter, biases and norms too, is off its usual start."""
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory, **how)
    return directory


def aligned(model: Any) -> Any:
    """The model with its weights in torch's own memory, as stages have theirs.

    Views of a mapped file may begin anywhere, and some products of one row with a matrix, such as
    an expert's lone token, are rounded by where it begins.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`make_model("llama")`: a directory, made once; not to be written to."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_random_model(CONFIGS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture(scope="session")
def samples() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, VOCAB_SIZE, (NUM_SAMPLES, SEQ_LENGTH), generator=generator)


@pytest.fixture(scope="session")
def make_train_spec() -> MakeTrainSpec:
    def make(**changes: Any) -> TrainSpec:
        fields: dict[str, Any] = {
            "num_samples": NUM_SAMPLES,
            "seq_length": SEQ_LENGTH,
            "batch_size": 4,
            "micro_batch_size": 2,
            "num_steps": 5,
            "learning_rate": 2e-3,
            "lr_schedule": LrSchedule.LINEAR,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "seed": 5,
            "shuffle": True,
            "forward_codec": "none",
            "backward_codec": "none",
            "key_codec": "fp16",
        }
        return TrainSpec(**{**fields, **changes})

    return make


class MakeModel(Protocol):
    """See `make_model`."""

    def __call__(self, name: str) -> Path: ...


class MakeTrainSpec(Protocol):
    """See `make_train_spec`."""

    def __call__(self, **changes: Any) -> TrainSpec: ...


described = lru_cache(maxsize=8)(Checkpoint.describe)


class Pipeline:
    """The engines of all stages, driven as a swarm drives them, without codecs."""

    def __init__(
        self, checkpoint: Checkpoint, train: TrainSpec, num_stages: int, dtype: torch.dtype
    ) -> None:
        self.checkpoint = checkpoint
        self.spec = RunSpec(model=described(checkpoint), train=train)
        device = torch.device("cpu")
        self.stages = [
            StageEngine(checkpoint, self.spec, layers, device=device, dtype=dtype)
            for layers in split_evenly(self.spec.model.layers, num_stages)
        ]
        for stage in self.stages:
            stage.load()
        self.grad_norms: list[float] = []

    def microbatch(self, index: int, tokens: torch.Tensor) -> float:
        """Forward, backward and weights of one microbatch; its loss sum."""
        *upstream, last = self.stages
        x = tokens
        for stage in upstream:
            x = stage.forward(MicrobatchIndex(index), x)
        made = last.forward_backward(MicrobatchIndex(index), x, tokens)
        gradient = made.input_gradient
        for stage in reversed(upstream):
            assert (gradient is not None) == stage.has_backward
            if gradient is not None:
                gradient = stage.backward(MicrobatchIndex(index), gradient)
        assert gradient is None
        for stage in self.stages:
            stage.weight_gradients(MicrobatchIndex(index))
        return made.loss_sum

    def ragged(self, index: int, rows: Words) -> float:
        """As `microbatch`, of rows; what pads a sample is not sent, as in a swarm."""
        samples = samples_in(rows)
        tokens, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
        *upstream, last = self.stages
        x, lengths = tokens, lengths_of(rows)
        for stage in upstream:
            x = received(stage.forward(MicrobatchIndex(index), x, lengths), samples)
        made = last.forward_backward(MicrobatchIndex(index), x, labels, lengths)
        gradient = made.input_gradient
        for stage in reversed(upstream):
            assert (gradient is not None) == stage.has_backward
            if gradient is not None:
                gradient = stage.backward(MicrobatchIndex(index), received(gradient, samples))
        for stage in self.stages:
            stage.weight_gradients(MicrobatchIndex(index))
        return made.loss_sum

    def gradients(self, step: int, samples: torch.Tensor) -> float:
        """All microbatches of a step; the step's mean loss."""
        batches = step_microbatches(self.spec.train, StepNumber(step))
        num_targets = sum(len(b.samples) for b in batches) * (SEQ_LENGTH - 1)
        for stage in self.stages:
            stage.begin_step(StepNumber(step), num_targets)
        loss = sum(self.microbatch(b.index, samples[list(b.samples)]) for b in batches)
        return loss / num_targets

    def commit(self, step: int) -> None:
        sharing = self.spec.sharing(self.stages)
        if sharing:
            first, *others = [stage.shared_gradient() for stage in sharing]
            total = sum(others, first)
            for stage in sharing:
                stage.set_shared_gradient(total)
        norm = math.sqrt(sum(stage.squared_grad_norm() for stage in self.stages))
        self.grad_norms.append(norm)
        train = self.spec.train
        for stage in self.stages:
            stage.apply(clip_factor(train, norm), learning_rate_at(train, StepNumber(step)))

    def train(self, samples: torch.Tensor) -> list[float]:
        losses = []
        for step in range(self.spec.train.num_steps):
            losses.append(self.gradients(step, samples))
            self.commit(step)
        return losses

    def digests(self) -> list[bytes]:
        return [weights_digest(stage) for stage in self.stages]

    def export(self, directory: Path) -> dict[str, str]:
        """Every stage's shard; the weight map of the whole."""
        from safetensors import safe_open

        weight_map: dict[str, str] = {}
        count = len(self.stages)
        for number, stage in enumerate(self.stages, 1):
            path = directory / f"model-{number:05}-of-{count:05}.safetensors"
            path.write_bytes(b"".join(stage.export()))
            with safe_open(path, "pt") as handle:
                assert handle.metadata() == {"format": "pt"}
                weight_map |= dict.fromkeys(handle.keys(), path.name)
        return weight_map


def lengths_of(rows: Words) -> Lengths:
    """As an engine takes them."""
    counts = counts_of(rows)
    documents = counts.documents or ((),) * len(rows)
    return [one or length for one, length in zip(documents, counts.lengths, strict=True)]


def received(sent_btc: torch.Tensor, samples: Samples) -> torch.Tensor:
    """What a neighbour makes of a microbatch: each sample's own tokens, and zeros behind them."""
    value_btc = torch.zeros_like(sent_btc)
    for row, length in enumerate(samples.lengths):
        value_btc[row, :length] = sent_btc[row, :length]
    return value_btc


class MakePipeline(Protocol):
    """See `make_pipeline`."""

    def __call__(
        self, name: str, num_stages: int, *, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> Pipeline: ...


@pytest.fixture(scope="session")
def make_pipeline(make_model: MakeModel, make_train_spec: MakeTrainSpec) -> MakePipeline:
    opened = cache(lambda name: open_checkpoint(str(make_model(name))))

    def make(
        name: str, num_stages: int, *, dtype: torch.dtype = torch.float32, **changes: Any
    ) -> Pipeline:
        return Pipeline(opened(name), make_train_spec(**changes), num_stages, dtype)

    return make
