"""Tokenised prompts, and text of new tokens as soon as it may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from swarm_ft.client.data.chat import render_chat
from swarm_ft.client.data.special_tokens import special_tokens_of
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
"""Character that a tokenizer writes for bytes that do not form a character yet."""
NUM_CONTEXT_TOKENS = 5
"""Number of prompt tokens that new tokens are decoded with; some decode differently behind others.
"""


def tokenize_prompt(
    prompt: str, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool
) -> tuple[int, ...]:
    """Tokenise a prompt as training tokenises documents.

    A prompt begins with the tokens that the tokenizer puts in front of a text. Tokens that it puts
    behind a text, such as EOS, are left out, because the prompt continues.

    Args:
        prompt: Text to continue; with `is_chat` the user's message to answer.
        tokenizer: Tokenizer of the model.
        is_chat: Whether to apply the model's chat template.

    Raises:
        BadOption: The tokenizer has no chat template, or the template refuses the prompt.
    """
    if not is_chat:
        ids = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        return (*special_tokens_of(tokenizer).missing(ids), *ids)
    if not tokenizer.chat_template:
        raise BadOption(
            "--chat: expected a tokenizer with a chat template, the model's has none; leave it out"
        )
    try:
        text = render_chat(
            [{"role": "user", "content": prompt}], tokenizer, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError, LookupError) as exc:
        raise BadOption(f"--chat: the model's chat template refuses the prompt: {exc}") from exc
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class NewText:
    """Text of new tokens behind a prompt.

    A character may need several tokens, and a token decodes differently at the start of a text.
    Each token is therefore decoded together with some before it, and shown once its last character
    is complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-NUM_CONTEXT_TOKENS:])
        self._first, self._shown = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """Add a token and return the text that may be shown now."""
        self._tokens.append(token)
        new = self._unshown()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._first, self._shown = self._shown, len(self._tokens)
        return new

    def end(self) -> str:
        """Return the text that was not shown yet, complete or not."""
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
    """Return `text` without control characters except newline and tab."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)
