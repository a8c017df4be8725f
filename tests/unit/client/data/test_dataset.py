"""Documents: meaning of columns, separators, and samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.forms import ALPACA_HEAD, ALPACA_HEAD_WITH_INPUT, form_of
from swarm_ft.client.data.progress import ReadProgress
from swarm_ft.client.data.rows import Row
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.options import DataFormat, PackingStrategy, ReadOptions, Truncation
from swarm_ft.client.prompt_text import tokenize_prompt
from swarm_ft.errors import BadDataset, BadInput, BadOption
from swarm_ft.protocol.spec.sample_rows import CONTEXT, NO_TOKEN
from tests.unit.client.data.conftest import BEGIN, CHAT, END, Words

Opened = Callable[..., Dataset]
Jsonl = Callable[..., Path]
VOCAB = 20
WRAPPED: dict[str, Any] = {"packing": True, "packing_strategy": PackingStrategy.WRAPPED}


def rows(data: Dataset, length: int = 2) -> list[list[int]]:
    """Return the tokens of each sample of up to `length` tokens."""
    return [
        [word for word in row if word != NO_TOKEN]
        for row in data.samples(length, VOCAB).tokens.tolist()
    ]


def ids(data: Dataset, length: int = 4) -> list[int]:
    """Return the tokens of all samples, concatenated."""
    return [word for row in rows(data, length) for word in row]


def pieces(words: Words, row: dict[str, Any], **options: Any) -> list[tuple[str, bool]]:
    form = form_of(row, ReadOptions(**options), words(chat=CHAT), "data")
    return [(one.text, one.is_target) for one in form.render(Row(row, "here", None))]


# ---- what columns mean


def test_a_text_is_learnt_as_it_is(words: Words) -> None:
    assert pieces(words, {"id": 1, "text": " a\n"}) == [(" a\n", True)]
    assert pieces(words, {"body": "b", "text": "a"}, text_column="body") == [("b", True)]


def test_a_prompt_is_answered_by_its_completion(words: Words) -> None:
    row = {"prompt": "1+1=", "completion": "2", "text": "unused"}
    assert pieces(words, row) == [("1+1=", False), ("2", True)]


@pytest.mark.parametrize("nothing", [{}, {"input": ""}, {"input": None}])
def test_an_instruction_is_put_as_alpacas(words: Words, nothing: dict[str, Any]) -> None:
    row = {"instruction": "Say yes.", "output": "Yes."}
    prompt = f"{ALPACA_HEAD}\n\n### Instruction:\nSay yes.\n\n### Response:\n"
    assert pieces(words, row | nothing) == [(prompt, False), ("Yes.", True)]
    (with_input, _), _ = pieces(words, row | {"input": "Now."})
    assert with_input == (
        f"{ALPACA_HEAD_WITH_INPUT}\n\n### Instruction:\nSay yes.\n\n### Input:\nNow.\n\n"
        "### Response:\n"
    )


def test_messages_are_put_into_the_models_template(words: Words) -> None:
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    assert pieces(words, {"messages": messages, "prompt": "unused"}) == [
        ("<user> w1 </s> <assistant> w2 </s> ", True)
    ]


def test_what_a_table_filled_up_is_no_part_of_a_message(words: Words) -> None:
    """Parquet fills missing fields of messages with null."""
    template = "{% for m in messages %}{{ 'tools' in m }}{% endfor %}"
    row = {"messages": [{"role": "user", "content": "w1", "tools": None}]}
    form = form_of(row, ReadOptions(), words(chat=template), "data")
    assert form.render(Row(row, "here", None))[0].text == "False"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "a"}, "got 'body'; name a column with --text-column"),
        ({"prompt": "a", "answer": "b"}, "got 'prompt', 'answer'"),
        (
            {"text": "a", "label": 1},
            "'label' needs --task classification.*text-column text",
        ),
        ({"text": "a", "labels": [1]}, "'labels' needs --task classification"),
        ({"text": 5}, "line 1: expected 'text' to be text, got a number"),
        ({"text": None}, "line 1: expected 'text' to be text, got nothing"),
        ({"prompt": [{}], "completion": "b"}, "expected 'prompt' to be text, got a list"),
        ({"instruction": "a", "input": 1, "output": "b"}, "'input' to be text, got a number"),
        ({"messages": "hello"}, "line 1: expected 'messages' to be a list of at least one, got te"),
        ({"messages": []}, "expected 'messages' to be a list of at least one, got an empty one"),
        ({"messages": ["hello"]}, "messages with 'role' and 'content', got text"),
        ({"messages": [{"content": "hi"}]}, "'role' of one is nothing"),
        ({"messages": [{"from": "human", "text": "hi"}]}, "'content' of one is nothing"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "parts of 'content' .* got text"),
        ({"messages": [{"role": "system", "content": "hi"}]}, "template refuses .*roles are user"),
    ],
    ids=json.dumps,
)
def test_columns_that_cannot_be_trained_on_are_refused(
    opened: Opened, jsonl: Jsonl, words: Words, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadDataset, match=message) as raised:
        opened(jsonl(row), tokenizer=words(chat=CHAT))
    assert "\n" not in raised.value.message


def test_messages_need_a_chat_template(opened: Opened, jsonl: Jsonl) -> None:
    row = {"messages": [{"role": "user", "content": "w1"}]}
    with pytest.raises(BadDataset, match=r"tokenizer has none.*chat_template\.jinja"):
        opened(jsonl(row))


def test_a_column_that_is_not_there_is_refused(opened: Opened, jsonl: Jsonl) -> None:
    with pytest.raises(BadDataset, match="no column 'body'; it has 'text', 'id'"):
        opened(jsonl({"text": "a", "id": 1}), text_column="body")


def test_a_later_row_of_another_kind_is_told_by_its_line(opened: Opened, jsonl: Jsonl) -> None:
    for row in ({"text": 5}, {"txt": "w2"}):
        data = opened(jsonl({"text": "w1"}, row))
        with pytest.raises(BadDataset, match=r"data\.jsonl', line 2: expected 'text' to be text"):
            ids(data)


# ---- documents to samples


def test_each_document_is_a_sample_that_ends_by_the_end(opened: Opened, jsonl: Jsonl) -> None:
    path = jsonl({"text": "w1 w2"}, {"text": "w3"}, {"text": "w4 w5"})
    assert rows(opened(path), 3) == [[1, 2, END], [3, END], [4, 5, END]]


def test_wrapped_documents_follow_each_other(opened: Opened, jsonl: Jsonl) -> None:
    path = jsonl({"text": "w1 w2"}, {"text": "w3"}, {"text": "w4 w5"})
    assert rows(opened(path, **WRAPPED), 3) == [[1, 2, END], [3, END, 4], [5, END]]


def test_an_end_is_not_doubled(opened: Opened, jsonl: Jsonl, words: Words) -> None:
    assert ids(opened(jsonl({"text": "w1 </s>"}, {"text": "w2"}))) == [1, END, 2, END]
    row = {"messages": [{"role": "user", "content": "w1"}]}
    assert ids(opened(jsonl(row, row), tokenizer=words(chat=CHAT)), 3) == [10, 1, END] * 2


def test_a_separator_of_ones_own_stands_behind_documents(opened: Opened, jsonl: Jsonl) -> None:
    path = jsonl({"text": "w1"}, {"text": "w2"})
    assert ids(opened(path, separator=" w9")) == [1, 9, 2, 9]
    assert ids(opened(path, separator="", **WRAPPED)) == [1, 2]


def test_a_tokenizer_without_an_end_needs_a_separator(
    opened: Opened, jsonl: Jsonl, words: Words
) -> None:
    path = jsonl({"text": "w1"})
    with pytest.raises(BadOption, match=r"--separator: .* no end-of-text token"):
        opened(path, tokenizer=words(eos=None))
    assert ids(opened(path, tokenizer=words(eos=None, single="$A"), separator=" w3")) == [1, 3]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "w1 w2"}, [BEGIN, 1, 2, END]),
        ({"text": "<s> w1"}, [BEGIN, 1, END]),
        ({"prompt": "w1 ", "completion": "w2"}, [CONTEXT | BEGIN, CONTEXT | 1, 2, END]),
        ({"prompt": "", "completion": "w2"}, [CONTEXT | BEGIN, 2, END]),
        ({"messages": [{"role": "user", "content": "w1"}]}, [10, 1, END]),
    ],
    ids=json.dumps,
)
def test_documents_begin_by_what_the_tokenizer_puts_in_front(
    opened: Opened, jsonl: Jsonl, words: Words, row: dict[str, Any], expected: list[int]
) -> None:
    """Regression: EleutherAI/lm-evaluation-harness#1465, unslothai/notebooks#251 (no BOS).

    A chat template writes its own, as in huggingface/trl#1400.
    """
    assert rows(opened(jsonl(row), tokenizer=words(chat=CHAT)), 6) == [expected]


@pytest.mark.parametrize(
    ("single", "begin"),
    [("$A", []), ("$A </s>", []), ("<s> $A </s>", [BEGIN]), ("<s> </s> $A", [BEGIN, END])],
)
def test_training_and_generation_put_the_same_in_front_and_one_end(
    opened: Opened, jsonl: Jsonl, words: Words, single: str, begin: list[int]
) -> None:
    """Regression: h2oai/h2o-llmstudio#636 (a second end behind the text)."""
    tokenizer = words(single=single)
    data = opened(jsonl({"text": "w1"}), tokenizer=tokenizer)
    assert (
        "".join(f"{token} + " for token in tokenizer.convert_ids_to_tokens(begin)) + "'w1'"
        in (data.describe()[1])
    )
    assert rows(data, 9) == [[*begin, 1, END]]
    assert list(tokenize_prompt("w1", tokenizer, is_chat=False)) == [*begin, 1]


