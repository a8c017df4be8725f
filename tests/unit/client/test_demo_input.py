from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarm_ft.client.data.text_files import read_file
from swarm_ft.client.demo_input import DemoInput, write_demo_input
from swarm_ft.errors import BadDataset


def test_the_sample_loads_as_a_hugging_face_checkpoint(sample: DemoInput) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sample.model_dir)
    model = AutoModelForCausalLM.from_pretrained(sample.model_dir)
    text = read_file(Path(sample.eval_file))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < model.config.vocab_size == len(tokenizer) == 512
    assert model.config.model_type == "gpt2"
    assert not model.config.tie_word_embeddings


def test_the_text_is_enough_to_train_on_and_none_of_it_is_held_out(sample: DemoInput) -> None:
    train, heldout = (read_file(Path(p)) for p in (sample.train_file, sample.eval_file))
    assert 50_000 < len(train) < 110_000
    assert 10_000 < len(heldout) < 40_000
    assert "def " in train
    train_lines = {line for line in train.splitlines() if len(line) > 40}
    assert not train_lines & {line for line in heldout.splitlines() if len(line) > 40}


def test_one_seed_always_makes_the_same_files(tmp_path: Path, sample: DemoInput) -> None:
    again = write_demo_input(tmp_path / "again", seed=3, num_layers=2, hidden_size=32)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (Path(again.model_dir) / name).read_bytes() == (
            Path(sample.model_dir) / name
        ).read_bytes()


def test_another_seed_makes_other_weights_and_leaves_the_generator_alone(
    tmp_path: Path, sample: DemoInput
) -> None:
    before = torch.get_rng_state()
    other = write_demo_input(tmp_path, seed=4, num_layers=2, hidden_size=32)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [Path(s.model_dir, "model.safetensors").read_bytes() for s in (sample, other)]
    assert weights[0] != weights[1]


def test_embeddings_are_tied_when_asked(tmp_path: Path) -> None:
    tied = write_demo_input(tmp_path, seed=0, num_layers=1, hidden_size=16, tied_embeddings=True)
    assert AutoConfig.from_pretrained(tied.model_dir).tie_word_embeddings


def test_a_python_without_sources_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "zipped"))
    with pytest.raises(BadDataset, match=r"bisect\.py.*--dataset") as caught:
        write_demo_input(tmp_path / "out", seed=0)
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_demo_input(tmp_path, seed=0, num_layers=1, hidden_size=16)
    assert capfd.readouterr() == ("", "")
