"""Rows in the shapes that people have.

Sources: lm-sys/FastChat data/dummy_conversation.json; alpaca_en_demo.json,
glaive_toolcall_en_demo.json, v1_sft_demo.jsonl and reason_tool_use_demo_50.jsonl of
hiyouga/LLaMA-Factory; trl-lib/kto-mix-14k and TRL's dataset formats;
databricks/databricks-dolly-15k; openai/gsm8k; OpenAI's chat format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swarm_ft.api.training import job_options
from swarm_ft.cli.main import cli
from swarm_ft.client.data.chat import Document
from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.forms import ALPACA_HEAD, ALPACA_HEAD_WITH_INPUT, form_of
from swarm_ft.client.data.rows import Row
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.options import arguments
from tests.unit.client.data.conftest import Words

PLAIN = (
    "{% if tools %}<tools> {{ tools | tojson }} {% endif %}{% for m in messages %}<{{ m.role }}> "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
CALL = {"name": "f", "arguments": {"city": "Oslo"}}


def document(words: Words, row: dict[str, Any], chat: str = PLAIN, **options: Any) -> Document:
    form = form_of(row, ReadOptions(**options), words(chat=chat), "data")
    return form.render(Row(row, "data, line 1", None))


def text(found: Document) -> str:
    return "".join(piece.text for piece in found)


# ---- chats


@pytest.mark.parametrize("column", ["conversations", "conversation", "messages"])
def test_sharegpt_is_a_chat(words: Words, column: str) -> None:
    row = {
        "id": "identity_0",
        column: [
            {"from": "system", "value": "w0"},
            {"from": "Human", "value": "w1"},
            {"from": "gpt", "value": "w2"},
        ],
    }
    assert text(document(words, row)) == "<system> w0 </s> <user> w1 </s> <assistant> w2 </s> "
    answer = document(words, row, assistant_only_loss=True)
    assert [one.text for one in answer if one.is_target] == ["w2 </s> "]


def test_sharegpt_with_tools_is_as_openai_writes_it(words: Words) -> None:
    tools = [{"name": "f", "parameters": {}}]
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "w1"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "w2"},
            {"from": "gpt", "value": "w3"},
        ],
        "system": "w0",
        "tools": json.dumps(tools),
    }
    openai: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "w0"},
            {"role": "user", "content": "w1"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
            {"role": "tool", "content": "w2"},
            {"role": "assistant", "content": "w3"},
        ],
        "tools": tools,
    }
    legacy = {"messages": [*openai["messages"]], "functions": tools}
    legacy["messages"][2] = {"role": "assistant", "content": None, "function_call": CALL}
    assert document(words, sharegpt) == document(words, openai)
    as_text = {**openai, "messages": [dict(one) for one in openai["messages"]]}
    as_text["messages"][2]["tool_calls"] = json.dumps(as_text["messages"][2]["tool_calls"])
    assert document(words, as_text) == document(words, openai)
    assert "<tools> " + json.dumps(tools) in text(document(words, openai))
    assert json.dumps(CALL) in text(document(words, legacy))


def test_roles_of_from_that_templates_do_not_know_are_theirs_to_refuse(words: Words) -> None:
    row = {"conversations": [{"from": "critic", "value": "w1"}]}
    assert text(document(words, row)) == "<critic> w1 </s> "
    refusing = "{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}"
    with pytest.raises(BadDataset, match=r"line 1: .*no critic"):
        document(words, row, refusing)


def test_messages_that_a_template_leaves_out_are_refused(words: Words) -> None:
    deaf = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": "w1"}, {"role": "tool", "content": "w2"}]
    }
    with pytest.raises(BadDataset, match="omits messages of 'tool'"):
        document(words, row, deaf)
    calls: list[dict[str, Any]] = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2", "tool_calls": [CALL]},
    ]
    with pytest.raises(BadDataset, match="omits 'tool_calls'"):
        document(words, {"messages": calls}, deaf)
    row |= {"messages": [{"role": "user", "content": "w1"}], "tools": [CALL]}
    with pytest.raises(BadDataset, match=r"omits 'tools' \(--remove-columns tools"):
        document(words, row, deaf)
    assert text(document(words, row, deaf, remove_columns="tools")) == "w1"


def test_a_system_column_goes_in_front_of_a_chat(words: Words) -> None:
    turns = [{"role": "user", "content": "w1"}]
    row = {"messages": turns, "system": "w0"}
    assert text(document(words, row)) == "<system> w0 </s> <user> w1 </s> "
    assert text(document(words, row | {"system": ""})) == "<user> w1 </s> "
    twice = {"messages": [{"role": "system", "content": "w9"}, *turns], "system": "w0"}
    with pytest.raises(
        BadDataset, match=r"line 1: 'system' and the first message.*--remove-columns sys"
    ):
        document(words, twice)


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "w1 w2"}],
        [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}],
        [{"type": "input_text", "text": "w1 w2"}],
        [{"type": "text", "value": "w1 w2"}],
        [{"text": "w1 w2"}],
        [{"type": "text", "text": "w1 w2", "image_url": None}],
    ],
    ids=json.dumps,
)
def test_parts_of_text_are_one_text(words: Words, content: object) -> None:
    row = {"messages": [{"role": "user", "content": content}]}
    assert text(document(words, row)) == "<user> w1 w2 </s> "


def test_parts_of_reasoning_and_calls_stand_beside_the_text(words: Words) -> None:
    parts = [
        {"type": "reasoning", "value": "w1"},
        {"type": "text", "value": "w2"},
        {"type": "tool_call", "value": json.dumps(CALL)},
    ]
    row = {"messages": [{"role": "assistant", "content": parts, "loss_weight": 1.0}]}
    call = json.dumps({"type": "function", "function": CALL})
    assert text(document(words, row)) == f"<assistant> (w1) w2{call} </s> "


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "a"}}, "has type 'image_url'"),
        ({"type": "input_audio"}, "has type 'input_audio'"),
        ({"text": "w1", "cache": True}, "has type None"),
        ({"type": "text"}, "'text' to be text, got nothing"),
        ({"type": "tool_call", "value": "f()"}, "a tool call as a JSON object"),
    ],
)
def test_other_parts_are_refused_by_their_kind(
    words: Words, part: dict[str, Any], message: str
) -> None:
    row = {"messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(BadDataset, match=f"line 1: .*{message}"):
        document(words, row)


@pytest.mark.parametrize("calls", ["f()", {"name": "f"}, ["f"], 5], ids=json.dumps)
def test_calls_that_are_none_are_refused(words: Words, calls: object) -> None:
    row = {"messages": [{"role": "assistant", "content": "w1", "tool_calls": calls}]}
    with pytest.raises(BadDataset, match="line 1: expected 'tool_calls' to be a list of objects"):
        document(words, row)


@pytest.mark.parametrize("calls", [[], None, ""], ids=["an empty list", "nothing", "empty text"])
def test_no_calls_are_no_calls(words: Words, calls: object) -> None:
    template = "{% for m in messages %}{{ 'tool_calls' in m }} {% endfor %}{{ messages | tojson }}"
    row = {"messages": [{"role": "assistant", "content": "w1", "tool_calls": calls}]}
    assert text(document(words, row, template)).startswith("False ")


# ---- chats as prompt and completion


QUESTION = [{"role": "user", "content": "w1"}]
ANSWER = [{"role": "assistant", "content": "w2"}]


def test_a_chat_may_be_a_prompt_and_a_completion(words: Words) -> None:
    row = {"prompt": QUESTION, "completion": ANSWER}
    found = document(words, row)
    assert [tuple(one[:2]) for one in found] == [
        ("<user> w1 </s> <assistant> ", False),
        ("w2 </s> ", True),
    ]
    whole = document(words, row, completion_only_loss=False)
    assert [tuple(one[:2]) for one in whole] == [("<user> w1 </s> <assistant> w2 </s> ", True)]


def test_of_a_completion_with_several_turns_the_assistants_may_be_learned(words: Words) -> None:
    earlier = [*QUESTION, *ANSWER, {"role": "user", "content": "w3"}]
    more = [
        {"role": "assistant", "content": "w4"},
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": "w6"},
    ]
    row: dict[str, Any] = {"prompt": earlier, "completion": more}

    def learned(**options: Any) -> list[str]:
        return [one.text for one in document(words, row, **options) if one.is_target]

    assert learned() == ["w4 </s> <user> w5 </s> <assistant> w6 </s> "]
    assert learned(assistant_only_loss=True) == ["w4 </s> ", "w6 </s> "]
    both = learned(assistant_only_loss=True, completion_only_loss=False)
    assert both == ["w2 </s> ", "w4 </s> ", "w6 </s> "]
    weighted = [{**more[0], "weight": 0}, *more[1:]]
    row = {"prompt": earlier, "completion": weighted}
    assert learned(assistant_only_loss=True) == ["w6 </s> "]


def test_a_text_as_prompt_of_a_chat_is_refused(words: Words) -> None:
    with pytest.raises(BadDataset, match="expected 'completion' to be text, got a list"):
        document(words, {"prompt": "w1", "completion": ANSWER})


# ---- instructions


def test_dolly_is_an_instruction(words: Words) -> None:
    row = {"instruction": "w1", "context": "w2", "response": "w3", "category": "open_qa"}
    as_alpaca = {"instruction": "w1", "input": "w2", "output": "w3"}
    assert document(words, row) == document(words, as_alpaca)
    assert text(document(words, row)).startswith(ALPACA_HEAD_WITH_INPUT)
    bare = {"instruction": "w1", "response": "w3"}
    assert document(words, bare) == document(words, {"instruction": "w1", "output": "w3"})


def test_system_and_history_stand_in_front_of_an_instruction(words: Words) -> None:
    """Compare with LLaMA-Factory's template `alpaca`, which also learns earlier answers."""
    row = {
        "instruction": "w5",
        "input": "w6",
        "output": "w7",
        "system": "Be brief.",
        "history": [["w1", "w2"], ["w3", "w4"]],
    }
    assert [tuple(one[:2]) for one in document(words, row)] == [
        ("Be brief.\n\n### Instruction:\nw1\n\n### Response:\n", False),
        ("w2</s>", True),
        ("\n\n### Instruction:\nw3\n\n### Response:\n", False),
        ("w4</s>", True),
        ("\n\n### Instruction:\nw5\n\n### Input:\nw6\n\n### Response:\n", False),
        ("w7", True),
    ]
    nothing = {"instruction": "w5", "output": "w7", "system": "", "history": []}
    assert text(document(words, nothing)).startswith(ALPACA_HEAD)
    with pytest.raises(BadDataset, match="expected 'history' to be pairs of texts"):
        document(words, row | {"history": [["w1"]]})
    with pytest.raises(BadDataset, match="'history' belongs to chats"):
        document(words, {"prompt": "w1", "completion": "w2", "history": [["w1", "w2"]]})


