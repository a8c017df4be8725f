"""Chats with tools, in two parts, and in ShareGPT's format give the same samples as in TRL.

The formats are those of https://huggingface.co/docs/trl/dataset_formats; the templates are TRL's
copies of models' templates.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from swarm_ft.client.data.chat import ChatTemplate
from swarm_ft.client.data.messages import Chat
from tests.unit.client.data.test_beside_trl import (
    CHATML,
    drawn_messages,
    drawn_text,
    our_samples,
    read,
)
from tests.unit.client.data.tokenizers_of_each_make import MAKES, tokenizer_of
from tests.unit.client.data.trl_samples import Sample, quiet, trl_samples

Draw = Callable[[random.Random], dict[str, Any]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def model_template(name: str) -> str:
    """Return a model's own chat template from TRL."""
    with quiet():
        import trl
    folder = Path(trl.__file__).parent / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def two_parts(draw: random.Random) -> dict[str, Any]:
    messages = drawn_messages(draw, draw.randint(1, 2))
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def completion_of_turns(draw: random.Random) -> dict[str, Any]:
    messages = drawn_messages(draw, 3)
    return {"prompt": messages[:-3], "completion": messages[-3:]}


def calls(draw: random.Random) -> dict[str, Any]:
    call = {"name": "weather", "arguments": {"city": drawn_text(draw, 2).strip()}}
    return {
        "messages": [
            {"role": "user", "content": f"a{drawn_text(draw, 4)}b"},
            {
                "role": "assistant",
                "content": draw.choice(("", "I look.")),
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "name": "weather", "content": f"a{drawn_text(draw, 2)}b"},
            {"role": "assistant", "content": f"a{drawn_text(draw, 4)}b"},
        ],
        "tools": draw.choice((TOOLS, json.dumps(TOOLS), None)),
    }


def thinking(draw: random.Random) -> dict[str, Any]:
    return {
        "messages": drawn_messages(draw, 1),
        "chat_template_kwargs": {"enable_thinking": draw.random() < 0.5},
    }


ASSISTANT = {"assistant_only_loss": True}
FORMATS: dict[str, tuple[Draw, str, dict[str, Any]]] = {
    "prompt and completion": (two_parts, CHATML, {}),
    "prompt and completion, all": (two_parts, CHATML, {"completion_only_loss": False}),
    "prompt and completion, qwen3": (two_parts, model_template("qwen3"), {}),
    "completion of turns": (completion_of_turns, CHATML, {}),
    "completion of turns, assistant only": (completion_of_turns, CHATML, ASSISTANT),
    "assistant of all": (
        completion_of_turns,
        CHATML,
        {**ASSISTANT, "completion_only_loss": False},
    ),
    "tool calls": (calls, model_template("qwen2_5"), {}),
    "tool calls, qwen3": (calls, model_template("qwen3"), {}),
    "tool calls, assistant only": (calls, model_template("qwen3_instruct_2507"), ASSISTANT),
    "tool calls, marked": (calls, model_template("qwen3_training"), ASSISTANT),
    "variables of the template": (thinking, model_template("qwen3_5_think"), {}),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", FORMATS)
def test_chats_are_those_of_trl(tmp_path: Path, name: str, make: str) -> None:
    ours, theirs, _ = both(name, make, tmp_path)
    if make != "byte-level BPE" and name in ("tool calls, assistant only", "tool calls, marked"):
        assert [one.ids for one in ours] == [one.ids for one in theirs]
    else:
        assert ours == theirs


def test_all_tokens_of_an_answers_last_letter_are_learned(tmp_path: Path) -> None:
    """Check Llama-2's line break of two tokens, of which transformers marks only the first.

    The client prints this difference, see docs/how-to/prepare-data.md.
    """
    ours, theirs, tokenizer = both("tool calls, marked", "prefix space", tmp_path)
    for our, their in zip(ours, theirs, strict=True):
        more = sorted(set(our.learned) - set(their.learned))
        assert not set(their.learned) - set(our.learned)
        assert {tokenizer.convert_ids_to_tokens(our.ids[place]) for place in more} == {"\n"}
        assert all(place - 1 in their.learned for place in more)


def both(
    name: str, make: str, folder: Path
) -> tuple[list[Sample], list[Sample], PreTrainedTokenizerFast]:
    """Return our samples of random rows, and TRL's."""
    row, template, options = FORMATS[name]
    draw = random.Random(f"{name}{make}")
    rows = [row(draw) for _ in range(12)]
    if "tools" in rows[0]:  # TRL reads a column of one type
        kind = draw.choice((list, str))
        rows = [one | {"tools": _as(kind, one["tools"])} for one in rows]
    tokenizer = tokenizer_of(make, "$A", template)
    arguments = {"max_length": 600, **options}
    ours = our_samples(rows, tokenizer, folder, **arguments)
    return ours, trl_samples(rows, tokenizer, **arguments), tokenizer


def _as(kind: type, tools: object) -> object:
    if tools is None or isinstance(tools, kind):
        return tools
    return json.loads(str(tools)) if kind is list else json.dumps(tools)


def test_sharegpt_by_templates_roles_is_as_in_trl(tmp_path: Path) -> None:
    draw = random.Random(5)
    chats = [drawn_messages(draw, 2) for _ in range(5)]
    rows = [
        {"conversations": [{"from": one["role"], "value": one["content"]} for one in chat]}
        for chat in chats
    ]
    tokenizer = tokenizer_of("byte-level BPE", "$A", CHATML)
    arguments: dict[str, Any] = {"max_length": 400, **ASSISTANT}
    ours = our_samples(rows, tokenizer, tmp_path, **arguments)
    assert ours == trl_samples(rows, tokenizer, **arguments)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    for row in rows:
        for one in row["conversations"]:
            one["from"] = names[one["from"]]
    renamed, printed = read(rows, tokenizer, tmp_path, **arguments)
    assert renamed == ours
    assert "'human' as user, 'gpt' as assistant; TRL passes the names to the template" in printed


def test_differences_of_a_chat_are_printed(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template("qwen2_5"))
    user = {"role": "user", "content": "Oslo?"}

    def printed(**message: object) -> str:
        messages = [user, {"role": "assistant", "content": "Look.", **message}]
        return read([{"messages": messages}], tokenizer, tmp_path, max_length=400)[1]

    def call(arguments: object) -> list[object]:
        return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]

    assert "tool calls: the template gets 'arguments' or 'content'" in printed(
        tool_calls=call('{"city": "Oslo"}')
    )
    assert "TRL" not in printed(tool_calls=call({"city": "Oslo"}))
    assert "messages of weight 0 are only read; TRL ignores" in printed(weight=0)