def test_unpacked_documents_begin_samples_of_their_own(opened: Opened, jsonl: Jsonl) -> None:
    path = jsonl({"text": "w1 w2 w3"}, {"text": "w4"}, {"text": "w5 w6"})
    samples = opened(path, truncation=Truncation.SPLIT).samples(3, VOCAB)
    # An end alone has nothing in front of it.
    assert samples.tokens.tolist() == [[1, 2, 3], [4, END, NO_TOKEN], [5, 6, END]]
    assert (
        "3 documents, 3 samples of up to 3 tokens; 1 document split, with 1 of 4" in samples.words
    )
    assert samples.words.endswith("; 1 sample without learned tokens left out")


LONG = (
    {"prompt": "w1 ", "completion": "w2 w3 w4"},
    {"prompt": "w5 ", "completion": "w6"},
    {"prompt": "w1 w1 w1 w1 ", "completion": "w2"},
)


@pytest.mark.parametrize(
    ("truncation", "expected", "line"),
    [
        (
            None,
            [[CONTEXT | 1, 2, 3], [CONTEXT | 5, 6, END]],
            "2 documents of more than 3 tokens truncated, losing 5 of 11 tokens "
            "(--truncation, --seq-length); 1 sample without learned tokens left out",
        ),
        (
            Truncation.DROP,
            [[CONTEXT | 5, 6, END]],
            "2 documents of more than 3 tokens dropped, 11 tokens in all "
            "(--truncation, --seq-length)",
        ),
        (
            Truncation.SPLIT,
            [[CONTEXT | 1, 2, 3], [4, END], [CONTEXT | 5, 6, END], [CONTEXT | 1, 2, END]],
            "2 documents split, with 5 of 11 tokens in samples "
            "without the document's beginning (--truncation, --seq-length); "
            "1 sample without learned tokens left out",
        ),
    ],
)
def test_long_documents_are_cut_dropped_or_split_and_counted(
    opened: Opened,
    jsonl: Jsonl,
    truncation: Truncation | None,
    expected: list[list[int]],
    line: str,
) -> None:
    """hiyouga/LLaMA-Factory#3995, modelscope/ms-swift#6672: answers went on without a question."""
    samples = opened(jsonl(*LONG), truncation=truncation).samples(3, VOCAB)
    assert [[w for w in row if w != NO_TOKEN] for row in samples.tokens.tolist()] == expected
    assert samples.words.endswith(f"; {line}")
    assert samples.long_documents.num_documents == 2


