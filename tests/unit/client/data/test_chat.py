"""Rendered chats, and the assistant's part in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from swarm_ft.client.data.chat import ChatTemplate, Document, render_chat
from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.messages import Chat
from swarm_ft.errors import BadDataset
from swarm_ft.protocol.spec.sample_rows import CONTEXT
from tests.unit.client.data.conftest import CHAT, Words

ASKING = "{% if add_generation_prompt %}<assistant> {% endif %}"
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} </s>{% endgeneration %}{% else %}{{ m.content }} </s>{% endif %} {% endfor %}"
)
FORGETFUL = "{{ messages | length }}" + CHAT


def pieces_of_chat(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast) -> Document:
    return ChatTemplate(tokenizer).document(Chat(messages), assistant_only=True)


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.mark.parametrize("template", [CHAT + ASKING, MARKED], ids=["found out", "marked"])
def test_what_the_assistant_says_is_told_apart(words: Words, template: str) -> None:
    tokenizer = words(chat=template)
    messages = chat("w1", "w2 w3", "w4", "w5", "w6")
    pieces = pieces_of_chat(messages, tokenizer)
    assert "".join(one.text for one in pieces) == render_chat(messages, tokenizer)
    learned = [one.text.strip() for one in pieces if one.is_target]
    assert learned == ["w2 w3 </s>", "w5 </s>"]
    assert pieces[0].text == "<user> w1 </s> <assistant> "


def test_a_chat_in_which_nobody_answers_is_only_read(words: Words) -> None:
    for template in (CHAT + ASKING, MARKED):
        (piece,) = pieces_of_chat(chat("w1"), words(chat=template))
        assert not piece.is_target


def test_a_template_that_forgets_needs_marks(
    opened: Callable[..., Dataset], jsonl: Callable[..., Path], words: Words
) -> None:
    path, tokenizer = jsonl({"messages": chat("w1", "w2")}), words(chat=FORGETFUL)
    with pytest.raises(BadDataset, match=r"line 1: .*\{% generation %\} and .*template"):
        opened(path, tokenizer=tokenizer, assistant_only_loss=True)
    assert opened(path, tokenizer=tokenizer).samples(2, 20).tokens.size


def test_messages_of_others_are_read_if_it_is_asked_for(
    opened: Callable[..., Dataset], jsonl: Callable[..., Path], words: Words
) -> None:
    path, tokenizer = jsonl({"messages": chat("w1", "w2")}), words(chat=CHAT + ASKING)
    data = opened(path, tokenizer=tokenizer, assistant_only_loss=True)
    assert data.describe()[1] == (
        "  the first document, of which [this] is only read and the rest learned: "
        "['<user> w1 </s> <assistant> '] + 'w2 </s> '"
    )
    read = [CONTEXT | token for token in (10, 1, 11, 10)]
    assert data.samples(6, 20).tokens.tolist() == [[*read, 2, 11]]
    whole = opened(path, tokenizer=tokenizer).samples(6, 20).tokens.tolist()
    assert whole == [[10, 1, 11, 10, 2, 11]]
