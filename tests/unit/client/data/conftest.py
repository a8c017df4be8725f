"""Tokenizer of words, and data files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.options import DataFormat, ReadOptions

Words = Callable[..., PreTrainedTokenizerFast]
CHAT = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('roles are user and assistant') }}{% endif %}"
    "<{{ message.role }}> {{ message.content }} </s> {% endfor %}"
)
END = 11
BEGIN = 12


@pytest.fixture(scope="session")
def words() -> Words:
    """Return a factory of tokenizers with one token a word: w0 to w9, unknown 10, end 11.

    `single` is the template of special tokens around a text; by default 12 comes first.
    """

    def make(
        *,
        max_length: int = 4,
        eos: str | None = "</s>",
        chat: str | None = None,
        single: str = "<s> $A",
    ) -> PreTrainedTokenizerFast:
        vocab = {f"w{i}": i for i in range(10)} | {"?": 10, "</s>": END, "<s>": BEGIN}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # Like Llama's it puts a special token in front if let.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair="<s> $A $B:1", special_tokens=[("<s>", BEGIN), ("</s>", END)]
        )
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=max_length,
            eos_token=eos,
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )
        made.chat_template = chat
        return made

    return make


@pytest.fixture
def opened(words: Words) -> Callable[..., Dataset]:
    """Return a function that opens a dataset; by default no token precedes a text."""

    def open_it(
        path: object,
        *,
        split: str | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
        data_format: DataFormat | None = None,
        **options: object,
    ) -> Dataset:
        reading = ReadOptions(data_format=data_format, **options)  # type: ignore[arg-type]
        wanted = DataSelection(split=split, format=data_format)
        return open_dataset(str(path), wanted, reading, tokenizer or words(single="$A"))

    return open_it


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a JSON lines file; a text is written unchanged."""

    def write(*rows: object, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in _lines(rows)), encoding="utf-8")
        return path

    return write


def _lines(rows: Iterable[object]) -> Iterable[str]:
    return (row if isinstance(row, str) else json.dumps(row) for row in rows)