@pytest.mark.parametrize("truncation", [None, *Truncation])
def test_wrapped_documents_are_shortened_only_if_that_is_asked_for(
    opened: Opened, jsonl: Jsonl, truncation: Truncation | None
) -> None:
    path = jsonl({"text": "w1 w2 w3"}, {"text": "w4"})
    expected = {
        Truncation.CUT: [[1, 2, 3], [4, END]],
        Truncation.DROP: [[4, END]],
    }.get(truncation or Truncation.SPLIT, [[1, 2, 3], [END, 4, END]])
    assert rows(opened(path, truncation=truncation, **WRAPPED), 3) == expected


def test_wrapped_documents_that_go_on_in_another_sample_are_counted(
    opened: Opened, jsonl: Jsonl
) -> None:
    path = jsonl({"text": "w1"}, {"text": "w2 w3"}, {"text": "w4 w5 w6"}, {"text": "w7"})
    samples = opened(path, **WRAPPED).samples(4, VOCAB)
    line = "2 documents split, with 2 of 7 tokens in samples without the document's beginning"
    assert line in samples.words
    assert [[w for w in row if w != NO_TOKEN] for row in samples.tokens.tolist()] == [
        [1, END, 2, 3],
        [END, 4, 5, 6],
        [END, 7, END],
    ]


