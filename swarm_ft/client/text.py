"""From what a user asks to tokens, and from new tokens to what may be shown of them by now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from swarm_ft.client.data.chat import rendered
from swarm_ft.client.data.special_tokens import special_tokens_of
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""How bytes are written that are no character yet."""
NUM_IN_FRONT = 5
"""Tokens of the prompt that new ones are read with: some are written otherwise behind others."""


def asked(prompt: str, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool) -> tuple[int, ...]:
    """Tokenise a prompt as training tokenises documents.

    A prompt begins by the tokens that the tokenizer puts in front; the ones that it puts behind a
    text, such as EOS, are left out, because the prompt goes on.

    Args:
        prompt: the text; or with `is_chat` what a user says, which the model is to answer.
        tokenizer: the model's.
        is_chat: whether the model's chat template is put around it.

    Raises:
        BadOption: there is no such template, or it refuses this.
    """
    if not is_chat:
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        return (*special_tokens_of(tokenizer).missing(ids), *ids)
    if not tokenizer.chat_template:
        raise BadOption(
            "--chat: expected a tokenizer with a chat template, the model's has none; leave it out"
        )
    try:
        text = rendered([{"role": "user", "content": prompt}], tokenizer, is_asking=True)
    except (TemplateError, TypeError, ValueError, LookupError) as exc:
        raise BadOption(f"--chat: the model's chat template refuses the prompt: {exc}") from exc
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class NewText:
    """What follows a prompt, as it comes.

    A character may be of several tokens, and a token is written otherwise at a text's beginning;
    so each is read together with some in front of it, and shown when its last character is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-NUM_IN_FRONT:])
        self._first, self._shown = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """What may be shown after another token."""
        self._tokens.append(token)
        new = self._unshown()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._first, self._shown = self._shown, len(self._tokens)
        return new

    def end(self) -> str:
        """What was not shown yet, whole or not."""
        new = self._unshown()
        self._first = self._shown = len(self._tokens)
        return new

    def _unshown(self) -> str:
        before = self._decoded(self._tokens[self._first : self._shown])
        return self._decoded(self._tokens[self._first :])[len(before) :]

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def showable(text: str) -> str:
    """`text` without what could steer a terminal; its lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
