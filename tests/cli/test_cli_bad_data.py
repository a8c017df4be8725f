"""Every way to get data wrong gets one line with the remedy, and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import RunHere, error_lines

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
WRONG: dict[str, tuple[dict[str, str | bytes], str, tuple[str, ...]]] = {
    # the files; the request; the words of the line
    "missing file": ({}, "absent.jsonl", ("no such file",)),
    "empty file": ({"a.jsonl": ""}, "a.jsonl", ("empty",)),
    "rows without text": ({"a.jsonl": '{"text": ""}\n'}, "a.jsonl", ("empty",)),
    "too little text": ({"a.txt": "hi"}, "a.txt", ("128 tokens", "--seq-length")),
    "directory without data": ({"d/a.pdf": "x"}, "d", ("'d'", "found none")),
    "unknown extension": ({"a.pdf": "x"}, "a.pdf", ("'.pdf'", "--data-format")),
    "unknown format": ({"a.txt": "x"}, "a.txt --data-format xml", ("--data-format", "'jsonl'")),
    "several formats": ({"d/a.csv": "x", "d/b.json": "x"}, "d", ("a.csv", "--data-format")),
    "unknown split": ({"d/train.csv": "text\na\n"}, "d --split dev", ("'dev'", "train")),
    "split of a file": ({"a.csv": "text\na\n"}, "a.csv --split dev", ("'dev'", "'train'")),
    "unknown split to evaluate": ({"d/a.csv": "text\na\n"}, "d --eval-split x", ("'x'", "train")),
    "JSON lines as text": ({"a.txt": '{"text": "hi"}\n'}, "a.txt", ("--data-format jsonl",)),
    "JSON as text": ({"a.txt": '[\n{"text":\n"hi"}]'}, "a.txt", ("--data-format json",)),
    "TSV as text": ({"a.txt": "a\tb\n" * 3}, "a.txt", ("--data-format tsv",)),
    "CSV as text": ({"d/a.txt": "a,b\n" * 3}, "d", ("--data-format csv",)),
    "bad JSON": ({"a.jsonl": '{"text": "a"}\n{"text"\n'}, "a.jsonl", ("line 2", "JSON")),
    "bad JSON array": ({"a.json": '[\n{"text": "a"},\n'}, "a.json", ("line 3", "JSON")),
    "JSON that is no rows": ({"a.jsonl": "[1]\n"}, "a.jsonl", ("line 1", "got a list")),
    "wrong encoding": ({"a.jsonl": b'{"text": "\xfc"}'}, "a.jsonl", ("line 1", "UTF-8")),
    "CSV of another encoding": ({"a.csv": b"text\n\xfc"}, "a.csv", ("line 2", "UTF-8")),
    "ragged CSV": ({"a.csv": "text,id\na,1\nb\n"}, "a.csv", ("line 3", "2 columns, got 1")),
    "stray quote": ({"a.csv": 'text\n"a" b\n'}, "a.csv", ("line 2", "--no-quotes")),
    "no line of names": ({"a.tsv": "gj\t1\t\tx\n"}, "a.tsv", ("line 1", "--column-names")),
    "missing column": ({"a.csv": "text\na\n"}, "a.csv --text-column body", ("'body'", "'text'")),
    "unknown columns": ({"a.csv": "x,y\na,b\n"}, "a.csv", ("'x', 'y'", "--text-column")),
    "column not text": ({"a.jsonl": '{"text": 5}'}, "a.jsonl", ("line 1", "got a number")),
    "mixed types": ({"a.jsonl": '{"text": "a"}\n{"text": [1]}'}, "a.jsonl", ("line 2", "a list")),
    "missing value": ({"a.jsonl": '{"text": "a"}\n{}'}, "a.jsonl", ("line 2", "nothing")),
    "classification": ({"a.csv": "text,label\na,1\n"}, "a.csv", ("'label'", "--text-column text")),
    "no classes": (
        {"a.csv": "text\na\n"},
        "a.csv --task classification",
        ("'label'", "--label-column"),
    ),
    "one class": (
        {"a.csv": "text,label\na,1\n"},
        "a.csv --task classification",
        ("two classes", "'1'"),
    ),
    "classes of text": (
        {"a.txt": "hi"},
        "a.txt --task classification",
        ("columns of text and classes",),
    ),
    "no such class": (
        {"a.csv": "text,label\na,c\n"},
        "a.csv --task classification --labels a,b",
        ("line 2", "'c'", "--labels"),
    ),
    "quotes of a TSV": (
        {"a.tsv": 'n\ttext\n1\t"a\n2\tb"\n'},
        "a.tsv",
        ("lines 2 to 3", "--no-quotes"),
    ),
    "semicolons": ({"a.csv": "text;n\na;1\n"}, "a.csv", ("line 1", "--delimiter ';'")),
    "UTF-16": ({"a.csv": "text\na\n".encode("utf-16")}, "a.csv", ("line 1", "UTF-16", "iconv")),
    "cut off gzip": (
        {"a.jsonl.gz": b"\x1f\x8b\x08\0\0"},
        "a.jsonl.gz",
        ("a.jsonl.gz", "truncated"),
    ),
    "half a character": ({"a.jsonl": '{"text": "\\ud83d"}'}, "a.jsonl", ("line 1", "ud83d")),
    "key twice": ({"a.jsonl": '{"text": "a", "text": "b"}'}, "a.jsonl", ("line 1", "'text'")),
    "list of rows unclear": ({"a.json": '{"x": [{"a": 1}]}'}, "a.json", ("--field x",)),
    "number without a name": (
        {"a.csv": "text,label\na,3\n"},
        "a.csv --task classification --labels 1,2",
        ("line 2", "'3'", "--labels"),
    ),
    "shares of one dataset": ({"a.csv": "text\na\n"}, "a.csv --probabilities 0.5,0.5", ("--prob",)),
    "no chat template": ({"a.jsonl": json.dumps(MESSAGES)}, "a.jsonl", ("chat template",)),
    "text column of text": ({"a.txt": "hi"}, "a.txt --text-column x", ("--text-column", "a.txt")),
    "torn Parquet": ({"a.parquet": b"PAR1 and no more"}, "a.parquet", ("a.parquet", "read")),
    "no Arrow": ({"a.arrow": "this is text"}, "a.arrow", ("a.arrow", "read")),
    "not on the hub": ({}, "nobody/nothing", ("nobody/nothing", "hub")),
}
WRONG_CHATS: dict[str, tuple[object, tuple[str, ...]]] = {
    "messages without roles": ([{"content": "hi"}], ("line 1", "'role'")),
    "messages of another kind": ([{"speaker": "human", "says": "hi"}], ("line 1", "'role'")),
    "no messages": ([], ("line 1", "an empty one")),
    "messages that are text": ("hi", ("line 1", "got text")),
    "a role that the template refuses": ([{"role": "tool", "content": "x"}], ("no tools here",)),
}


@pytest.fixture
def place(tmp_path: Path, sample: DemoInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "model").symlink_to(sample.model_dir)
    return tmp_path


def refused(run_here: RunHere, place: Path, *arguments: str) -> str:
    """The one line of a demo that was refused, and that left nothing behind."""
    before = sorted(place.rglob("*"))
    result = run_here("demo", "--dataset", *arguments)
    assert result.code == 2, result.err
    assert result.out == ""
    (line,) = error_lines(result.err)
    assert line.startswith("swarm-ft: ")
    assert sorted(place.rglob("*")) == before
    return line


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_data_is_refused_in_a_line(run_here: RunHere, place: Path, wrong: str) -> None:
    files, arguments, words = WRONG[wrong]
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    line = refused(run_here, place, *arguments.split(), "--model", "model")
    assert all(word in line for word in words), line


@pytest.mark.parametrize("wrong", WRONG_CHATS)
def test_wrong_chats_are_refused_in_a_line(
    run_here: RunHere, place: Path, sample: DemoInput, wrong: str
) -> None:
    (place / "chat").mkdir()
    for file in Path(sample.model_dir).iterdir():
        (place / "chat" / file.name).symlink_to(file)
    (place / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    messages, words = WRONG_CHATS[wrong]
    (place / "a.jsonl").write_text(json.dumps({"messages": messages}))
    line = refused(run_here, place, "a.jsonl", "--model", "chat")
    assert all(word in line for word in words), line