def test_data_of_which_all_documents_are_dropped_is_refused(opened: Opened, jsonl: Jsonl) -> None:
    data = opened(jsonl({"text": "w1 w2 w3"}), truncation=Truncation.DROP)
    with pytest.raises(BadDataset, match=r"--truncation drop leaves out all 1.*--truncation cut"):
        data.samples(3, VOCAB)


def test_prompts_are_read_and_completions_learned(opened: Opened, jsonl: Jsonl) -> None:
    path = jsonl(
        {"prompt": "w1 w2 ", "completion": "w3"}, {"prompt": "w4", "completion": "w5 w6 w7"}
    )
    samples = opened(path).samples(4, VOCAB)
    # w4 and w5 are one word, and the completion begins where the prompt's own tokens end.
    assert samples.tokens.tolist() == [
        [*(CONTEXT | token for token in (1, 2)), 3, END],
        [10, 6, 7, END],
    ]
    assert samples.words.endswith("; 83% of all tokens are learned, the others only read")
    whole = opened(path, completion_only_loss=False).samples(4, VOCAB)
    assert whole.tokens.tolist() == [[1, 2, 3, END], [10, 6, 7, END]]
    assert whole.words.endswith("2 samples of up to 4 tokens")


def test_samples_without_anything_to_learn_are_left_out_and_counted(
    opened: Opened, jsonl: Jsonl
) -> None:
    path = jsonl({"prompt": "w1 w2 w3 w4 ", "completion": "w5"}, {"prompt": "", "completion": "w5"})
    samples = opened(path).samples(2, VOCAB)
    assert samples.tokens.tolist() == [[5, END]]
    assert "; 1 sample without learned tokens left out" in samples.words
    with pytest.raises(BadDataset, match=r"none of 1 samples of 2 tokens .*--no-completion-only"):
        opened(jsonl({"prompt": "w1 w2 w3 w4 w5 w6", "completion": ""}), separator="").samples(
            2, VOCAB
        )


def test_documents_without_text_are_left_out_and_counted(opened: Opened, jsonl: Jsonl) -> None:
    blank = {"text": " \n"}
    samples = opened(jsonl(blank, {"text": "w1"}, blank, {"text": "w2"})).samples(2, VOCAB)
    assert samples.tokens.ravel().tolist() == [1, END, 2, END]
    line = "2 documents, 2 samples of up to 2 tokens; 2 documents without text left out"
    assert line in samples.words


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows_is_refused(opened: Opened, jsonl: Jsonl, content: str) -> None:
    with pytest.raises(BadDataset, match="expected rows, found none"):
        opened(jsonl(content))
    with pytest.raises(BadDataset, match="expected text, found none"):
        opened(jsonl({"text": ""}, {"text": " "}))


