"""From a row to a document: which columns there are, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from swarm_ft.client.data.chat import Document, Piece, pieces_of_chat, rendered
from swarm_ft.client.data.rows import TEXT_COLUMN, Row, kind_of
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABEL_COLUMNS = ("label", "labels")
ALPACA_HEAD = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
ALPACA_HEAD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
"""Of Stanford's Alpaca, as its models and many since were trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How documents are made of rows.

    Attributes:
        words: what the columns mean, for people.
        columns: that are used.
        render: a row's document.
        has_end: whether documents bring their own end, as those of chat templates do.
        asks: the option that says what of a document is learned; empty if all of it is.
        classes: names of those that are learned, of documents that are a sample each.
        are_of_words: whether pieces have them, and not documents.
    """

    words: str
    columns: tuple[str, ...]
    render: Callable[[Row], Document]
    has_end: bool = False
    asks: str = ""
    classes: tuple[str, ...] = ()
    are_of_words: bool = False

    @property
    def has_class(self) -> bool:
        """Whether classes are learned."""
        return bool(self.classes)


PLAIN_TEXT = Form(
    words="one document",
    columns=(TEXT_COLUMN,),
    render=lambda row: (Piece(text_in(row, TEXT_COLUMN), True),),
    has_end=True,
)
"""Nothing stands behind it: it is cut into samples as it is."""


def form_of(
    columns: Iterable[str],
    options: ReadOptions,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
) -> Form:
    """The form of rows with these columns.

    Where they fit several forms, the one that says most: messages, then prompt and completion,
    then instruction and output, then text.

    Args:
        columns: of the first row.
        options: which column to take, and what of documents is learned.
        tokenizer: of the model; renders messages.
        source: whose columns these are, for errors.

    Raises:
        BadDataset: they fit none, or one that cannot be trained on.
    """
    names = set(columns)
    told = ", ".join(f"'{name}'" for name in columns)
    text_column = options.text_column
    if text_column is not None:
        if text_column not in names:
            raise BadDataset(f"dataset '{source}': no column '{text_column}'; it has {told}")
        return _text(text_column)
    if "messages" in names:
        return _messages(tokenizer, source, assistant_only=options.assistant_only_loss)
    if {"prompt", "completion"} <= names:
        return _learned_by_half(_prompt_and_completion(), options)
    if {"instruction", "output"} <= names:
        return _learned_by_half(_alpaca(), options)
    if TEXT_COLUMN not in names:
        raise BadDataset(
            f"dataset '{source}': expected the columns text; prompt and completion; messages; or "
            f"instruction, input and output; got {told}; --text-column says which one to train on"
        )
    for label in LABEL_COLUMNS:
        if label in names:
            raise BadDataset(
                f"dataset '{source}': text with a '{label}' is for --task classification; "
                "--text-column text trains on the text alone"
            )
    return _text(TEXT_COLUMN)


def _learned_by_half(form: Form, options: ReadOptions) -> Form:
    """Of documents that are a question and its answer, the answer; or both."""
    form = replace(form, asks="completion_only_loss")
    if options.completion_only_loss:
        return form

    def render(row: Row) -> Document:
        return tuple(Piece(one.text, is_target=True) for one in form.render(row))

    return replace(form, render=render)


def _text(column: str) -> Form:
    return Form(
        words=f"a document is '{column}'",
        columns=(column,),
        render=lambda row: (Piece(text_in(row, column), True),),
    )


def _prompt_and_completion() -> Form:
    def render(row: Row) -> Document:
        return (
            Piece(text_in(row, "prompt"), False),
            Piece(text_in(row, "completion"), True),
        )

    return Form(
        words="a document is 'prompt' and 'completion', one right behind the other",
        columns=("prompt", "completion"),
        render=render,
    )


def _alpaca() -> Form:
    def render(row: Row) -> Document:
        head, parts = ALPACA_HEAD, [f"### Instruction:\n{text_in(row, 'instruction')}"]
        if row.values.get("input") not in (None, ""):
            head = ALPACA_HEAD_WITH_INPUT
            parts.append(f"### Input:\n{text_in(row, 'input')}")
        asked = "\n\n".join((head, *parts, "### Response:\n"))
        return Piece(asked, False), Piece(text_in(row, "output"), True)

    return Form(
        words="a document is 'instruction', 'input' where there is one, and 'output', as Alpaca's",
        columns=("instruction", "input", "output"),
        render=render,
    )


def _messages(tokenizer: PreTrainedTokenizerBase, source: str, *, assistant_only: bool) -> Form:
    if not tokenizer.chat_template:
        raise BadDataset(
            f"dataset '{source}': 'messages' need a chat template, and the model's tokenizer has "
            "none; take a model that has one, or put a chat_template.jinja beside this one"
        )

    def render(row: Row) -> Document:
        messages = _checked_messages(row)
        try:
            if assistant_only:
                return pieces_of_chat(messages, tokenizer)
            return (Piece(rendered(messages, tokenizer), True),)
        except (TemplateError, TypeError, ValueError, LookupError) as exc:
            raise BadDataset(
                f"{row.place}: the model's chat template refuses these messages: {exc}"
            ) from exc

    return Form(
        words="a document is 'messages' in the model's chat template",
        columns=("messages",),
        render=render,
        has_end=True,
        asks="assistant_only_loss",
    )


def _checked_messages(row: Row) -> list[dict[str, object]]:
    """Messages as templates take them: what a table filled up with nothing is left out.

    Raises:
        BadDataset: they are no list, or one lacks its role or its text.
    """
    messages = row.values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadDataset(
            f"{row.place}: expected 'messages' to be a list of at least one, got "
            f"{kind_of(messages) if messages != [] else 'an empty one'}"
        )
    for message in messages:
        _check_message(row, message)
    return [{name: v for name, v in one.items() if v is not None} for one in messages]


def _check_message(row: Row, message: object) -> None:
    if not isinstance(message, Mapping):
        raise BadDataset(
            f"{row.place}: expected messages with 'role' and 'content', got {kind_of(message)}"
        )
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise BadDataset(
                f"{row.place}: expected messages with 'role' and 'content', both text; "
                f"'{name}' of one is {kind_of(message.get(name))}"
            )


def text_in(row: Row, column: str) -> str:
    """The text of a column.

    Raises:
        BadDataset: there is none, or it is something else.
    """
    value = row.values.get(column)
    if isinstance(value, str):
        return value
    raise BadDataset(f"{row.place}: expected '{column}' to be text, got {kind_of(value)}")
