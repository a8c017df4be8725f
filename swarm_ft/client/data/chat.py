"""A chat as its model's template writes it, and what of that the assistant said.

A template may say itself what the model writes, between `{% generation %}` and `{% endgeneration
%}`; few do. Of others it is found out: what a message of the assistant adds to the text that asks
for it. That is told apart only where a template writes the beginning of a chat as it writes the
chat's beginning, and one that does not (it leaves out earlier turns' thoughts, say) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from swarm_ft.protocol.spec.sample_rows import NO_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[dict[str, object]]


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        is_target: whether a model should learn to write it, rather than to answer it.
        label: the number of its class, if that is what a model learns of it.
    """

    text: str
    is_target: bool
    label: int = NO_LABEL


Document = tuple[Piece, ...]


def rendered(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, *, is_asking: bool = False
) -> str:
    """A chat as text.

    Args:
        messages: each with role and content.
        tokenizer: whose template it is.
        is_asking: whether what stands in front of an answer follows.
    """
    chat: Any = list(messages)
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=is_asking))


def marks_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template says itself what the assistant wrote."""
    return _MARKED.search(tokenizer.get_chat_template()) is not None


def pieces_of_chat(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Document:
    """A chat as text, of which the assistant's is to be learned.

    Raises:
        ValueError: the template does not tell what of it the assistant said.
    """
    text = rendered(messages, tokenizer)
    spans = (
        _marked(messages, tokenizer)
        if marks_answers(tokenizer)
        else list(_added(messages, tokenizer, text))
    )
    pieces, at = [], 0
    for start, stop in spans:
        pieces += [Piece(text[at:start], False), Piece(text[start:stop], True)]
        at = stop
    return tuple(piece for piece in (*pieces, Piece(text[at:], False)) if piece.text)


def _marked(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, int]]:
    chat: Any = [list(messages)]
    given: dict[str, Any] = dict(tokenizer.special_tokens_map)
    _, spans = render_jinja_template(
        conversations=chat,
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **given,
    )
    return list(spans[0])


def _added(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, text: str
) -> Iterator[tuple[int, int]]:
    for index, message in enumerate(messages):
        if message.get("role") == ASSISTANT:
            asked = rendered(messages[:index], tokenizer, is_asking=True) if index else ""
            said = rendered(messages[: index + 1], tokenizer)
            if not (said.startswith(asked) and text.startswith(said)):
                raise ValueError(
                    "it writes a chat's beginning otherwise than the chat, so what the assistant "
                    "said is not to be told apart; put {% generation %} and {% endgeneration %} "
                    "around that in the template, or leave --assistant-only-loss out"
                )
            yield len(asked), len(said)