# ---- what templates take of a call


def called(arguments: object, **content: object) -> Chat:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    return Chat(
        [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
        ]
    )


def written(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> str:
    template = ChatTemplate(tokenizer)
    return template.text(template.prepare(chat))


TAKING_OBJECTS = (
    *("gemma4", "glm4moe", "gptoss", "lfm2_v2", "llama3_1", "nemotron_3_nano", "qwen2_5"),
    *("qwen3", "qwen3_5_think", "qwen3_instruct_2507"),
)


@pytest.mark.parametrize("name", TAKING_OBJECTS)
@pytest.mark.parametrize("content", [{}, {"content": ""}], ids=["no content", "empty content"])
def test_arguments_as_text_are_written_as_the_object(name: str, content: dict[str, str]) -> None:
    """OpenAI's files have `arguments` as JSON text, which most templates would quote once more."""
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template(name))
    expected = tokenizer.apply_chat_template(
        list(called({"city": "Oslo"}, **content).messages), tokenize=False
    )
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        assert written(tokenizer, called(arguments, **content)) == expected


def test_arguments_as_an_object_are_written_as_text_where_the_template_takes_text() -> None:
    """deepseek-ai/DeepSeek-V3's template joins texts: huggingface/transformers#45419."""
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template("deepseekv3"))
    text = written(tokenizer, called('{"city": "Oslo"}', content=""))
    assert '{"city": "Oslo"}' in text
    assert written(tokenizer, called({"city": "Oslo"}, content="")) == text
    assert written(tokenizer, called({"city": "Oslo"})) == text


def test_text_stays_text_where_the_template_takes_both() -> None:
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template("qwen3"))
    assert '{"city":"Oslo"}' in written(tokenizer, called('{"city":"Oslo"}', content=""))
    assert '"arguments": {}' in written(tokenizer, called("{}", content=""))


@pytest.mark.parametrize("name", ["llama3", "lfm2", "phi3", "qwen2_5_vl"])
def test_templates_that_do_not_know_calls_are_refused(name: str) -> None:
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template(name))
    with pytest.raises(ValueError, match="omits 'tool_calls'"):
        written(tokenizer, called({"city": "Oslo"}, content=""))


# ---- templates that write a chat's beginning otherwise than the chat

TURNS: list[dict[str, object]] = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    {"role": "user", "content": "Yes."},
    {"role": "assistant", "content": "Yes."},
]
CALLING = [
    *called({"city": "Oslo"}, content="").messages,
    {"role": "assistant", "content": "It is sunny."},
]
QWEN_CALL = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
)
THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "messages", "learned"),
    [
        ("qwen3", TURNS, ["Yes.<|im_end|>\n", f"{THOUGHT}Yes.<|im_end|>\n"]),
        ("qwen3", CALLING, [QWEN_CALL, f"{THOUGHT}It is sunny.<|im_end|>\n"]),
        ("qwen3_5_think", TURNS, ["Yes.<|im_end|>\n", "\n</think>\n\nYes.<|im_end|>\n"]),
        ("nemotron_3_nano", TURNS, ["<think></think>\nYes.<|im_end|>\n", "<think></think>Yes."]),
        ("gemma4_v5", TURNS, ["Yes.<turn|>\n", "Yes.<turn|>\n"]),
    ],
)
def test_answers_are_found_where_thoughts_of_earlier_turns_are_left_out(
    name: str, messages: Any, learned: list[str]
) -> None:
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template(name))
    template, chat = ChatTemplate(tokenizer), Chat(messages)
    found = template.document(template.prepare(chat), assistant_only=True)
    assert "".join(piece.text for piece in found) == template.text(chat)
    answers = [piece.text for piece in found if piece.is_target]
    assert len(answers) == len(learned)
    assert all(answer.startswith(start) for answer, start in zip(answers, learned, strict=True))
    weighted = template.document(chat._replace(context_indices=frozenset({1})), assistant_only=True)
    assert [piece.text for piece in weighted if piece.is_target] == answers[1:]


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "gptoss", "phi3"])
def test_answers_that_are_not_found_are_refused(name: str) -> None:
    """Templates render the last answer's end or header differently from earlier ones."""
    tokenizer = tokenizer_of("byte-level BPE", "$A", model_template(name))
    with pytest.raises(ValueError, match="the assistant's part cannot be found"):
        ChatTemplate(tokenizer).document(Chat(TURNS), assistant_only=True)
