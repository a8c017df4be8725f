"""Best-fit packing loses and splits no document, and equals TRL's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl.data_utils import pack_dataset

from swarm_ft.client.data import packing
from swarm_ft.client.data.layouts import DOCUMENTS_PACKED_TOGETHER, layout_of
from swarm_ft.client.data.packing import BestFit, best_fit
from swarm_ft.client.options import PackingStrategy
from swarm_ft.protocol.spec.sample_rows import (
    Words,
    counts_of,
    starts_in,
    text_refusal,
    token_ids_of,
    words_of,
)

SEQ_LENGTH = 24
LENGTHS = st.lists(st.integers(1, SEQ_LENGTH), max_size=60)
GROUP = 7


def next_fit(lengths: Sequence[int]) -> int:
    """Return the number of samples if documents are packed in their order."""
    count, room = 0, 0
    for length in lengths:
        if length > room:
            count, room = count + 1, SEQ_LENGTH
        room -= length
    return count


def rows_of(documents: Sequence[Words], group_size: int = GROUP) -> Words:
    layout = BestFit(SEQ_LENGTH, group_size)
    return np.concatenate([layout.add(documents[:5]), layout.add(documents[5:]), layout.end()])


def documents_of(lengths: Sequence[int]) -> list[Words]:
    """Return documents whose tokens are numbered consecutively."""
    ends = np.cumsum([0, *lengths])
    return [words_of(np.arange(start, end)) for start, end in pairwise(ends)]


def parts_of(row: Words) -> list[list[int]]:
    """Return the token ids of each document in a sample."""
    ids = token_ids_of(row)
    return [part.tolist() for part in np.split(ids, np.flatnonzero(starts_in(row)))]


@given(LENGTHS)
def test_each_document_is_in_one_sample_and_no_sample_is_overfull(lengths: list[int]) -> None:
    samples = best_fit(lengths, SEQ_LENGTH)
    assert sorted(index for sample in samples for index in sample) == list(range(len(lengths)))
    assert all(0 < sum(lengths[one] for one in sample) <= SEQ_LENGTH for sample in samples)
    assert best_fit(lengths, SEQ_LENGTH) == samples


@given(LENGTHS)
def test_it_needs_no_more_samples_than_packing_in_order(lengths: list[int]) -> None:
    samples = best_fit(lengths, SEQ_LENGTH)
    assert len(samples) <= next_fit(lengths)
    # No two samples fit into one.
    sizes = sorted(sum(lengths[one] for one in sample) for sample in samples)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > SEQ_LENGTH


@given(LENGTHS)
def test_rows_hold_whole_documents(lengths: list[int]) -> None:
    documents = documents_of(lengths)
    rows = rows_of(documents)
    parts = [part for row in rows for part in parts_of(row)]
    assert sorted(parts) == sorted(one.tolist() for one in documents)
    assert np.array_equal(rows_of(documents), rows)
    if len(rows) and min(lengths) > 1:
        assert text_refusal(rows, 1 << 20) is None
        # The first token of each document is only read.
        assert counts_of(rows).num_targets == sum(lengths) - len(lengths)


@given(LENGTHS)
def test_documents_of_two_groups_share_no_sample(lengths: list[int]) -> None:
    documents = documents_of(lengths)
    group_of = {
        token: index // GROUP for index, one in enumerate(documents) for token in one.tolist()
    }
    for row in rows_of(documents):
        assert len({group_of[token] for part in parts_of(row) for token in part}) == 1


def test_a_long_document_is_split_into_documents() -> None:
    (document,) = documents_of([2 * SEQ_LENGTH + 5])
    rows = rows_of([document, words_of([7] * 10)])
    parts = [part for row in rows for part in parts_of(row)]
    assert [len(part) for part in parts] == [SEQ_LENGTH, SEQ_LENGTH, 10, 5]


def test_a_group_takes_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_GROUP_TOKENS", 3 * SEQ_LENGTH)
    layout = BestFit(SEQ_LENGTH, 1000)
    sizes = [len(layout.add([one])) for one in documents_of([SEQ_LENGTH] * 7)]
    assert sizes == [0, 0, 3, 0, 0, 3, 0]
    assert len(layout.end()) == 1


def _of_trl(documents: Sequence[Words], strategy: str) -> list[dict[str, Any]]:
    table = Dataset.from_dict({"input_ids": [one.tolist() for one in documents]})
    packed = pack_dataset(table, SEQ_LENGTH, strategy, {"batch_size": DOCUMENTS_PACKED_TOGETHER})
    return list(packed)


@pytest.mark.parametrize(("strategy", "longest"), [("bfd", SEQ_LENGTH), ("bfd_split", 60)])
def test_packs_are_those_of_trl(strategy: str, longest: int) -> None:
    """Compare all tokens in order, over more than one group of documents."""
    random = np.random.default_rng(5)
    documents = documents_of(random.integers(1, longest + 1, 2300).tolist())
    layout = layout_of(PackingStrategy.BFD, SEQ_LENGTH)
    rows = np.concatenate([layout.add(documents), layout.end()])
    theirs = _of_trl(documents, strategy)
    assert [token_ids_of(row).tolist() for row in rows] == [one["input_ids"] for one in theirs]
    lengths = [[len(part) for part in parts_of(row)] for row in rows]
    assert lengths == [one["seq_lengths"] for one in theirs]