def test_no_more_is_read_than_the_samples_need(
    opened: Opened, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.client.data.dataset.BATCH_DOCUMENTS", 2)
    path = jsonl({"text": "w1"}, {"text": "w2"}, {"text": "w3"}, "this is no JSON")
    assert opened(path).samples(2, VOCAB, limit=2).tokens.tolist() == [[1, END], [2, END]]
    with pytest.raises(BadDataset, match="line 4"):
        opened(path).samples(2, VOCAB, limit=9)


def test_how_far_it_got_is_told_batch_by_batch(
    opened: Opened, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.client.data.dataset.BATCH_DOCUMENTS", 2)
    reports: list[ReadProgress] = []
    path = jsonl(*({"text": "w1"} for _ in range(5)))
    opened(path).samples(2, VOCAB, on_batch=reports.append)
    assert [(one.num_documents, one.num_samples, one.share_read) for one in reports] == [
        (2, 2, 0.4),
        (4, 4, 0.8),
        (5, 5, 1.0),
    ]


def test_batches_end_with_many_characters_too(
    opened: Opened, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.client.data.dataset.BATCH_CHARS", 5)
    reports: list[ReadProgress] = []
    opened(jsonl({"text": "w1"}, {"text": "w2 w3"}, {"text": "w4"})).samples(
        2, VOCAB, on_batch=reports.append
    )
    assert [one.num_documents for one in reports] == [2, 3]


def test_whoever_is_told_may_end_it(opened: Opened, jsonl: Jsonl) -> None:
    def stop(_so_far: ReadProgress) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        opened(jsonl({"text": "w1"})).samples(2, VOCAB, on_batch=stop)


# ---- printed lines, and options without effect


def test_it_says_what_columns_mean_and_shows_the_first_document(
    opened: Opened, jsonl: Jsonl
) -> None:
    path = jsonl({"prompt": "Why?\n", "completion": "b" * 200, "id": 7})
    assert opened(path).describe() == [
        f"{path}: JSON lines; a document is 'prompt' and 'completion', one right behind the other; "
        "not used: 'id'",
        f"  the first document, of which [this] is only read and the rest learned: ['Why?\\n'] + "
        f"'{'b' * 160}'... + </s>",
    ]


def test_of_a_directory_it_says_split_and_number_of_files(opened: Opened, tmp_path: Path) -> None:
    for name in ("train-1.csv", "train-2.csv", "test.csv"):
        (tmp_path / name).write_text("text\nw1\n")
    assert "comma-separated values, split 'train', 2 files;" in opened(tmp_path).describe()[0]


@pytest.mark.parametrize(
    ("name", "options", "flag"),
    [
        ("a.txt", {"text_column": "text"}, "--text-column"),
        ("a.txt", {"separator": "x"}, "--separator"),
        ("a.txt", {"column_names": "a,b"}, "--column-names"),
        ("a.txt", {"truncation": Truncation.CUT}, "--truncation"),
        ("a.jsonl", {"quotes": False}, "--no-quotes"),
        ("a.jsonl", {"subset": "en"}, "--subset"),
        ("a.txt", {"completion_only_loss": False}, "--no-completion-only-loss"),
        ("a.jsonl", {"completion_only_loss": False}, "--no-completion-only-loss"),
        ("a.jsonl", {"assistant_only_loss": True}, "--assistant-only-loss"),
    ],
)
def test_an_option_that_means_nothing_for_the_data_is_refused(
    opened: Opened, tmp_path: Path, words: Words, name: str, options: dict[str, Any], flag: str
) -> None:
    (tmp_path / name).write_text('{"text": "w1"}' if "json" in name else "w1")
    with pytest.raises(BadOption, match=f"{flag}: has no effect (on|where)"):
        opened(tmp_path / name, **options)
    reading, path = ReadOptions(**options), str(tmp_path / name)
    assert open_dataset(path, DataSelection(), reading, words(), all_options=False).source == path


# ---- what the library `datasets` reads


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same rows as Parquet, Arrow, a saved dataset and one with splits."""
    import datasets

    place = tmp_path_factory.mktemp("stored")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": ["w1 w2", "w3"], "id": [1, 2]})
    held_out = datasets.Dataset.from_dict({"text": ["w9"], "id": [3]})
    data.to_parquet(place / "a.parquet")
    data.save_to_disk(place / "saved")
    (place / "a.arrow").write_bytes(next((place / "saved").glob("*.arrow")).read_bytes())
    datasets.DatasetDict(train=data, test=held_out).save_to_disk(place / "splits")
    (place / "shards" / "data").mkdir(parents=True)
    data.to_parquet(place / "shards" / "data" / "train-00000-of-00001.parquet")
    held_out.to_parquet(place / "shards" / "data" / "test-00000-of-00001.parquet")
    return place


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "saved", "splits", "shards"])
def test_stored_rows_are_read_like_others(opened: Opened, stored: Path, name: str) -> None:
    assert ids(opened(stored / name), 5) == [1, 2, END, 3, END]


@pytest.mark.parametrize("name", ["splits", "shards"])
def test_stored_splits_are_chosen_by_name(opened: Opened, stored: Path, name: str) -> None:
    data = opened(stored / name, split="test")
    assert "split 'test'" in data.describe()[0]
    assert ids(data) == [9, END]
    with pytest.raises(BadDataset, match="no split 'dev'; it has test, train"):
        opened(stored / name, split="dev")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("what", ["torn", "something else", "empty"])
def test_a_torn_file_is_refused(
    opened: Opened, stored: Path, tmp_path: Path, name: str, what: str
) -> None:
    whole = (stored / name).read_bytes()
    content = {"torn": whole[: len(whole) // 2], "something else": b"text " * 99, "empty": b""}
    (tmp_path / name).write_bytes(content[what])
    with pytest.raises(BadDataset, match=f"{name}.*(cannot be read|empty)") as raised:
        ids(opened(tmp_path / name))
    assert "\n" not in raised.value.message


def test_a_saved_dataset_that_lacks_a_file_is_refused(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(BadDataset, match="cannot be read"):
        opened(tmp_path)


def test_a_column_of_dates_is_no_text(opened: Opened, tmp_path: Path) -> None:
    import datetime

    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": [datetime.datetime(2020, 1, 1)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadDataset, match="row 1: expected 'text' to be text, got a datetime"):
        opened(tmp_path / "a.parquet")


def test_what_no_path_has_may_be_on_the_hub(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadDataset, match=r"'nobody/nothing': no such file.*hub: .*") as raised:
        opened("nobody/nothing")
    assert "\n" not in raised.value.message
    with pytest.raises(BadDataset, match="no such file or directory; expected"):
        opened("nobody/nothing/deeper")


def test_rows_of_the_hub_are_read_as_they_come(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library answers from memory; its requests are those that the hub would get."""
    import datasets

    calls: list[tuple[object, ...]] = []

    def load(path: str, subset: str | None, *, streaming: bool) -> datasets.IterableDatasetDict:
        calls.append((path, subset, streaming))
        rows = datasets.Dataset.from_dict({"text": ["w1", "w2"]}).to_iterable_dataset()
        return datasets.IterableDatasetDict({"train": rows, "test": rows})

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = opened("some/where", subset="en", split="test")
    assert ids(data) == [1, END, 2, END]
    assert "a dataset on the hub, split 'test'" in data.describe()[0]
    assert calls == [("some/where", "en", True)]


def test_every_refusal_of_an_unknown_format_is_a_bad_input(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(BadInput):
        opened(tmp_path / "a.pdf")
    assert opened(tmp_path / "a.pdf", data_format=DataFormat.TEXT).describe()
