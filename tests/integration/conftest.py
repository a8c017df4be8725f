"""Small random checkpoints and data for whole swarms in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from swarm_ft.protocol.messages.client import RunEvent
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.spec.sample_rows import Words, pad_rows, samples_in, words_of
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.local_swarm import LocalSwarm
from tests.sampled import mark_cases

FOLDER = Path(__file__).parent
VOCAB_SIZE, SEQ_LENGTH, NUM_BLOCKS = 96, 24, 6

CONFIGS = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=32, n_embd=32, n_layer=NUM_BLOCKS, n_head=2
    ),
    "llama": LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    ),
}


UNCOMPRESSED = {"forward_codec": "none", "backward_codec": "none", "key_codec": "fp16"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the first case of each test to `make test`, and the others to `make test-rest`."""
    mark_cases(item for item in items if item.path.parent == FOLDER)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Whatever ran before in this process: sums have one order, and losses their last bits."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir("gpt2")`: a checkpoint directory, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(3)
            directory = tmp_path_factory.mktemp(name)
            AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(directory)
            made[name] = directory
        return made[name]

    return make


@dataclass(frozen=True)
class Job:
    """A run to submit, and its data as the plain loop wants it."""

    spec: RunSpec
    samples: list[bytes]
    tokens: torch.Tensor
    labels: torch.Tensor

    def ragged(self) -> Job:
        """The same on samples of 2 tokens to all, the first quarter of each a prompt."""
        random = np.random.default_rng(3)
        made: list[Words] = []
        for _ in self.samples:
            length = int(random.integers(2, SEQ_LENGTH + 1))
            tokens = random.integers(1, VOCAB_SIZE, 6).repeat(4)[:length]
            words = words_of(tokens, np.arange(length) >= length // 4)
            made.append(pad_rows(words, SEQ_LENGTH))
        rows = np.concatenate(made)
        samples = samples_in(rows)
        return replace(
            self,
            samples=[row.tobytes() for row in rows],
            tokens=torch.from_numpy(samples.token_ids),
            labels=torch.from_numpy(samples.labels),
        )


class MakeJob(Protocol):
    """See `make_job`."""

    def __call__(self, model: str = "gpt2", *, num_samples: int = 20, **changes: Any) -> Job: ...


class QuietEvents(Protocol):
    """See `quiet_events`."""

    async def __call__(self, job: Job, layers: list[str]) -> list[RunEvent]: ...


@pytest.fixture(scope="session")
def model_spec(model_dir: Callable[[str], Path]) -> Callable[[str], ModelSpec]:
    """`model_spec("gpt2")`: what runs say of the model in `model_dir("gpt2")`."""
    return cache(lambda name: open_checkpoint(str(model_dir(name))).describe())


@pytest.fixture
def make_job(model_spec: Callable[[str], ModelSpec]) -> MakeJob:
    """`make_job("gpt2", num_steps=30, ...)`; uncompressed unless told otherwise."""

    def make(model: str = "gpt2", *, num_samples: int = 20, **changes: Any) -> Job:
        fields: dict[str, Any] = {
            "num_samples": num_samples,
            "seq_length": SEQ_LENGTH,
            "batch_size": 4,
            "micro_batch_size": 2,
            "num_steps": 10,
            "learning_rate": 3e-3,
            "lr_schedule": LrSchedule.COSINE,
            "warmup_steps": 3,
            "weight_decay": 0.1,
            "seed": 5,
            **({} if "quality" in changes else UNCOMPRESSED),
        } | changes
        rng = np.random.default_rng(1)
        # Every sample repeats a few tokens, so that there is something to learn.
        num_rows = num_samples + fields.get("num_eval_samples", 0)
        tokens = rng.integers(0, VOCAB_SIZE, (num_rows, 6)).repeat(4, axis=1).astype("<u4")
        return Job(
            spec=RunSpec(model=model_spec(model), train=TrainSpec(**fields)),
            samples=[row.tobytes() for row in tokens],
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            labels=torch.from_numpy(tokens.astype(np.int64)),
        )

    return make


@pytest.fixture(scope="session")
def quiet_events(tmp_path_factory: pytest.TempPathFactory) -> QuietEvents:
    """`await quiet_events(job, layers)`: events of the job in a swarm that nothing happens to.

    Each is trained once; the tests of a module compare with the same few.
    """
    trained: dict[tuple[bytes, ...], list[RunEvent]] = {}

    async def train(job: Job, layers: list[str]) -> list[RunEvent]:
        key = (job.spec.digest(), *job.samples, *(part.encode() for part in layers))
        if key not in trained:
            async with LocalSwarm(tmp_path_factory.mktemp("quiet"), layers) as swarm:
                trained[key] = await swarm.train(job.spec, job.samples)
        return trained[key]

    return train
