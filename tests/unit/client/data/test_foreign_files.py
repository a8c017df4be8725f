"""Files from other tools are read correctly, or refused in one line with a remedy.

Sources of the kinds: facebookresearch/pytext#376, databendlabs/databend#6650 and
nerdai/llms-from-scratch-rs#142 (quotes in TSV); allenai/c4 and RedPajama (`.json.gz`,
`.jsonl.zst`); huggingface/transformers#8886, openai/tiktoken#82 and agent0ai/agent-zero#1773 (lone
surrogates); lm-sys/FastChat, axolotl's `conversation.missingturns.json` and SQuAD (JSON over
several lines).
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.files import DataSelection, find_files
from swarm_ft.client.data.rows import file_rows, read_text
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.options import DataFormat, ReadOptions
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.tasks import Classification
from tests.unit.client.data.conftest import CHAT, Words

Opened = Callable[..., Dataset]


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
WRAPPED = {"version": "1", "data": [{"prompt": "a", "completion": "b"}]}


def rows_at(path: Path, *, split: str | None = None, **options: Any) -> list[dict[str, object]]:
    reading = ReadOptions(**options)
    files = find_files(str(path), DataSelection(split=split, format=reading.data_format))
    return [dict(row.values) for row in file_rows(files, reading)]


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(BadDataset) as raised:
        rows_at(path, **options)
    assert "\n" not in raised.value.message
    assert str(path) in raised.value.message
    return raised.value.message


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---- compressed


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
        ("a.json", '[{"text": "a"}]', [{"text": "a"}]),
        ("a.json", json.dumps(WRAPPED, indent=1), WRAPPED["data"]),
        ("a.csv", 'n,text\n1,"a\nb"\n', [{"n": "1", "text": "a\nb"}]),
        ("a.tsv", "n\ttext\r\n1\ta\r\n", [{"n": "1", "text": "a"}]),
    ],
)
def test_compressed_files_are_read_as_the_files_themselves(
    tmp_path: Path, suffix: str, name: str, content: str, expected: object
) -> None:
    path = write(tmp_path / f"{name}{suffix}", COMPRESS[suffix](content.encode()))
    assert rows_at(path) == expected
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / path.name)
    assert rows_at(tmp_path / "folder") == expected


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_a_document(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.txt{suffix}", COMPRESS[suffix](b"Once\nupon"))
    assert read_text(str(path), find_files(str(path), DataSelection())) == "Once\nupon"
    table = write(tmp_path / f"b.txt{suffix}", COMPRESS[suffix](b'{"text": "a"}\n'))
    with pytest.raises(BadDataset, match="--data-format jsonl reads it"):
        find_files(str(table), DataSelection())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("decompressed-in-transit.jsonl.gz", b'{"text": "a"}\n'),
        ("compressed.jsonl", gzip.compress(b'{"text": "a"}\n')),
        ("other.jsonl.gz", zstd(b'{"text": "a"}\n')),
        ("members.jsonl.gz", gzip.compress(b'{"te') + gzip.compress(b'xt": "a"}\n')),
        ("frames.jsonl.zst", zstd(b'{"te') + zstd(b'xt": "a"}\n')),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip's bytes have the time
)
def test_the_bytes_say_whether_a_file_is_compressed(
    tmp_path: Path, name: str, content: bytes
) -> None:
    assert rows_at(write(tmp_path / name, content)) == [{"text": "a"}]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_compressed_file_that_is_cut_off_is_refused(
    tmp_path: Path, suffix: str, share: float
) -> None:
    content = "".join(f'{{"text": "{i * i}"}}\n' for i in range(20_000)).encode()
    whole = COMPRESS[suffix](content)
    cut = max(14, int(len(whole) * share))
    path = write(tmp_path / f"a.jsonl{suffix}", whole[:cut])
    assert "data cannot be decompressed" in refusal(path)


def test_how_far_a_compressed_file_was_read_grows_to_all_of_it(tmp_path: Path) -> None:
    content = "".join(f'{{"text": "{i * i}"}}\n' for i in range(40_000)).encode()
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(content))
    shares = [
        row.done or 0.0 for row in file_rows(find_files(str(path), DataSelection()), ReadOptions())
    ]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < 0.9
    assert shares[-1] == 1.0


def test_a_file_beside_its_compressed_copy_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"text": "a"}\n')
    write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n'))
    assert "has both 'a.jsonl' and 'a.jsonl.gz'; remove one" in refusal(tmp_path)


def test_splits_are_told_by_names_of_compressed_files(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        content = gzip.compress(f'{{"text": "{name}"}}'.encode())
        write(tmp_path / f"c4-{name}.00000-of-00002.json.gz", content)
    assert rows_at(tmp_path) == [{"text": "train"}]
    assert rows_at(tmp_path, split="validation") == [{"text": "validation"}]


def test_parquet_in_a_gzip_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet.gz", gzip.compress(b"PAR1"))
    assert "decompress the file" in refusal(path)


# ---- other encodings and kinds


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"text": "a"}\n'.encode("utf-16"), "line 1: expected UTF-8, got UTF-16.*iconv"),
        ('{"text": "a"}\n'.encode("utf-16-le"), "line 1: expected UTF-8, got UTF-16 or binary"),
        ('{"text": "a"}\n'.encode("utf-16-be"), "line 1: expected UTF-8, got UTF-16 or binary"),
        (b"PK\x03\x04\x14\0", "a zip archive or a workbook; unpack it"),
        (b"PAR1\x15\x04", "got Parquet; --data-format parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid x\n", "Git LFS pointer; 'git lfs pull'"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_what_is_no_utf8_text_is_named(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = write(tmp_path / name, content)

    def read() -> object:
        files = find_files(str(path), DataSelection())
        is_text = files.format is DataFormat.TEXT
        return read_text(str(path), files) if is_text else list(file_rows(files, ReadOptions()))

    with pytest.raises(BadDataset, match=why) as raised:
        read()
    assert "\n" not in raised.value.message


def test_a_single_nul_in_a_text_is_a_letter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text\na\0b\n")
    assert rows_at(path) == [{"text": "a\0b"}]


# ---- ends of lines, delimiters, quotes


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("mac.csv", b"prompt,completion\ra,b\rc,d\r", ["a", "c"]),
        ("mac.csv", b"prompt,completion\ra,b\rc,d", ["a", "c"]),
        ("mac.tsv", b"prompt\tcompletion\ra\tb\rc\td\r", ["a", "c"]),
        ("mac.jsonl", b'{"prompt": "a"}\r{"prompt": "c"}\r', ["a", "c"]),
        ("mac.csv", b'prompt,completion\r"a\ra",b\r', ["a\na"]),
        ("dos.csv", b"prompt,completion\r\na,b\r\n", ["a"]),
    ],
)
def test_lines_may_end_by_a_carriage_return(
    tmp_path: Path, name: str, content: bytes, expected: list[str]
) -> None:
    rows = rows_at(write(tmp_path / name, content))
    assert [row["prompt"] for row in rows] == expected


def test_lines_that_end_by_a_carriage_return_are_told_apart_over_chunks(tmp_path: Path) -> None:
    rows = [f"{i},{'x' * (i % 700)}" for i in range(1, 2000)]
    path = write(tmp_path / "a.csv", "\r".join(["n,text", *rows]))
    assert rows_at(path) == [{"n": str(i), "text": "x" * (i % 700)} for i in range(1, 2000)]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.csv", "prompt;completion\na;b\n", "line 1: .*'prompt;completion'; --delimiter ';'"),
        ("a.csv", "prompt\tcompletion\na\tb\n", "line 1: .*; --data-format tsv splits it"),
        ("a.tsv", "prompt,completion\na,b\n", "line 1: .*; --delimiter ',' splits it"),
        ("a.csv", "prompt|completion\na|b\n", r"line 1: .*; --delimiter '\|' splits it"),
        ("a.csv", "a,b\nx\ry,z\n", "line 2: a field without quotes contains a carriage return"),
        ("a.csv", 'a,b\n1,"x\n2,y\n3,z\n', "lines 2 to 4: a quote .* never closed; --no-quotes"),
    ],
)
def test_tables_that_do_not_part_are_refused_with_the_option(
    tmp_path: Path, name: str, content: str, why: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(BadDataset, match=why):
        rows_at(path)


@pytest.mark.parametrize("delimiter", [";", "|", "\t", "\\t"])
def test_a_delimiter_parts_columns(tmp_path: Path, delimiter: str) -> None:
    letter = delimiter.replace("\\t", "\t")
    path = write(tmp_path / "a.csv", f'a{letter}b\n1,5{letter}"x{letter}y"\n')
    assert rows_at(path, delimiter=delimiter) == [{"a": "1,5", "b": f"x{letter}y"}]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_of_excel_names_the_delimiter(tmp_path: Path, end: str) -> None:
    path = write(tmp_path / "a.csv", end.join(["sep=;", "a;b", "1,5;x", ""]))
    assert rows_at(path) == [{"a": "1,5", "b": "x"}]
    path = write(tmp_path / "b.csv", end.join(["sep=;", "1;2;3", "4;5", ""]))
    assert "line 3: expected 3 columns, got 2" in refusal(path, column_names="a,b,c")


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n"])
def test_a_delimiter_is_one_letter(delimiter: str) -> None:
    with pytest.raises(BadOption, match="--delimiter: expected one letter"):
        ReadOptions(delimiter=delimiter)


GLUE = 'label\ttext\n1\tplain\n0\t"Hello there\n1\tgreat film\n0\tbad film"\n1\tlast\n'


def test_quotes_that_enclose_rows_of_a_tsv_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.tsv", GLUE)
    assert "lines 3 to 5: quotes enclose these lines and their tabs" in refusal(path)
    assert "--no-quotes" in refusal(path)
    rows = rows_at(path, quotes=False)
    assert [row["label"] for row in rows] == ["1", "0", "1", "0", "1"]
    as_csv = write(tmp_path / "a.csv", GLUE)
    assert "lines 3 to 5" in refusal(as_csv, delimiter="\\t")


def test_a_quoted_line_break_in_a_tsv_is_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'label\ttext\n1\t"a\nb"\n0\t"c\td"\n')
    assert [row["text"] for row in rows_at(path)] == ["a\nb", "c\td"]


# ---- JSON over several lines


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("top", "options", "expected"),
    [
        (WRAPPED, {}, WRAPPED["data"]),
        ({"rows": [{"text": "a"}], "total": 1}, {}, [{"text": "a"}]),
        ({"features": [{"text": "a"}]}, {"field": "features"}, [{"text": "a"}]),
        ({"train": [{"text": "a"}], "test": [{"text": "b"}]}, {}, [{"text": "a"}]),
        ({"train": [{"text": "a"}], "test": [{"text": "b"}]}, {"split": "test"}, [{"text": "b"}]),
        ({"train": [{"text": "a"}], "dev": [{"text": "b"}]}, {"field": "dev"}, [{"text": "b"}]),
        ({"data": [{"text": "a"}], "more": [{"a": 1}]}, {"field": "data"}, [{"text": "a"}]),
    ],
)
def test_rows_may_be_a_list_in_one_object(
    tmp_path: Path, top: object, options: dict[str, Any], expected: object, indent: int | None
) -> None:
    path = write(tmp_path / "a.json", json.dumps(top, indent=indent))
    assert rows_at(path, **options) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "id": 1},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant"}]},
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_objects_over_several_lines_are_rows(tmp_path: Path, row: object, count: int) -> None:
    path = write(tmp_path / "a.json", "\n".join([json.dumps(row, indent=2)] * count))
    assert rows_at(path) == [row] * count


@pytest.mark.parametrize(
    ("content", "options", "why"),
    [
        (
            {"type": "FeatureCollection", "features": [{"geometry": {}}]},
            {},
            "rows may be in 'features': --field features reads them",
        ),
        ({"data": [{"a": 1}], "more": [{"a": 1}]}, {}, "may be in 'data' or 'more': --field data"),
        ({"data": {"a": 1}}, {"field": "data"}, "--field data: expected one JSON object with a l"),
        (WRAPPED, {"split": "test"}, "has no split 'test'; one file is the split 'train'"),
        ({"train": [{}], "test": [{}]}, {"split": "dev"}, "no split 'dev'; it has test, train"),
        ({"dev": [{}], "test": [{}]}, {}, "expected --split to be one of test, validation"),
    ],
)
def test_objects_without_a_clear_list_of_rows_are_refused(
    tmp_path: Path, content: object, options: dict[str, Any], why: str
) -> None:
    path = write(tmp_path / "a.json", json.dumps(content, indent=1))
    assert why in refusal(path, **options)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", json.dumps(WRAPPED, indent=1), "line 1: .*; --data-format json reads objects"),
        ("a.jsonl", '[{"a": 1}]', "line 1: .* got a list; --data-format json reads an array"),
        ("a.json", '{"a": 1}\n{"a": 2}\n{"a":\n', "line 3: expected a JSON object in one line"),
        ("a.json", '{\n"a": 1\n}\n{\n"a": }\n', "line 5: expected JSON"),
        ("a.json", b'{\n"a":\n"\xff"}', "line 3: expected UTF-8 text, got another enc.* at byte 8"),
        ("a.json", '{"a": 1}\n[2]\n', "line 2: expected a JSON object, got a list"),
        ("a.json", '{\n"a": 1}\n[2]\n', "row 2: expected a JSON object, got a list"),
        ("a.jsonl", '{"a": 1, "a": 2}', "line 1: .*key 'a' stands twice in one object"),
        ("a.json", '[{"a": 1, "a": 2}]', "key 'a' stands twice in one object"),
        ("a.jsonl", '{"a": {"b": 1, "b": 1}}', "line 1: .*key 'b' stands twice"),
    ],
)
def test_json_that_is_wrong_is_refused_by_its_line(
    tmp_path: Path, name: str, content: bytes | str, why: str
) -> None:
    with pytest.raises(BadDataset, match=why):
        rows_at(write(tmp_path / name, content))


def test_the_list_that_is_read_is_told(tmp_path: Path, opened: Opened) -> None:
    path = write(tmp_path / "a.json", json.dumps(WRAPPED, indent=1))
    assert "JSON; rows of 'data'; a document is 'prompt'" in opened(path).describe()[0]
    splits = {"train": [{"text": "w1"}], "test": [{"text": "w2"}]}
    path = write(tmp_path / "b.json", json.dumps(splits))
    assert "JSON; rows of split 'train'; a document" in opened(path).describe()[0]


# ---- half a character


LONE = "w1 \ud83d"


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"text": LONE}, {}),
        ({"prompt": LONE, "completion": "w2"}, {}),
        ({"prompt": "w2", "completion": LONE}, {}),
        ({"messages": [{"role": "user", "content": LONE}]}, {}),
        ({"messages": [{"role": "assistant", "content": LONE}]}, {"assistant_only_loss": True}),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_a_character_is_refused_by_its_line(
    tmp_path: Path,
    opened: Opened,
    words: Words,
    row: dict[str, Any],
    options: dict[str, Any],
    name: str,
) -> None:
    whole = json.loads(json.dumps(row).replace("\\ud83d", "w3"))
    content = "".join(f"{json.dumps(one)}\n" for one in (whole, row))
    data = opened(write(tmp_path / name, content), tokenizer=words(chat=CHAT), **options)
    with pytest.raises(BadDataset, match=r"line 2: .*half a character \('\\ud83d'"):
        data.samples(2, 64)
    with pytest.raises(BadDataset, match=r"line 1: .*half a character"):
        opened(
            write(tmp_path / name, f"{json.dumps(row)}\n{json.dumps(whole)}\n"),
            tokenizer=words(chat=CHAT),
            **options,
        )


@pytest.mark.parametrize("row", [{"text": "w1", "label": LONE}, {"text": LONE, "label": "a"}])
def test_half_a_character_in_rows_with_classes_is_refused_by_its_line(
    tmp_path: Path, words: Words, row: dict[str, str]
) -> None:
    rows = [{"text": "w1", "label": "a"}, {"text": "w2", "label": "b"}, row]
    path = write(tmp_path / "a.jsonl", "".join(f"{json.dumps(one)}\n" for one in rows))
    task = Classification(TaskKind.CLASSIFICATION, ("a", "b"))
    data = open_dataset(str(path), DataSelection(), ReadOptions(), words(), task=task)
    with pytest.raises(BadDataset, match=r"line 3: .*ud83d"):
        data.samples(8, 64)


def test_half_a_character_in_a_column_that_is_not_used_is_no_matter(
    tmp_path: Path, opened: Opened
) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "w1 w2", "id": LONE}))
    assert len(opened(path).samples(2, 64).tokens) == 1


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "\\ud83d\\ude00"}\n')
    assert rows_at(path) == [{"text": "😀"}]


def test_the_first_lines_place_is_that_of_a_row_over_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'a,b\n1,"x\ny"\n2,z\n')
    files = find_files(str(path), DataSelection(format=DataFormat.CSV))
    places = [row.place.rpartition(", ")[2] for row in file_rows(files, ReadOptions())]
    assert places == ["lines 2 to 3", "line 4"]
