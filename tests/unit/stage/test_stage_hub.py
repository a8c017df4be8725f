"""Checkpoints by hub id, from a hand-made hub cache, without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.unit.stage.conftest import MakeModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


PutIntoHub = Callable[[list[Path]], str]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PutIntoHub:
    """Put a checkpoint's files into the cache as `some/model` at one commit."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def put(files: list[Path]) -> str:
        repository = tmp_path / "models--some--model"
        snapshot = repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        for file in files:
            shutil.copyfile(file, snapshot / file.name)
        return "some/model"

    return put


@pytest.fixture
def sharded(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    model = AutoModelForCausalLM.from_pretrained(make_model("llama"))
    model.save_pretrained(directory, max_shard_size="30KB")
    return directory


def test_hub_model_is_the_same_as_its_directory(hub: PutIntoHub, make_model: MakeModel) -> None:
    directory = make_model("gpt2-tied")
    checkpoint = open_checkpoint(hub(list(directory.iterdir())))
    assert checkpoint.reference == "some/model"
    ours, theirs = checkpoint.describe(), open_checkpoint(str(directory)).describe()
    assert ours.block_digests == theirs.block_digests
    assert checkpoint.load(LayerRange(0, 4), theirs).keys() >= {"lm_head.weight"}


def test_stage_needs_only_the_shards_of_its_own_blocks(hub: PutIntoHub, sharded: Path) -> None:
    whole = open_checkpoint(str(sharded))
    model, layers = whole.describe(), LayerRange(1, 2)
    file_of = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file_of[name] for name in whole.load(layers, model)}
    present = [f for f in sharded.iterdir() if f.suffix != ".safetensors" or f.name in needed]
    assert len(needed) < len(list(sharded.glob("*.safetensors")))

    partial = open_checkpoint(hub(present))
    assert partial.load(layers, model).keys() == whole.load(layers, model).keys()
    with pytest.raises(BadModel, match=r"no model-000"):
        partial.load(LayerRange(3, 4), model)


def test_hub_model_that_is_not_there_is_refused_in_one_line(hub: PutIntoHub) -> None:
    hub([])
    with pytest.raises(BadModel, match="config") as caught:
        open_checkpoint("some/model")
    assert "\n" not in caught.value.message
