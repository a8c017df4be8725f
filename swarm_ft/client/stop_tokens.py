"""Stop tokens: the tokens that end texts and turns in samples, and stop generation of a result."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from swarm_ft.client.data.chat import render_chat
from swarm_ft.client.data.messages import ASSISTANT, Messages
from swarm_ft.protocol.spec.sample_rows import samples_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarm_ft.client.data.samples import TokenArray

_ANSWER = "four"
_CHAT: Messages = ({"role": "user", "content": "2+2?"}, {"role": ASSISTANT, "content": _ANSWER})
_ROWS_AT_ONCE = 1024


def turn_stop_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the chat template ends the assistant's turn; None without one."""
    if not tokenizer.chat_template:
        return None
    try:
        text = render_chat(_CHAT, tokenizer)
    except (TemplateError, TypeError, ValueError, LookupError):
        return None
    _, found, behind = text.rpartition(_ANSWER)
    if not found:
        return None
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = tokenizer(behind, add_special_tokens=False, verbose=False).input_ids
    return next((token for token in ids if token in special), None)


def trained_stop_tokens(
    tokens: TokenArray, tokenizer: PreTrainedTokenizerBase, known: Collection[int]
) -> tuple[int, ...]:
    """Return the stop tokens that samples teach and the model's settings do not have yet.

    Args:
        tokens: Sample rows of token words, [samples, seq_length].
        tokenizer: Tokenizer of the model.
        known: Stop tokens in the model's own settings for `generate`.
    """
    candidates = dict.fromkeys((turn_stop_token(tokenizer), tokenizer.eos_token_id))
    wanted = [one for one in candidates if one is not None and one not in known]
    return tuple(one for one in wanted if _is_learned(tokens, one))


def _is_learned(tokens: TokenArray, token: int) -> bool:
    parts = (tokens[at : at + _ROWS_AT_ONCE] for at in range(0, len(tokens), _ROWS_AT_ONCE))
    return any(bool((samples_in(rows).labels == token).any()) for rows in parts)


def stop_token_lines(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int], *, is_adapter: bool
) -> list[str]:
    """Return lines for people about stop tokens that the base model does not have."""
    if not ends:
        return []
    words = " and ".join(repr(tokenizer.decode([token])) for token in ends)
    if is_adapter:
        return [
            f"samples end with {words}, but the base model's generation_config.json does not stop "
            f"there: pass eos_token_id={list(ends)} to generate, together with its own"
        ]
    return [f"samples end with {words}: the result's generation_config.json has it in eos_token_id"]
