"""A mixture's experts are kept evenly used, wherever the model is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from swarm_ft.errors import BadOption
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.training_plan import step_microbatches
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.routers import balance_loss, check_routers
from tests.families import small_config
from tests.unit.stage.conftest import CONFIGS, MakeTrainSpec, Pipeline, save_random_model

COEF = 0.5
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"]


def whole_gradients(model: PreTrainedModel, pipeline: Pipeline, samples: Tensor) -> None:
    """Compute the gradients of the first step's loss and its blocks' own, by transformers."""
    train, config = pipeline.spec.train, model.config
    batches = step_microbatches(train, StepNumber(0))
    num_targets = sum(len(b.samples) for b in batches) * (samples.shape[1] - 1)
    for batch in batches:
        tokens = samples[list(batch.samples)]
        base = model.model(input_ids=tokens, use_cache=False, output_router_logits=True)
        logits = model.lm_head(base.last_hidden_state)[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        balance = sum(
            load_balancing_loss_func((one,), one.shape[1], config.num_experts_per_tok)
            for one in base.router_logits
        )
        part = len(tokens) / train.batch_size / pipeline.spec.model.num_blocks
        (loss / num_targets + COEF * part * balance).backward()


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.sampled(4)
def test_every_block_has_its_own_loss_wherever_the_model_is_cut(
    tmp_path: Path,
    samples: Tensor,
    make_train_spec: MakeTrainSpec,
    family: str,
    num_stages: int,
) -> None:
    source = str(save_random_model(small_config(family), tmp_path / "model"))
    train = make_train_spec(router_aux_loss_coef=COEF, clip_grad_norm=0.0)
    pipeline = Pipeline(open_checkpoint(source), train, num_stages, torch.float32)
    pipeline.gradients(0, samples)
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    whole_gradients(whole, pipeline, samples)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in pipeline.stages:
        for name, parameter in stage.weights.module.trainable().items():
            theirs = expected[name]
            assert parameter.grad is not None
            assert theirs is not None
            largest = float(theirs.abs().max())
            assert torch.allclose(parameter.grad, theirs, rtol=1e-4, atol=1e-5 * largest), name


def test_routers_learn_more_than_the_text_alone_teaches(
    tmp_path: Path, samples: Tensor, make_train_spec: MakeTrainSpec
) -> None:
    source = str(save_random_model(small_config("mixtral"), tmp_path / "model"))
    found = []
    for coef in (0.0, COEF):
        train = make_train_spec(router_aux_loss_coef=coef)
        pipeline = Pipeline(open_checkpoint(source), train, 2, torch.float32)
        loss = pipeline.gradients(0, samples)
        found.append((loss, [stage.flat_gradient() for stage in pipeline.stages]))
    (loss, without), (same, balanced) = found
    assert loss == same, "the loss that is told is the text's"
    assert not any(torch.equal(*pair) for pair in zip(without, balanced, strict=True))


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_blocks_loss_is_that_of_transformers(is_padded: bool) -> None:
    logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0 if is_padded else 1
    is_token = mask.flatten().bool() if is_padded else None
    theirs = load_balancing_loss_func((logits,), 8, 2, mask)
    assert balance_loss([logits], 2, is_token) == pytest.approx(float(theirs), rel=1e-6)
    assert balance_loss([torch.zeros(12, 8)], 8, is_token) == pytest.approx(8.0)


def test_a_model_without_experts_is_refused(make_train_spec: MakeTrainSpec) -> None:
    with pytest.raises(BadOption, match=r"mixture of experts .* got architecture 'llama'"):
        check_routers(CONFIGS["llama"], make_train_spec(router_aux_loss_coef=0.01))
    check_routers(CONFIGS["llama"], make_train_spec())
    with pytest.raises(BadOption, match="no --gradient-checkpointing"):
        make_train_spec(router_aux_loss_coef=0.01, gradient_checkpointing=True)
