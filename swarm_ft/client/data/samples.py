"""Token ids as samples of one length, kept in a file without a name until the job is over."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Self, overload

import numpy as np
import numpy.typing as npt

from swarm_ft.client.data.files import reason, refused
from swarm_ft.protocol.spec.run_spec import MAX_SAMPLES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenArray = npt.NDArray[np.uint32]
Texts = Sequence[str]


def token_ids(texts: Texts, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The token ids of each text, tokenised as one piece, without special tokens of its own."""
    # verbose=False: a text longer than the model's context is what we want, not a mistake.
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


class SampleFile:
    """Documents come in, samples of `seq_length` tokens come out.

    Packed, documents follow each other, and what does not fill the last sample is dropped.
    Otherwise each begins a sample of its own, and what it lacks to the end of its last is filled
    with `fill_id`.

    The file has no name: it is gone when this is closed and the arrays made of it are let go.

    Args:
        source: where the documents come from, for errors.
        seq_length: tokens a sample.
        vocab_size: of the model.
        fill_id: None packs.
    """

    def __init__(
        self, source: str, *, seq_length: int, vocab_size: int, fill_id: int | None = None
    ) -> None:
        self.num_tokens = 0
        self.num_filled = 0
        self._source = source
        self.seq_length = seq_length
        self._fill_id = fill_id
        self._vocab_size = vocab_size
        self._file = tempfile.TemporaryFile(prefix="swarm-ft-tokens-")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    @property
    def num_samples(self) -> int:
        """Whole ones, up to now."""
        return self.num_tokens // self.seq_length

    def add(self, documents: Iterable[Sequence[int]]) -> None:
        """Take the token ids of some documents.

        Raises:
            BadDataset: an id is not in the vocabulary, there are more samples than a run takes,
                or the disk has no room for them.
        """
        if self._fill_id is not None:
            documents = (self._filled(ids, self._fill_id) for ids in documents)
        ids = np.fromiter(chain.from_iterable(documents), dtype="<u4")
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise refused(
                self._source,
                f"token id {int(ids.max())} is outside the model's vocabulary of "
                f"{self._vocab_size}; does the tokenizer belong to the model?",
            )
        self._write(ids)
        self.num_tokens += len(ids)
        if self.num_samples > MAX_SAMPLES:
            raise refused(
                self._source,
                f"more than {MAX_SAMPLES} samples; take fewer (--max-samples) or longer ones "
                "(--seq-length)",
            )

    def samples(self, limit: int | None = None) -> TokenArray:
        """Token ids [samples, seq_length], read from the disk as they are needed.

        Args:
            limit: of samples; None takes all.

        Raises:
            BadDataset: there is not one whole sample.
        """
        if self.num_samples == 0:
            raise refused(
                self._source,
                f"expected at least one sample of {self.seq_length} tokens, got "
                f"{self.num_tokens} tokens in all; give more text or a smaller --seq-length",
            )
        count = min(self.num_samples, limit or self.num_samples)
        return np.memmap(self._file, dtype="<u4", mode="r", shape=(count, self.seq_length))

    def _write(self, ids: TokenArray) -> None:
        try:
            self._file.write(ids.tobytes())
            self._file.flush()
        except OSError as exc:
            raise refused(
                self._source,
                f"its tokens cannot be kept in {tempfile.gettempdir()} ({reason(exc)}); TMPDIR "
                "names another place",
            ) from exc

    def _filled(self, ids: Sequence[int], fill_id: int) -> list[int]:
        lacking = -len(ids) % self.seq_length
        self.num_filled += lacking
        return [*ids, *[fill_id] * lacking]


class SampleBytes(Sequence[bytes]):
    """Samples as they travel, little-endian uint32, made when they are asked for.

    Args:
        tokens: [samples, seq_length].
    """

    def __init__(self, tokens: TokenArray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [tokens_to_bytes(row) for row in self._tokens[index]]
        return tokens_to_bytes(self._tokens[index])


def tokens_to_bytes(row: TokenArray) -> bytes:
    """One sample [seq_length] as it travels: little-endian uint32."""
    return row.astype("<u4").tobytes()
