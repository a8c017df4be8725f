"""Mixtures of datasets: the order that `datasets` draws, and the share of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.mixture import Mixing, Mixture, open_datasets, order_of
from swarm_ft.client.data.progress import ReadProgress
from swarm_ft.client.data.samples import TokenArray
from swarm_ft.client.options import ReadOptions, StoppingStrategy
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.sample_rows import token_ids_of
from swarm_ft.protocol.spec.tasks import CausalLm
from tests.unit.client.data.conftest import Words

SHARES = (0.2, 0.8)


def table(path: Path, word: str, count: int) -> str:
    rows = [{"text": f"{word} {'w9 ' * (number % 3)}w{number % 5}"} for number in range(count)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def words_of_samples(tokens: TokenArray) -> list[int]:
    """Return the token of each sample that identifies its table."""
    return [int(token_ids_of(row)[1]) for row in tokens]


@pytest.fixture
def mixed(tmp_path: Path, words: Words) -> Callable[..., Any]:
    """Return a function that mixes twelve rows of w1 and five rows of w2."""

    def read(mixing: Mixing, limit: int | None = None, **options: Any) -> Any:
        paths = [table(tmp_path / "a.jsonl", "w1", 12), table(tmp_path / "b.jsonl", "w2", 5)]
        data = open_datasets(
            paths, DataSelection(), ReadOptions(**options), words(), task=CausalLm(), mixing=mixing
        )
        return data.samples(8, 64, limit=limit)

    return read


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from(StoppingStrategy),
)
def test_shares_are_drawn_as_the_library_draws_them(
    sizes: list[int], seed: int, stopping: StoppingStrategy
) -> None:
    shares = tuple(size + 1.0 for size in range(len(sizes)))
    shares = tuple(share / sum(shares) for share in shares)
    tables = [
        Dataset.from_dict({"text": [f"{number}/{row}" for row in range(size)]})
        for number, size in enumerate(sizes)
    ]
    theirs = interleave_datasets(
        tables, probabilities=list(shares), seed=seed, stopping_strategy=stopping.value
    )
    order = order_of(sizes, Mixing(shares=shares, stopping=stopping, seed=seed))
    assert [f"{one}/{row}" for one, row in zip(*order, strict=True)] == theirs["text"][:]


@given(st.lists(st.integers(0, 60), min_size=2, max_size=4), st.integers(0, 2**32 - 1))
def test_without_shares_each_sample_comes_once_and_in_its_own_order(
    sizes: list[int], seed: int
) -> None:
    order = order_of(sizes, Mixing(seed=seed))
    for number, size in enumerate(sizes):
        assert order.rows[order.datasets == number].tolist() == list(range(size))
    assert len(order.rows) == sum(sizes)
    assert np.array_equal(order.datasets, order_of(sizes, Mixing(seed=seed)).datasets)


def test_without_shares_a_small_dataset_is_spread_over_a_large_one() -> None:
    order = order_of([900, 100], Mixing(seed=0))
    tenths = order.datasets.reshape(10, -1).sum(axis=1)
    assert tenths.min() > 0
    assert not np.array_equal(order.datasets, order_of([900, 100], Mixing(seed=1)).datasets)


def test_samples_are_those_of_each_dataset_in_the_drawn_order(
    mixed: Callable[..., Any], tmp_path: Path, words: Words
) -> None:
    mixing = Mixing(seed=3)
    samples = mixed(mixing)
    order = order_of([12, 5], mixing)
    assert words_of_samples(samples.tokens) == [1 + number for number in order.datasets]
    alone = open_datasets(
        [str(tmp_path / "b.jsonl")],
        DataSelection(),
        ReadOptions(),
        words(),
        task=CausalLm(),
        mixing=mixing,
    ).samples(8, 64)
    assert np.array_equal(samples.tokens[order.datasets == 1], alone.tokens)
    first, second, last = samples.words.splitlines()
    assert "a.jsonl: 12 documents, 12 samples" in first
    assert "b.jsonl: 5 documents, 5 samples" in second
    assert "mixed: 17 samples; " in last
    assert "a.jsonl 12 of its 12 (70.6%)" in last
    assert "b.jsonl 5 of its 5 (29.4%)" in last


def test_shares_end_with_the_first_dataset_or_go_on(mixed: Callable[..., Any]) -> None:
    counts = {}
    for stopping in StoppingStrategy:
        mixing = Mixing(shares=SHARES, stopping=stopping, seed=1)
        found = words_of_samples(mixed(mixing).tokens)
        counts[stopping] = [found.count(word) for word in (1, 2)]
    ended, again = counts.values()
    assert (ended[0] == 12) != (ended[1] == 5)
    assert again[0] >= 12
    assert again[1] >= 5
    assert sum(again) > 17


def test_a_limit_is_of_all_samples(mixed: Callable[..., Any]) -> None:
    whole = mixed(Mixing(shares=SHARES, seed=1)).tokens
    assert np.array_equal(mixed(Mixing(shares=SHARES, seed=1), limit=6).tokens, whole[:6])


def test_an_option_has_to_mean_something_for_one_of_them(tmp_path: Path, words: Words) -> None:
    (tmp_path / "a.csv").write_text("text;n\nw1 w2;1\n")
    paths = [str(tmp_path / "a.csv"), table(tmp_path / "b.jsonl", "w2", 5)]

    def opened(**options: Any) -> Any:
        return open_datasets(
            paths,
            DataSelection(),
            ReadOptions(**options),
            words(),
            task=CausalLm(),
            mixing=Mixing(),
        )

    assert isinstance(opened(delimiter=";"), Mixture)
    with pytest.raises(BadOption, match="--field: has no effect on"):
        opened(delimiter=";", field="data")


def test_each_dataset_is_described_and_progress_is_told(tmp_path: Path, words: Words) -> None:
    paths = [table(tmp_path / "a.jsonl", "w1", 3), table(tmp_path / "b.jsonl", "w2", 2)]
    data = open_datasets(
        paths, DataSelection(), ReadOptions(), words(), task=CausalLm(), mixing=Mixing()
    )
    assert [line.partition(":")[0] for line in data.describe()[::2]] == paths
    seen: list[ReadProgress] = []
    data.samples(8, 64, on_batch=seen.append)
    assert [one.source for one in seen] == paths


def test_a_row_that_cannot_be_used_is_named_by_its_own_file(tmp_path: Path, words: Words) -> None:
    paths = [table(tmp_path / "a.jsonl", "w1", 3), table(tmp_path / "b.jsonl", "w2", 2)]
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("{}\n")
    data = open_datasets(
        paths, DataSelection(), ReadOptions(), words(), task=CausalLm(), mixing=Mixing()
    )
    with pytest.raises(BadDataset, match=r"b\.jsonl', line 3: expected 'text'"):
        data.samples(8, 64)
