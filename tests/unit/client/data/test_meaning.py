"""Columns and keys that change what a row means: each is honoured, or refused with an option.

Sources: OpenAI's and Mistral's fine-tuning formats (`weight`); axolotl-ai-cloud/axolotl#1703,
fw-ai/cookbook#387, verl-project/verl#5472 (`train`, `trainable`); hiyouga/LLaMA-Factory
data/v1_sft_demo.jsonl (`loss_weight`), kto_en_demo.json, dpo_en_demo.json, mllm_demo.json;
huggingface/trl#1116 (unpaired preferences).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.data.chat import Document
from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.forms import form_of
from swarm_ft.client.data.rows import Row
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset
from tests.unit.client.data.conftest import CHAT, Words
from tests.unit.client.data.test_chat import ASKING, MARKED

TURNS = [
    {"role": "user", "content": "w1"},
    {"role": "assistant", "content": "w2"},
    {"role": "user", "content": "w3"},
    {"role": "assistant", "content": "w4"},
]
PAIR = {"prompt": "w1", "completion": " w2"}
INSTRUCTION = {"instruction": "w1", "output": "w2"}


def with_key(index: int, **key: object) -> dict[str, Any]:
    """Add a key to one message of a chat."""
    turns: list[dict[str, object]] = [dict(turn) for turn in TURNS]
    turns[index] |= key
    return {"messages": turns}


def document(words: Words, row: dict[str, Any], template: str, **options: Any) -> Document:
    form = form_of(row, ReadOptions(**options), words(chat=template), "data")
    return form.render(Row(row, "data, line 1", None))


def learned(found: Document) -> str:
    return "".join(piece.text for piece in found if piece.is_target)


def read(found: Document) -> str:
    return "".join(piece.text for piece in found if not piece.is_target)


@pytest.mark.parametrize("template", [CHAT + ASKING, MARKED], ids=["found", "marked"])
@pytest.mark.parametrize(
    "key",
    [
        {"weight": 0},
        {"weight": 0.0},
        {"weight": False},
        {"train": False},
        {"training": False},
        {"trainable": False},
        {"train_on_turn": False},
        {"loss_weight": 0.0},
        {"loss": False},
    ],
    ids=json.dumps,
)
def test_a_message_of_weight_0_is_only_read(
    words: Words, template: str, key: dict[str, object]
) -> None:
    found = document(words, with_key(1, **key), template, assistant_only_loss=True)
    assert learned(found).strip() == "w4 </s>"
    assert document(words, with_key(3, **key), template, assistant_only_loss=True) != found
    whole = document(words, with_key(1, **key), template)
    assert read(whole) == "<assistant> w2 </s> "
    assert learned(whole) == "<user> w1 </s> <user> w3 </s> <assistant> w4 </s> "


def test_the_last_and_the_first_message_may_have_weight_0(words: Words) -> None:
    assert read(document(words, with_key(3, weight=0), CHAT)) == "<assistant> w4 </s> "
    assert read(document(words, with_key(0, weight=0), CHAT)) == "<user> w1 </s> "
    both = with_key(0, weight=0)
    both["messages"][1]["weight"] = 0
    assert read(document(words, both, CHAT)) == "<user> w1 </s> <assistant> w2 </s> "


@pytest.mark.parametrize("value", [1, 1.0, True, None])
def test_a_message_of_weight_1_is_as_one_without(words: Words, value: object) -> None:
    plain = document(words, {"messages": TURNS}, MARKED, assistant_only_loss=True)
    key = with_key(1, weight=value)
    assert document(words, key, MARKED, assistant_only_loss=True) == plain
    assert learned(document(words, key, MARKED)) == learned(
        document(words, {"messages": TURNS}, MARKED)
    )


def test_a_template_that_forgets_cannot_tell_a_message_apart(words: Words) -> None:
    forgetful = "{{ messages | length }}" + CHAT
    with pytest.raises(BadDataset, match=r"line 1: .*message of weight 0 cannot be found"):
        document(words, with_key(0, weight=0), forgetful)
    with pytest.raises(BadDataset, match=r"line 1: .*the assistant's part cannot be found"):
        document(words, with_key(1, weight=0), forgetful)
    found = document(words, with_key(1, weight=0), forgetful + ASKING)
    assert read(found) == "w2 </s> "


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight", 0.5),
        ("weight", "much"),
        ("train", [True]),
        ("images", ["a.png"]),
        ("mask", True),
        ("loss_scale", 2.0),
        ("train_detail", [{"begin_offset": 0}]),
        ("label", "quality:4"),
        ("rejected", "w9"),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused_with_the_option(
    words: Words, key: str, value: object
) -> None:
    row = with_key(1, **{key: value})
    with pytest.raises(BadDataset, match=f"line 1: .*'{key}'.*--remove-columns messages.{key} "):
        document(words, row, CHAT)
    assert learned(document(words, row, CHAT, remove_columns=f"messages.{key}"))


def test_a_later_row_is_checked_too(
    opened: Callable[..., Dataset], jsonl: Callable[..., Path], words: Words
) -> None:
    path = jsonl({"messages": TURNS}, with_key(1, weight=0.5))
    with pytest.raises(BadDataset, match="line 2: expected 'weight' to be 0 or 1"):
        opened(path, tokenizer=words(chat=CHAT)).samples(4, 20)
    path = jsonl(PAIR, PAIR | {"label": False})
    with pytest.raises(BadDataset, match=r"line 2: 'label' .* --remove-columns label "):
        opened(path).samples(4, 20)


@pytest.mark.parametrize("row", [PAIR, INSTRUCTION, {"text": "w1 w2"}, {"messages": TURNS}])
@pytest.mark.parametrize(
    "column",
    [
        {"label": False},
        {"label": True},
        {"kto_tag": True},
        {"rejected": "w9"},
        {"chosen": [{"role": "assistant", "content": "w9"}]},
        {"images": ["a.png"]},
        {"videos": ["a.mp4"]},
        {"audio": {"bytes": "00"}},
        {"completion_mask": [0, 1]},
        {"weight": 0.5},
    ],
    ids=json.dumps,
)
def test_a_column_that_changes_the_meaning_is_refused(
    words: Words, row: dict[str, Any], column: dict[str, Any]
) -> None:
    (name,) = column
    with pytest.raises(BadDataset, match=f"'{name}'"):
        document(words, row | column, CHAT)
    plain = document(words, row, CHAT)
    assert document(words, row | column, CHAT, remove_columns=name) == plain
    if name != "label":  # beside text a column of classes is refused as such
        assert document(words, row | {name: None}, CHAT) == plain


@pytest.mark.parametrize("row", [PAIR, INSTRUCTION, {"text": "w1 w2"}])
@pytest.mark.parametrize("column", [{"tools": [{"name": "f"}]}, {"tools": '[{"name": "f"}]'}])
def test_tools_beside_text_are_refused(
    words: Words, row: dict[str, Any], column: dict[str, Any]
) -> None:
    with pytest.raises(BadDataset, match=r"'tools' belongs to chats.*--remove-columns tools"):
        document(words, row | column, CHAT)
    assert document(words, row | {"tools": ""}, CHAT) == document(words, row, CHAT)


@pytest.mark.parametrize("row", [PAIR, INSTRUCTION, {"text": "w1 w2"}, {"messages": TURNS}])
@pytest.mark.parametrize("weight", [0, 0.0, False, "0", "0.0", "false"])
def test_a_row_of_weight_0_is_only_read(words: Words, row: dict[str, Any], weight: object) -> None:
    found = document(words, row | {"weight": weight}, CHAT)
    assert not learned(found)
    assert read(found) == "".join(piece.text for piece in document(words, row, CHAT))
    assert document(words, row | {"weight": 1}, CHAT) == document(words, row, CHAT)


def test_a_row_of_weight_0_is_left_out_and_counted(
    opened: Callable[..., Dataset], jsonl: Callable[..., Path]
) -> None:
    path = jsonl({"text": "w1 w2", "weight": 1}, {"text": "w3 w4", "weight": 0})
    data = opened(path, packing=False)
    assert "not used" not in data.describe()[0]
    assert "not used: 'weight'" in opened(path, remove_columns="weight").describe()[0]
    samples = data.samples(3, 20)
    assert samples.tokens.tolist() == [[1, 2, 11]]


def test_keys_of_messages_that_nobody_reads_are_told(
    opened: Callable[..., Dataset], jsonl: Callable[..., Path], words: Words
) -> None:
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    turns = [dict(turn, name="A", date="today") for turn in TURNS]
    path = jsonl({"messages": turns, "id": 7})
    line = opened(path, tokenizer=words(chat=template)).describe()[0]
    assert line.endswith("; not used: 'id', 'date' of messages")
