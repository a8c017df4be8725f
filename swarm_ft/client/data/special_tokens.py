"""Special tokens that a tokenizer puts around a text, and those that samples keep.

Training keeps leading tokens such as BOS, and ends a document with the end-of-text token alone: a
tokenizer that adds EOS itself would write the end twice. Prompts keep leading tokens as well, so
that a model continues the tokens that it learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = ("a", "1", "a b", ".", "the")
"""Texts; every vocabulary that people train with has tokens for at least one of them."""


class SpecialTokens(NamedTuple):
    """Token ids that a tokenizer puts around every text.

    Attributes:
        leading: Ids in front of the text, such as BOS; may be empty.
        trailing: Ids behind the text, such as EOS; may be empty.
    """

    leading: tuple[int, ...] = ()
    trailing: tuple[int, ...] = ()

    def missing(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the leading ids, or nothing if a text's own ids begin with them.

        Chats that a template rendered into a column begin with them.
        """
        has_them = tuple(ids[: len(self.leading)]) == self.leading
        return () if has_them else self.leading


NO_SPECIAL_TOKENS = SpecialTokens()


def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return the tokens that a tokenizer puts around a text, found with sample texts."""
    for probe in _PROBES:
        text = tokenizer(probe, add_special_tokens=False, verbose=False).input_ids
        around = tokenizer(probe, verbose=False).input_ids
        for place in range(len(around) - len(text) + 1):
            if text and around[place : place + len(text)] == text:
                return SpecialTokens(tuple(around[:place]), tuple(around[place + len(text) :]))
    # A tokenizer with its own alphabet may have no tokens for the probes; it is judged by the
    # names of its special tokens.
    first = {tokenizer.bos_token_id, tokenizer.cls_token_id}
    ids = tokenizer("", verbose=False).input_ids
    leading = tuple(takewhile(lambda token: token in first, ids))
    return SpecialTokens(leading, tuple(ids[len(leading) :]))


def has_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer has white space tokens; WordPiece has none."""
    ids = [tokenizer(text, verbose=False).input_ids for text in ("a", "a ")]
    return bool(ids[0] != ids[1])


def has_long_line_breaks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a line break behind a special token is several tokens, as in Llama-2."""
    special = tokenizer.eos_token or ""
    ids = tokenizer(f"{special}\n", add_special_tokens=False, verbose=False).input_ids
    return len(ids) > 1 + bool(special)
