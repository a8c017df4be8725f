"""Samples of token ids on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.client.data.layouts import Stream, Wrapped
from swarm_ft.client.data.samples import SampleBytes, SampleFile, tokens_to_bytes
from swarm_ft.client.options import Truncation
from swarm_ft.errors import BadDataset
from swarm_ft.protocol.spec.sample_rows import token_ids_of, words_of


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_travel_in_four_bytes_the_lowest_first(ids: list[int]) -> None:
    data = tokens_to_bytes(np.array(ids, dtype=np.uint32))
    assert data == b"".join(i.to_bytes(4, "little") for i in ids)


Batches = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=9)))


@given(Batches, st.integers(2, 7), st.integers(1, 9) | st.none())
def test_a_stream_becomes_the_same_samples_however_it_comes_in(
    batches: list[list[list[int]]], length: int, limit: int | None
) -> None:
    flat = [token for batch in batches for ids in batch for token in ids]
    whole = len(flat) // length
    with SampleFile(
        "data",
        seq_length=length,
        vocab_size=100,
        layout=Stream(length),
        truncation=Truncation.SPLIT,
    ) as file:
        for batch in batches:
            file.add(map(words_of, batch))
        file.end()
        if not whole:
            with pytest.raises(BadDataset, match=f"one sample of {length} tokens, got {len(flat)}"):
                file.samples(limit)
            return
        tokens = file.samples(limit)
    expected = np.array(flat[: whole * length]).reshape(whole, length)[:limit]
    assert tokens.dtype == np.uint32
    assert np.array_equal(tokens, expected)
    assert list(SampleBytes(tokens)) == [tokens_to_bytes(row) for row in tokens]
    assert SampleBytes(tokens)[::-1] == [tokens_to_bytes(row) for row in tokens[::-1]]
    assert len(SampleBytes(tokens)) == len(tokens)


@given(Batches, st.integers(2, 7))
def test_wrapped_documents_are_cut_anew_after_so_many(
    batches: list[list[list[int]]], length: int
) -> None:
    documents = [ids for batch in batches for ids in batch]
    groups = [documents[at : at + 3] for at in range(0, len(documents), 3)]
    expected = [
        flat[at : at + length]
        for group in groups
        for flat in [[token for ids in group for token in ids]]
        for at in range(0, len(flat), length)
    ]
    with mock.patch("swarm_ft.client.data.layouts.DOCUMENTS_PACKED_TOGETHER", 3):
        layout = Wrapped(length)
        rows = [layout.add(list(map(words_of, batch))) for batch in batches]
        rows.append(layout.end())
    assert [token_ids_of(row).tolist() for row in np.concatenate(rows)] == expected


def test_a_file_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SampleFile("data", seq_length=2, vocab_size=100) as file:
        file.add([words_of([1, 2]), words_of([3, 4])])
        tokens = file.samples()
        assert not list(tmp_path.iterdir())
    assert tokens.tolist() == [[1, 2], [3, 4]]


def test_an_id_that_the_model_does_not_know_is_refused() -> None:
    with (
        SampleFile("data", seq_length=2, vocab_size=5) as file,
        pytest.raises(BadDataset, match="'data': token id 5 is outside the model's vocabulary"),
    ):
        file.add([words_of([1, 5])])


def test_more_samples_than_a_run_takes_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.client.data.samples.MAX_SAMPLES", 2)
    with SampleFile("data", seq_length=2, vocab_size=5) as file:
        file.add([words_of([1, 1])] * 2)
        with pytest.raises(BadDataset, match=r"more than 2 samples.*--max-samples"):
            file.add([words_of([1, 1])])


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
        file = SampleFile("data", seq_length=2, vocab_size=5)
        with pytest.raises(BadDataset, match=r"cannot be stored in .*No space left.*TMPDIR"):
            file.add([words_of([1] * 5)])
