"""The tokenizer beside the weights."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from swarm_ft.errors import BadModel
from swarm_ft.stage.checkpoint import find_source, open_checkpoint
from swarm_ft.stage.tokenizer import tokenizer_in
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


# ---- whatever AutoTokenizer reads; sources: huggingface/transformers#6368, #3427 and #36291,
# openai/tiktoken#353


def only(directory: Path, name: str, content: bytes, model_type: str = "bert") -> Path:
    """A checkpoint's directory in which this file alone holds a vocabulary."""
    for path in directory.glob("token*"):
        path.unlink()
    (directory / name).write_bytes(content)
    config = directory / "config.json"
    fields = json.loads(config.read_text())
    config.write_text(json.dumps(fields | {"model_type": model_type}))
    return directory


def test_a_vocabulary_of_one_word_a_line_is_read(directory: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s"]
    only(directory, "vocab.txt", "\n".join(words).encode())
    assert tokenizer_in(find_source(str(directory)))("cats")["input_ids"] == [2, 5, 6, 3]


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("tokenizer.model", "llama"),
        ("spm.model", "deberta-v2"),
        ("sentencepiece.bpe.model", "xlm-roberta"),
        ("spiece.model", "albert"),
    ],
)
def test_a_sentencepiece_model_is_refused_with_what_reads_it(
    directory: Path, name: str, model_type: str
) -> None:
    if find_spec("sentencepiece") is not None:
        pytest.skip("sentencepiece is installed")
    only(directory, name, b"\n\x0e\n\x05<unk>", model_type)
    with pytest.raises(BadModel, match=rf"{name} is a SentencePiece model.*sentencepiece proto"):
        tokenizer_in(find_source(str(directory)))


def test_a_pointer_of_git_lfs_is_named(directory: Path) -> None:
    only(directory, "tokenizer.model", b"version https://git-lfs.github.com/spec/v1\n", "llama")
    with pytest.raises(BadModel, match=r"tokenizer\.model is a pointer of Git LFS"):
        tokenizer_in(find_source(str(directory)))


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama"])
def test_a_tokenizer_that_transformers_makes_up_is_none(directory: Path, model_type: str) -> None:
    only(directory, "notes.txt", b"", model_type)
    with pytest.raises(BadModel, match="expected a tokenizer beside the weights"):
        tokenizer_in(find_source(str(directory)))


def test_a_file_that_the_class_does_not_read_is_no_vocabulary(directory: Path) -> None:
    """transformers gives GPT-2 one token here."""
    only(directory, "vocab.txt", b"a\nb\n", "gpt2")
    with pytest.raises(BadModel, match=r"cannot be read from vocab\.txt"):
        tokenizer_in(find_source(str(directory)))


def test_a_package_that_a_tokenizer_needs_is_named(directory: Path) -> None:
    if find_spec("sacremoses") is not None:
        pytest.skip("sacremoses is installed")
    only(directory, "vocab.json", b'{"<s>": 0}', "biogpt")
    (directory / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(BadModel, match="install sacremoses"):
        tokenizer_in(find_source(str(directory)))
