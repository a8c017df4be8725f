"""Mixtures of datasets: the samples of several datasets in an order drawn by the seed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_ft.client.data.dataset import Dataset, Samples
from swarm_ft.client.data.files import DataSelection
from swarm_ft.client.data.progress import ReadProgress
from swarm_ft.client.data.samples import (
    ROWS_A_BLOCK,
    TokenArray,
    storing_tokens,
    token_counts,
)
from swarm_ft.client.data.sources import open_dataset
from swarm_ft.client.data.summary import mixed_summary
from swarm_ft.client.data.text_files import bad_dataset
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
    """Parameters of a mixture.

    Attributes:
        shares: Share of each dataset, above 0, with sum 1; None takes each sample once, evenly
            spread.
        stopping: End of the samples; used only with shares.
        seed: Seed of the order.
    """

    shares: tuple[float, ...] | None = None
    stopping: StoppingStrategy = StoppingStrategy.FIRST_EXHAUSTED
    seed: int = 0


class Order(NamedTuple):
    """Order of samples.

    Attributes:
        datasets: Index of each sample's dataset, [samples].
        rows: Index of each sample within its dataset, [samples].
    """

    datasets: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    def first(self, limit: int | None) -> Order:
        """Return the first `limit` samples; all for None."""
        return Order(self.datasets[:limit], self.rows[:limit])


def order_of(sizes: Sequence[int], mixing: Mixing) -> Order:
    """Return the order of all samples of datasets with these sizes.

    With shares it is the order of `interleave_datasets` of the library `datasets`.
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
    """Write rows [samples, seq_length] in their order to an unnamed temporary file.

    Raises:
        BadDataset: The disk has no room for them.
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
    """Several datasets, read one after the other and mixed sample by sample.

    Args:
        parts: Datasets; at least two.
        mixing: Parameters of the mixture.
    """

    def __init__(self, parts: Sequence[Dataset], mixing: Mixing) -> None:
        self._parts = parts
        self._mixing = mixing
        self.source = ", ".join(part.source for part in parts)

    def describe(self) -> list[str]:
        """Return the descriptions of all datasets, for people."""
        return [line for part in self._parts for line in part.describe()]

    def samples(
        self,
        seq_length: int,
        vocab_size: int,
        *,
        limit: int | None = None,
        on_batch: Callable[[ReadProgress], None] = lambda _so_far: None,
    ) -> Samples:
        """Read all datasets and mix their samples; see `Dataset.samples`.

        `limit` counts the samples of the mixture, and bounds the samples read of each dataset.
        """
        read = [
            part.samples(seq_length, vocab_size, limit=limit, on_batch=on_batch)
            for part in self._parts
        ]
        tables = [one.tokens for one in read]
        order = order_of([len(table) for table in tables], self._mixing).first(limit)
        if len(order.rows) > MAX_SAMPLES:
            raise bad_dataset(
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
        """Return the share of each dataset, for people."""
        counts = np.bincount(order.datasets, minlength=len(tables))
        shares = [
            f"{part.source} {count:,} of its {len(table):,} ({count / len(order.rows):.1%})"
            for part, count, table in zip(self._parts, counts.tolist(), tables, strict=True)
        ]
        return f"mixed: {len(order.rows):,} samples; {', '.join(shares)}"


def open_datasets(  # noqa: PLR0913 - where data lies, how it is read, and for what
    paths: Sequence[str],
    selection: DataSelection,
    options: ReadOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: Task,
    counted_names: tuple[str, ...] = (),
    mixing: Mixing,
) -> Dataset | Mixture:
    """Open one dataset or several; see `open_dataset`.

    Raises:
        BadDataset: A dataset cannot be used, as far as its first document shows.
        BadOption: An option is missing, or has no effect on any dataset.
    """
    found = [
        open_dataset(
            path,
            selection,
            options,
            tokenizer,
            all_options=False,
            task=task,
            counted_names=counted_names,
        )
        for path in paths
    ]
    for field, why in found[0].ineffective_options.items():
        if all(field in one.ineffective_options for one in found):
            raise BadOption(why)
    return found[0] if len(found) == 1 else Mixture(found, mixing)
