"""The special tokens that a tokenizer puts around a text, and the ones that samples keep.

Training keeps those in front, such as BOS, and ends a document by the end-of-text token alone: a
tokenizer that puts EOS itself would write the end twice. A prompt keeps those in front as well, so
a model continues the tokens that it learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = ("a", "1", "a b", ".", "the")
"""Texts of which one has tokens in every vocabulary that people train with."""


class SpecialTokens(NamedTuple):
    """Token ids that a tokenizer puts around every text.

    Attributes:
        leading: in front of the text, such as BOS; empty if there are none.
        trailing: behind the text, such as EOS; empty if there are none.
    """

    leading: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()

    def missing(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the leading ids that a text's own ids, or the first of them, lack.

        A text may hold them already: chats that a template rendered into a column do.
        """
        has_them = tuple(ids[: len(self.leading)]) == self.leading
        return () if has_them else self.leading


NO_SPECIAL_TOKENS = SpecialTokens()


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Find the tokens that a tokenizer puts around a text, by texts with and without them."""
    for probe in _PROBES:
        text = tokenizer(probe, add_special_tokens=False, verbose=False).input_ids
        around = tokenizer(probe, verbose=False).input_ids
        for place in range(len(around) - len(text) + 1):
            if text and around[place : place + len(text)] == text:
                return SpecialTokens(tuple(around[:place]), tuple(around[place + len(text) :]))
    # No probe has tokens, of an alphabet of its own for instance: by the names of the tokens.
    first = {tokenizer.bos_token_id, tokenizer.cls_token_id}
    ids = tokenizer("", verbose=False).input_ids
    leading = tuple(takewhile(lambda token: token in first, ids))
    return SpecialTokens(leading, tuple(ids[len(leading) :]))


def has_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has tokens of white space: WordPiece has none."""
    ids = [tokenizer(text, verbose=False).input_ids for text in ("a", "a ")]
    return bool(ids[0] != ids[1])


def has_long_line_breaks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a line break behind a special token is several tokens, as in Llama-2."""
    special = tokenizer.eos_token or ""
    ids = tokenizer(f"{special}\n", add_special_tokens=False, verbose=False).input_ids
    return len(ids) > 1 + bool(special)