# ---- other columns


GSM8K = {"question": "w1", "answer": "w2", "id": 7}


def test_columns_of_other_names_are_mapped(
    words: Words, opened: Callable[..., Dataset], jsonl: Callable[..., Path]
) -> None:
    column = ("prompt=question", "completion=answer")
    assert document(words, GSM8K, column=column) == document(
        words, {"prompt": "w1", "completion": "w2"}
    )
    line = opened(jsonl(GSM8K), column=column).describe()[0]
    assert (
        "a document is 'question' and 'answer', one right behind the other; not used: 'id'" in line
    )
    chat = {"dialog": QUESTION, "messages": "unused"}
    assert document(words, chat, column=("messages=dialog",)) == document(
        words, {"messages": QUESTION}
    )
    system = {"prompt": QUESTION, "completion": ANSWER, "rules": "w0"}
    assert text(document(words, system, column=("system=rules",))).startswith("<system> w0")


def test_a_mapped_column_may_be_a_text_of_several(words: Words) -> None:
    column = (r"prompt=Q: {question}\nA: ", "completion={answer}")
    found = document(words, GSM8K, column=column)
    assert [tuple(one[:2]) for one in found] == [("Q: w1\nA: ", False), ("w2", True)]


def test_a_template_is_a_text_that_is_all_learned(
    words: Words, opened: Callable[..., Dataset], jsonl: Callable[..., Path]
) -> None:
    template = r"Q: {question}\nA: {answer} {{{id}}}"
    (piece,) = document(words, GSM8K, template=template)
    assert (piece.text, piece.is_target) == ("Q: w1\nA: w2 {7}", True)
    lines = opened(jsonl(GSM8K), template="{question} {answer}").describe()
    assert "a document is the template '{question} {answer}'; not used: 'id'" in lines[0]
    assert "'w1 w2' + </s>" in lines[1]
    labelled = {"text": "w1", "label": 3}
    assert text(document(words, labelled, template="{text}: {label}")) == "w1: 3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": ("question",)}, "--column: expected NAME=COLUMN .*got 'question'"),
        ({"column": ("reward=answer",)}, "--column: expected NAME=COLUMN with a NAME of text, "),
        ({"column": ("text=question", "text=answer")}, "'text' is given twice"),
        ({"column": ("text=question",), "template": "{answer}"}, "'text' is given twice"),
        ({"text_column": "question", "template": "{answer}"}, "'text' is given twice"),
        ({"template": "no column"}, "--template: expected columns in braces"),
        ({"template": "{}"}, "--template: expected columns in braces"),
        ({"template": "{answer!r}"}, "--template: expected columns in braces"),
        ({"template": "{answer:>9}"}, "--template: expected columns in braces"),
        ({"template": "{answer"}, "--template: .* in '{answer'"),
        ({"column": ("text=question", "system=answer")}, "expected the columns"),
        (
            {"column": ("prompt=question", "completion=answer", "system=id")},
            "--column system: has no effect where a document is 'question' and 'answer'",
        ),
        ({"column": ("prompt=query", "completion=answer")}, "no column 'query'; it has 'question'"),
        ({"template": "{query}"}, "no column 'query'; it has 'question'"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused(
    words: Words, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((BadOption, BadDataset), match=message):
        document(words, GSM8K, **options)


def test_a_row_that_lacks_a_column_of_a_template_is_refused(
    opened: Callable[..., Dataset], jsonl: Callable[..., Path]
) -> None:
    data = opened(jsonl(GSM8K, {"question": "w1", "answer": None}), template="{question}{answer}")
    with pytest.raises(BadDataset, match="line 2: expected 'answer' to be text or a number"):
        data.samples(4, 20)


def test_columns_that_fit_nothing_are_refused_with_the_options(words: Words) -> None:
    with pytest.raises(
        BadDataset,
        match=r"got 'question', 'answer', 'id'; .*--column prompt=question --column completion=",
    ):
        document(words, GSM8K)


# ---- from users to options


def test_the_option_may_be_given_several_times() -> None:
    named = {"model": "m", "dataset": "d"}
    pairs = {"prompt": "question", "completion": "answer"}
    texts = ("prompt=question", "completion=answer")
    for value in (pairs, list(texts), texts):
        options = job_options({**named, "column": value})
        assert options.reading.column == texts
    columns = ["--column", "prompt=question", "--column", "completion=answer"]
    assert arguments(options)[-4:] == columns
    assert job_options({**named, "column": "text=question"}).reading.column == ("text=question",)
    with pytest.raises(BadOption, match="--column: expected texts, got 5"):
        job_options({**named, "column": 5})
    command = ["client", "train", "--model", "m", "--dataset", "d", *columns, "--print-config"]
    shown = CliRunner().invoke(cli, command)
    assert "column:\n- prompt=question\n- completion=answer\n" in shown.output
