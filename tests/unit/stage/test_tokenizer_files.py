"""The files of a model that are read without its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.errors import BadModel
from swarm_ft.stage.tokenizer_files import open_generation_info


@pytest.fixture(scope="module")
def sample_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    made = write_demo_input(folder, seed=1, num_layers=1, hidden_size=16, vocab_size=300)
    return Path(made.model_dir)


@pytest.fixture
def model_dir(sample_dir: Path, tmp_path: Path) -> Path:
    """A copy, of whose weights nothing is there."""
    copy = shutil.copytree(sample_dir, tmp_path / "model")
    for weights in copy.glob("*.safetensors"):
        weights.unlink()
    (copy / "generation_config.json").unlink(missing_ok=True)
    return copy


def test_no_weights_are_read(model_dir: Path) -> None:
    words = open_generation_info(str(model_dir))
    config = json.loads((model_dir / "config.json").read_text())
    assert words.positions == config["n_positions"]
    assert words.tokenizer("one").input_ids
    assert words.ends == {config["eos_token_id"]}


@pytest.mark.parametrize(("config", "ends"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
def test_texts_end_where_generate_ends_them(model_dir: Path, config: Any, ends: set[int]) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": config}))
    assert open_generation_info(str(model_dir)).ends == ends


def test_what_stages_do_not_do_is_told(model_dir: Path) -> None:
    path = model_dir / "generation_config.json"
    path.write_text(json.dumps({"repetition_penalty": 1.1, "num_beams": 1, "temperature": 0.6}))
    assert open_generation_info(str(model_dir)).unsupported_settings == ("repetition_penalty 1.1",)


@pytest.mark.parametrize("config", ["{", '{"eos_token_id": "x"}', "[]"])
def test_a_damaged_config_is_refused(model_dir: Path, config: str) -> None:
    (model_dir / "generation_config.json").write_text(config)
    with pytest.raises(BadModel, match=r"generation_config.json is unreadable"):
        open_generation_info(str(model_dir))


def test_a_model_without_a_tokenizer_is_refused(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    with pytest.raises(BadModel, match="expected a tokenizer"):
        open_generation_info(str(model_dir))
