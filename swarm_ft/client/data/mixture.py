"""Several datasets as one: each one's samples, in an order that the seed draws."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_ft.client.data.dataset import Dataset, Samples
from swarm_ft.client.data.files import Wanted
from swarm_ft.client.data.progress import ReadSoFar
from swarm_ft.client.data.samples import (
    ROWS_A_BLOCK,
    TokenArray,
    storing_tokens,
    token_counts,
)
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.data.summary import mixed_summary
from swarm_ft.client.data.text_files import refused
from swarm_ft.client.options import ReadOptions, StoppingStrategy
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES
from swarm_ft.protocol.spec.tasks import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DRAWS_A_BLOCK = 1000
"""Draws at a time of `interleave_datasets`; another number would change its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """How samples of several datasets are mixed.

    Attributes:
        shares: of each dataset, above 0, in sum 1; None takes each sample once, spread evenly.
        stopping: when the samples end; it means something with shares alone.
        seed: of the order.
    """

    shares: tuple[float, ...] | None = None
    stopping: StoppingStrategy = StoppingStrategy.FIRST_EXHAUSTED
    seed: int = 0


class Order(NamedTuple):
    """Samples in their order.

    Attributes:
        datasets: number of the dataset that gives each sample, [samples].
        rows: number of the sample within it, [samples].
    """

    datasets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def first(self, limit: int | None) -> Order:
        """Return the first so many samples, or all."""
        return Order(self.datasets[:limit], self.rows[:limit])


def order_of(sizes: Sequence[int], mixing: Mixing) -> Order:
    """Return the order of all samples of datasets that have so many.

    With shares it is the order in which `interleave_datasets` of the library `datasets` draws.
    """
    if mixing.shares is not None:
        return _interleaved(sizes, mixing.shares, mixing)
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    drawn = np.random.default_rng(mixing.seed).permutation(numbers)
    rows = np.empty(len(drawn), dtype=np.int64)
    for number, size in enumerate(sizes):
        rows[drawn == number] = np.arange(size)
    return Order(drawn, rows)


def _interleaved(sizes: Sequence[int], shares: Sequence[float], mixing: Mixing) -> Order:
    drawn = np.concatenate(list(_draws(sizes, shares, mixing)))
    places = [np.flatnonzero(drawn == number) for number in range(len(sizes))]
    ends = [
        found[size - 1] for found, size in zip(places, sizes, strict=True) if len(found) >= size
    ]
    last = min(ends) if mixing.stopping is StoppingStrategy.FIRST_EXHAUSTED else max(ends)
    rows = np.empty(len(drawn), dtype=np.int64)
    for found, size in zip(places, sizes, strict=True):
        rows[found] = np.arange(len(found)) % size
    return Order(drawn[: last + 1], rows[: last + 1])


def _draws(
    sizes: Sequence[int], shares: Sequence[float], mixing: Mixing
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield blocks of drawn datasets until the first is exhausted, or all are.

    `interleave_datasets` draws blocks of the same length from the same generator.
    """
    rng = np.random.default_rng(mixing.seed)
    is_end = any if mixing.stopping is StoppingStrategy.FIRST_EXHAUSTED else all
    counts = np.zeros(len(sizes), dtype=np.int64)
    while not is_end(counts >= sizes):
        block = rng.choice(len(sizes), size=DRAWS_A_BLOCK, p=shares)
        counts += np.bincount(block, minlength=len(sizes))
        yield block


def _mixed_rows(parts: Sequence[TokenArray], order: Order, source: str) -> TokenArray:
    """Write rows [samples, seq_length] in their order to a nameless file.

    Raises:
        BadDataset: there is no room for them.
    """
    with storing_tokens(source), tempfile.TemporaryFile(prefix="swarm-ft-") as file:
        for start in range(0, len(order.rows), ROWS_A_BLOCK):
            block = slice(start, start + ROWS_A_BLOCK)
            numbers, rows = order.datasets[block], order.rows[block]
            found = np.empty((len(rows), parts[0].shape[1]), dtype="<u4")
            for number, part in enumerate(parts):
                found[numbers == number] = part[rows[numbers == number]]
            file.write(found.tobytes())
        file.flush()
        shape = (len(order.rows), parts[0].shape[1])
        return np.memmap(file, dtype="<u4", mode="r", shape=shape)


class Mixture:
    """Several datasets, which are read one after the other and mixed sample by sample.

    Args:
        parts: two or more.
        mixing: how.
    """

    def __init__(self, parts: Sequence[Dataset], mixing: Mixing) -> None:
        self._parts = parts
        self._mixing = mixing
        self.source = ", ".join(part.source for part in parts)

    def describe(self) -> list[str]:
        """Return what each dataset is, for people."""
        return [line for part in self._parts for line in part.describe()]

    def samples(
        self,
        seq_length: int,
        vocab_size: int,
        *,
        limit: int | None = None,
        on_batch: Callable[[ReadSoFar], None] = lambda _so_far: None,
    ) -> Samples:
        """Read all datasets and mix their samples; see `Dataset.samples`.

        `limit` counts the samples of all; no more than so many of each dataset are read.
        """
        read = [
            part.samples(seq_length, vocab_size, limit=limit, on_batch=on_batch)
            for part in self._parts
        ]
        tables = [one.tokens for one in read]
        order = order_of([len(table) for table in tables], self._mixing).first(limit)
        if len(order.rows) > MAX_SAMPLES:
            raise refused(
                self.source, f"more than {MAX_SAMPLES} samples; take fewer (--max-samples)"
            )
        tokens = _mixed_rows(tables, order, self.source)
        summary = mixed_summary(
            [one.summary for one in read],
            token_counts(tokens),
            source=self.source,
            mixed=self._mixed(order, tables),
        )
        return Samples(tokens=tokens, summary=summary)

    def _mixed(self, order: Order, tables: Sequence[TokenArray]) -> str:
        """Say what each dataset gives, for people."""
        counts = np.bincount(order.datasets, minlength=len(tables))
        shares = [
            f"{part.source} {count:,} of its {len(table):,} ({count / len(order.rows):.1%})"
            for part, count, table in zip(self._parts, counts.tolist(), tables, strict=True)
        ]
        return f"mixed: {len(order.rows):,} samples; {', '.join(shares)}"


def open_datasets(  # noqa: PLR0913 - where data lies, how it is read, and for what
    paths: Sequence[str],
    wanted: Wanted,
    options: ReadOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task,
    counted_names: tuple[str, ...] = (),
    mixing: Mixing,
) -> Dataset | Mixture:
    """Open one dataset or several; see `open_dataset`.

    Raises:
        BadDataset: one cannot be used, as far as its first document tells.
        BadOption: an option is missing, or means nothing for any of them.
    """
    found = [
        open_dataset(
            path,
            wanted,
            options,
            tokenizer,
            all_options=False,
            task=task,
            counted_names=counted_names,
        )
        for path in paths
    ]
    for field, why in found[0].meaningless.items():
        if all(field in one.meaningless for one in found):
            raise BadOption(why)
    return found[0] if len(found) == 1 else Mixture(found, mixing)
