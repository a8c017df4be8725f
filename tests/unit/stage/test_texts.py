"""Texts continued by stages are those that `generate` of transformers makes of the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm_ft.errors import BadModel, MalformedMessage
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.base import Text
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.kv_cache import bytes_in
from tests.families import VOCAB_SIZE, small_config
from tests.unit.stage.conftest import MakeTrainSpec, save_random_model
from tests.unit.stage.test_families import ALL, OTHERS

FAST = (
    *("gpt2", "llama", "mistral", "qwen3", "gemma3_text", "opt", "gpt_neox"),
    *("mixtral", "bloom", "qwen3_next"),
)
REFUSED = frozenset(
    {"bamba", "falcon_mamba", "mamba", "mamba2", "minimax", "openai-gpt", "recurrent_gemma"}
    | {"xlstm"}
)
"""Their blocks keep what they need elsewhere, or keep nothing."""
_HALF: Any = {"layer_types": ["linear_attention", "full_attention"] * 2}
HYBRIDS: Any = {
    "bailing_hybrid": {**_HALF, "num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Whose small models have no block that counts tokens: transformers itself does not generate."""
PROMPT_TOKENS, NEW_TOKENS = 9, 12
"""Together more than the window of those that have one."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            config = small_config(family, **HYBRIDS.get(family, {}))
            config.tie_word_embeddings = False  # tied ones without training repeat one word
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


def continued(texts: Sequence[Text], prompt: Tensor, part: int) -> list[int]:
    """Continue a prompt [1, T] that arrives so many tokens at a time."""

    def chosen(x: Tensor) -> int:
        for text in texts:
            x = text.read(x)
        return texts[-1].next_token(x, None)

    token = [chosen(piece) for piece in torch.split(prompt, part, dim=1)][-1]
    found = [token]
    while len(found) < NEW_TOKENS:
        found.append(chosen(torch.tensor([[found[-1]]])))
    return found


def generated(model_dir: Path) -> tuple[Tensor, list[int]]:
    """A prompt [1, T], and what transformers lets follow it: not the same token for ever."""
    whole = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(1, VOCAB_SIZE, (1, PROMPT_TOKENS), generator=generator)
        text = whole.generate(
            prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        new: list[int] = text[0, PROMPT_TOKENS:].tolist()
        if len(set(new)) > 1:
            return prompt, new
    raise AssertionError("a model that says one word for ever")


@pytest.mark.parametrize(
    "family",
    [*FAST, *(pytest.param(f, marks=OTHERS) for f in ALL if f not in {*FAST, *REFUSED})],
)
@pytest.mark.sampled(4)
def test_greedy_texts_are_those_of_transformers(
    model_dir: Any, make_train_spec: MakeTrainSpec, family: str
) -> None:
    directory = model_dir(family)
    prompt, wanted = generated(directory)
    for num_stages, part in ((1, PROMPT_TOKENS), (2, 4), (3, 1)):
        stages = engines(directory, make_train_spec(), num_stages)
        texts = [stage.begin_text(PROMPT_TOKENS + NEW_TOKENS) for stage in stages]
        assert continued(texts, prompt, part) == wanted, num_stages


@pytest.mark.parametrize(
    "family",
    ["openai-gpt", *(pytest.param(f, marks=OTHERS) for f in sorted(REFUSED) if f != "openai-gpt")],
)
def test_families_whose_blocks_keep_nothing_in_a_cache_are_refused(
    model_dir: Any, make_train_spec: MakeTrainSpec, family: str
) -> None:
    (stage,) = engines(model_dir(family), make_train_spec(), 1)
    with pytest.raises(
        BadModel, match=f"'{family}' cannot generate in stages: expected its blocks"
    ):
        stage.begin_text(20)


# ---- one stage


def test_texts_do_not_know_each_other(model_dir: Any, make_train_spec: MakeTrainSpec) -> None:
    (stage,) = engines(model_dir("llama"), make_train_spec(), 1)
    tokens = torch.arange(2 * 8).view(2, 8) % VOCAB_SIZE
    alone = [stage.begin_text(8).read(one[None]) for one in tokens]
    texts = [stage.begin_text(8) for _ in tokens]
    parts = [
        [text.read(one[None, place : place + 2]) for text, one in zip(texts, tokens, strict=True)]
        for place in range(0, 8, 2)
    ]
    for of_text, whole in zip(zip(*parts, strict=True), alone, strict=True):
        torch.testing.assert_close(torch.cat(of_text, dim=1), whole)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_text_takes_no_more_than_was_said(
    model_dir: Any, make_train_spec: MakeTrainSpec, family: str, num_stages: int
) -> None:
    for stage in engines(model_dir(family), make_train_spec(), num_stages):
        text = stage.begin_text(40)
        shape = (1, 40) if stage.is_first else (1, 40, 32)
        text.read(torch.ones(shape, dtype=torch.int64 if stage.is_first else torch.float32))
        assert 0 < bytes_in(text.cache) <= text.num_bytes


def test_in_bfloat16_texts_are_continued_too(
    model_dir: Any, make_train_spec: MakeTrainSpec
) -> None:
    checkpoint = open_checkpoint(str(model_dir("llama")))
    run = RunSpec(model=checkpoint.describe(), train=make_train_spec())
    stage = StageEngine(
        checkpoint, run, run.model.layers, device=torch.device("cpu"), dtype=torch.bfloat16
    )
    stage.load()
    assert len(continued([stage.begin_text(30)], torch.ones(1, 4, dtype=torch.int64), 2)) > 1


def test_a_text_has_no_more_tokens_than_the_model_has_positions(
    model_dir: Any, make_train_spec: MakeTrainSpec
) -> None:
    (stage,) = engines(model_dir("gpt2"), make_train_spec(), 1)
    stage.begin_text(64)
    with pytest.raises(MalformedMessage, match="expected at most 64, as many as the model"):
        stage.begin_text(65)
    (stage,) = engines(model_dir("llama"), make_train_spec(), 1)
    stage.begin_text(65)


def test_steps_go_on_as_if_no_text_had_been_read(
    model_dir: Any, make_train_spec: MakeTrainSpec
) -> None:
    tokens = torch.arange(2 * 12).view(2, 12) % VOCAB_SIZE
    losses = []
    for speaks in (False, True):
        (stage,) = engines(model_dir("llama"), make_train_spec(), 1)
        for step in range(2):
            stage.begin_step(StepNumber(step), 22)
            index = MicrobatchIndex(0)
            losses.append(stage.forward_backward(index, tokens, tokens).loss_sum)
            stage.weight_gradients(index)
            if speaks:
                stage.begin_text(12).read(tokens[:1])
            stage.apply(1.0, 1e-2)
    assert losses[:2] == losses[2:]
