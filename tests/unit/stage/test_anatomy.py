"""A model's anatomy is found once, and copied for each of its stages."""

from __future__ import annotations

import pytest

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.tasks import CausalLm, Classification
from swarm_ft.stage.architecture import Anatomy, anatomy_of
from swarm_ft.stage.module import StageModule
from tests.families import small_config


def anatomy(**changes: float) -> Anatomy:
    return anatomy_of(small_config("gpt2", **changes), CausalLm())


def test_equal_configs_have_one_anatomy() -> None:
    assert anatomy() is anatomy()


@pytest.mark.parametrize(
    "change", [{"attn_pdrop": 0.3}, {"n_layer": 5}, {"n_positions": 8}], ids=str
)
def test_whatever_a_config_says_makes_another(change: dict[str, float]) -> None:
    found = anatomy(**change)
    assert found is not anatomy()
    assert all(getattr(found.skeleton.config, name) == change[name] for name in change)


def test_another_task_has_another_head() -> None:
    parts = anatomy_of(
        small_config("gpt2"), Classification(TaskKind.CLASSIFICATION, ("bad", "good"))
    )
    assert parts.architecture.head != anatomy().architecture.head


def test_a_stage_is_a_copy() -> None:
    whole = anatomy()
    names, count = whole.skeleton.state_dict().keys(), whole.architecture.num_blocks
    for layers in (LayerRange(0, 1), LayerRange(1, count)):
        stage = StageModule(small_config("gpt2"), layers)
        stage.to_empty(device="cpu").requires_grad_(False)
    assert whole.skeleton.state_dict().keys() == names
    assert all(weight.is_meta and weight.requires_grad for weight in whole.skeleton.parameters())
    assert not any("forward" in vars(module) for module in whole.skeleton.modules())
