"""An installation without the extra `client` reads text; errors name what reads all else."""

from __future__ import annotations

import bz2
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset

from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.mixture import Mixing, order_of
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.data.stored import check_data
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset
from tests.unit.client.data.conftest import Words

EXTRA = ("datasets", "pandas", "pyarrow")
HELP = "pip install 'swarm-ft[client]', or with pipx: pipx inject swarm-ft datasets"
ROWS = [{"text": "w1 w2 w3"}, {"text": "w4 w5 w6"}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRA:
        for module in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Written before the libraries go."""
    Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "a.parquet")
    return tmp_path / "data" / "a.parquet"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def refusal(path: object, words: Words) -> str:
    with pytest.raises(BadDataset) as raised:
        open_dataset(str(path), DataSelection(), ReadOptions(), words())
    return raised.value.message


def early_refusal(path: object) -> str:
    with pytest.raises(BadDataset) as raised:
        check_data(str(path))
    return raised.value.message


def test_a_parquet_file_names_what_reads_it(
    parquet: Path, without_extra: None, words: Words
) -> None:
    message = (
        f"dataset '{parquet}': expected the library 'datasets', which reads Parquet, and it is not "
        f"installed; install it with {HELP}"
    )
    assert refusal(parquet, words) == early_refusal(parquet) == message
    assert HELP in refusal(parquet.parent, words)


def test_a_saved_dataset_and_an_id_of_the_hub_do_so_too(
    saved: Path, without_extra: None, words: Words
) -> None:
    assert "which reads saved datasets, and" in refusal(saved, words)
    assert HELP in early_refusal(saved)
    assert "datasets on the hub (no such file is here), and" in refusal("org/name", words)
    assert HELP in early_refusal("org/name")


def test_so_does_a_card_that_may_name_classes(
    tmp_path: Path, without_extra: None, words: Words
) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "README.md").write_text("dataset_info: class_label")
    assert "the names of classes in the card beside this data" in refusal(tmp_path, words)


def test_so_does_zstd(tmp_path: Path, request: pytest.FixtureRequest, words: Words) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(pyarrow.compress(LINES.encode(), codec="zstd", asbytes=True))
    request.getfixturevalue("without_extra")
    assert "expected the library 'pyarrow', which reads zstd" in refusal(path, words)


def test_text_is_read_without_them(tmp_path: Path, without_extra: None, words: Words) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8 w9")
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "a.csv").write_text("text\nw1 w2 w3\n")
    (tmp_path / "b.jsonl.bz2").write_bytes(bz2.compress(LINES.encode()))
    for path in tmp_path.iterdir():
        check_data(str(path))
        data = open_dataset(str(path), DataSelection(), ReadOptions(), words())
        assert len(data.samples(4, 64).tokens) >= 1
    assert len(order_of([3, 2], Mixing(shares=(0.5, 0.5))).rows) >= 3
