"""The tokenizer beside the weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from swarm_ft.errors import BadModel
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.unit.stage.conftest import MakeModel


@pytest.fixture
def directory(make_model: MakeModel, tmp_path: Path) -> Path:
    copy = shutil.copytree(make_model("gpt2-tied"), tmp_path / "model")
    words = Tokenizer(WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(copy)
    return copy


def test_tokenizer_is_that_of_the_checkpoint(directory: Path) -> None:
    tokenizer = open_checkpoint(str(directory)).tokenizer()
    assert tokenizer("two one three")["input_ids"] == [2, 1, 0]


def test_damaged_tokenizer_is_refused(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(BadModel, match="tokenizer"):
        open_checkpoint(str(directory)).tokenizer()
