"""Texts continued by stages are those that `generate` of transformers makes of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.layers import split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.base import Text
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from tests.families import VOCAB_SIZE, small_config
from tests.unit.stage.conftest import MakeTrainSpec, save_random_model
from tests.unit.stage.test_families import ALL, OTHERS

FAST = (
    *("gpt2", "llama", "mistral", "qwen3", "gemma3_text", "opt", "gpt_neox"),
    *("mixtral", "bloom", "qwen3_next"),
)
PROMPT_TOKENS, NEW_TOKENS = 9, 12
"""Together more than the window of those that have one."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            config = small_config(family)
            config.tie_word_embeddings = False  # tied ones without training say one word for ever
            made[family] = save_random_model(config, tmp_path_factory.mktemp(family))
        return made[family]

    return make


def engines(model_dir: Path, spec: Any, num_stages: int) -> list[StageEngine]:
    checkpoint = open_checkpoint(str(model_dir))
    run = RunSpec(model=checkpoint.describe(), train=spec)
    made = [
        StageEngine(checkpoint, run, layers, device=torch.device("cpu"), dtype=torch.float32)
        for layers in split_evenly(run.model.layers, num_stages)
    ]
    for engine in made:
        engine.load()
    return made


def continued(texts: list[Text], prompt: Tensor, part: int) -> list[int]:
    """What follows a prompt [1, T] that is told so many tokens at a time."""

    def told(x: Tensor) -> int:
        for text in texts:
            x = text.read(x)
        return texts[-1].next_token(x, None)

    token = [told(piece) for piece in prompt.split(part, dim=1)][-1]
    found = [token]
    while len(found) < NEW_TOKENS:
        found.append(told(torch.tensor([[found[-1]]])))
    return found


def prompt_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (1, PROMPT_TOKENS), generator=generator)


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(f, marks=OTHERS) for f in ALL if f not in FAST)]
)
def test_greedy_texts_are_those_of_transformers(
    model_dir: Any, make_train_spec: MakeTrainSpec, family: str
) -> None:
    directory, prompt = model_dir(family), prompt_of(5)
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    wanted = whole.generate(
        prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, PROMPT_TOKENS:].tolist()
    assert len(set(wanted)) > 1, "a text that says something"
    for num_stages, part in ((1, PROMPT_TOKENS), (2, 4), (3, 1)):
        stages = engines(directory, make_train_spec(), num_stages)
        texts = [stage.begin_text(PROMPT_TOKENS + NEW_TOKENS) for stage in stages]
        assert continued(texts, prompt, part) == wanted, num_stages
