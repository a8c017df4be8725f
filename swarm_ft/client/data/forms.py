"""Conversion of rows to documents: known shapes of columns and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from swarm_ft.client.data.chat import TEMPLATE_ERRORS, ChatTemplate, Document, Piece
from swarm_ft.client.data.columns import (
    LABEL_COLUMNS,
    REASONS,
    ROW_FLAGS,
    ColumnMap,
    Fields,
    check_unread_columns,
    is_row_learned,
)
from swarm_ft.client.data.messages import Chat, chat_in, renamed_roles
from swarm_ft.client.data.rows import TEXT_COLUMN, Row, describe_type
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.sample_rows import NO_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALPACA_HEAD = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
ALPACA_HEAD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
"""Prompts of Stanford's Alpaca, which its models and many later ones were trained with."""
COMPLETION_ONLY, ASSISTANT_ONLY = "completion_only_loss", "assistant_only_loss"
_CHAT_ROLES = ("system", "tools", "chat_template_kwargs")


def _nothing(_row: Row) -> Sequence[str]:
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Conversion of rows to documents.

    Attributes:
        description: Meaning of the columns, for people.
        columns: Columns that are used.
        render: Function that makes a document of a row.
        has_end: Whether documents bring their own end, as those of chat templates do.
        loss_options: Options that choose the learned part of a document; empty: all of it.
        classes: Names of learned classes; each document is then one sample.
        has_word_classes: Whether classes belong to words, not to documents.
        unused_keys: Function that returns keys of messages without effect, for people.
        notes: Function that returns differences to TRL's document of a row, for people.
    """

    description: str
    columns: tuple[str, ...]
    render: Callable[[Row], Document]
    has_end: bool = False
    loss_options: frozenset[str] = frozenset()
    classes: tuple[str, ...] = ()
    has_word_classes: bool = False
    unused_keys: Callable[[Row], Sequence[str]] = _nothing
    notes: Callable[[Row], Sequence[str]] = _nothing

    @property
    def has_class(self) -> bool:
        """Whether classes are learned."""
        return bool(self.classes)

    def unused_in(self, row: Row) -> list[str]:
        """Return the unused columns of a row and unused keys of its messages, for people."""
        columns = [f"'{name}'" for name in row.values if name not in self.columns]
        return [*columns, *self.unused_keys(row)]


PLAIN_TEXT = Form(
    description="one document",
    columns=(TEXT_COLUMN,),
    render=lambda row: (Piece(text_in(row, TEXT_COLUMN), True),),
    has_end=True,
)
"""Form of plain text: one document without an end, which is cut into samples."""


class _Source(NamedTuple):
    """Data that a form is made for."""

    columns: ColumnMap
    options: ReadOptions
    tokenizer: PreTrainedTokenizerBase
    name: str
    first: Mapping[str, object]

    def words(self, *roles: str) -> str:
        """Return the sources of roles, for people."""
        return ", ".join(map(self.columns.describe, roles))

    def used(self, *roles: str) -> tuple[str, ...]:
        """Return all columns that fill some roles."""
        return tuple(name for role in roles for name in self.columns.columns_of(role))


class _Shape(NamedTuple):
    """Columns that have a meaning together.

    Attributes:
        needs: Roles that must be filled.
        form: Function that makes the form of rows with these columns.
        takes: Roles that may be filled.
        names: Default columns of roles that do not have the role's name.
    """

    needs: tuple[str, ...]
    form: Callable[[_Source], Form]
    takes: tuple[str, ...] = ()
    names: Mapping[str, str] = {}

    def fits(self, columns: ColumnMap, names: Iterable[str]) -> bool:
        """Whether all needed columns are present and all roles that the user maps are known."""
        known = columns.with_defaults(self.names)
        is_complete = all(known.has(role, names) for role in self.needs)
        return is_complete and set(columns.sources) <= {*self.needs, *self.takes}


def form_of(
    values: Mapping[str, object],
    options: ReadOptions,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
) -> Form:
    """Return the form of rows like this one.

    If the columns fit several shapes, the first of `_SHAPES` is used.

    Args:
        values: Values of the first row, by column.
        options: Options of columns and of the learned part.
        tokenizer: Tokenizer of the model, which renders messages.
        source: Name of the data, for errors.

    Raises:
        BadDataset: The columns fit no shape, or one that cannot be trained on.
        BadOption: `--column` or `--template` is malformed.
    """
    columns = ColumnMap.of(options)
    found = ", ".join(f"'{name}'" for name in values)
    for role in columns.sources:
        for name in columns.columns_of(role):
            if name not in values:
                raise BadDataset(f"dataset '{source}': no column '{name}'; it has {found}")
    shape = next((one for one in _SHAPES if one.fits(columns, values)), None)
    if shape is None:
        raise BadDataset(
            f"dataset '{source}': expected the columns text; prompt and completion; messages; "
            f"conversations; or instruction, input and output; got {found}{_hint(values)}"
        )
    made_of = _Source(columns.with_defaults(shape.names), options, tokenizer, source, values)
    form = shape.form(made_of)
    for role in columns.sources:
        if not set(columns.columns_of(role)) <= set(form.columns):
            raise BadOption(f"--column {role}: has no effect where {form.description}")
    return with_row_checks(form, columns.removed)


def _hint(values: Mapping[str, object]) -> str:
    """Return a suggestion of options for columns with other names."""
    texts = [name for name, value in values.items() if isinstance(value, str)]
    one, other = texts[:2] if len(texts) > 1 else ("NAME", "OTHER")
    reasons = [f"; '{name}' {REASONS[name]}" for name in values if name in REASONS]
    return (
        f"{''.join(reasons[:1])}; name a column with --text-column, or give their meaning with "
        f"--column prompt={one} --column completion={other}, or a layout with --template "
        f"'{{{one}}} {{{other}}}'"
    )


def with_row_checks(form: Form, removed: frozenset[str], names: Iterable[str] = REASONS) -> Form:
    """Return the form with checks: columns that change a row's meaning, and weights of rows.

    Args:
        form: Form to guard.
        removed: Columns that the user removed.
        names: Columns for which a row is refused, some of `REASONS`.
    """

    def render(row: Row) -> Document:
        check_unread_columns(row, form.columns, removed, names)
        document = form.render(row)
        if is_row_learned(row, form.columns, removed):
            return document
        return tuple(piece._replace(is_target=False, label=NO_LABEL) for piece in document)

    return replace(form, render=render, columns=(*form.columns, *set(ROW_FLAGS) - removed))


# ---- texts


def _text_form(made_of: _Source) -> Form:
    columns = made_of.columns
    for label in LABEL_COLUMNS:
        if label in made_of.first.keys() - columns.removed - set(made_of.used(TEXT_COLUMN)):
            raise BadDataset(
                f"dataset '{made_of.name}': text with a '{label}' needs --task classification; "
                "--text-column text trains on the text alone"
            )
    return Form(
        description=f"a document is {columns.describe(TEXT_COLUMN)}",
        columns=made_of.used(TEXT_COLUMN),
        render=lambda row: (Piece(Fields(row, columns).text(TEXT_COLUMN), True),),
    )


def _pair_form(made_of: _Source) -> Form:
    def render(fields: Fields) -> Document:
        return Piece(fields.text("prompt"), False), Piece(fields.text("completion"), True)

    both = " and ".join(map(made_of.columns.describe, ("prompt", "completion")))
    return _answer_form(
        made_of, ("prompt", "completion"), f"{both}, one right behind the other", render
    )


def _instruction_form(made_of: _Source) -> Form:
    end = made_of.options.separator
    if end is None:
        end = str(made_of.tokenizer.eos_token or "")

    def render(fields: Fields) -> Document:
        head, turns = _system_of(fields), _turns_of(fields)
        pieces = []
        for question, answer in turns:
            pieces += [Piece(f"{head}\n\n{question}", False), Piece(f"{answer}{end}", True)]
            head = ""
        *_, last = turns
        return *pieces[:-1], Piece(last[1], True)

    words = made_of.words("instruction")
    return _answer_form(
        made_of,
        ("instruction", "input", "output", "system", "history"),
        f"{words}, {made_of.words('input')} where there is one, and {made_of.words('output')}, "
        "as Alpaca's",
        render,
    )


def _system_of(fields: Fields) -> str:
    """Return the system text: the row's own, as in LLaMA-Factory's template, or Alpaca's."""
    system = fields.optional_text("system")
    if system:
        return system
    return ALPACA_HEAD_WITH_INPUT if fields.optional_text("input") else ALPACA_HEAD


def _turns_of(fields: Fields) -> list[tuple[str, str]]:
    """Return the questions in Alpaca's layout with their answers, earlier turns first."""
    question = _alpaca_prompt(fields.text("instruction"), fields.optional_text("input"))
    history = fields.get("history") or []
    words = fields.columns.describe("history")
    if not isinstance(history, list):
        raise BadDataset(
            f"{fields.place}: expected {words} to be a list, got {describe_type(history)}"
        )
    earlier = []
    for turn in history:
        is_pair = isinstance(turn, list | tuple) and len(turn) == 2
        if not is_pair or not all(isinstance(one, str) for one in turn):
            raise BadDataset(
                f"{fields.place}: expected {words} to be pairs of texts, a question and its answer"
            )
        earlier.append((_alpaca_prompt(turn[0], ""), turn[1]))
    return [*earlier, (question, fields.text("output"))]


def _alpaca_prompt(instruction: str, context: str) -> str:
    parts = [f"### Instruction:\n{instruction}"]
    if context:
        parts.append(f"### Input:\n{context}")
    return "\n\n".join((*parts, "### Response:\n"))


def _answer_form(
    made_of: _Source, roles: tuple[str, ...], words: str, render: Callable[[Fields], Document]
) -> Form:
    """Return the form of questions and answers; the answers or both are learned."""
    completion_only = made_of.options.completion_only_loss

    def pieces_of(row: Row) -> Document:
        document = render(Fields(row, made_of.columns))
        if completion_only:
            return document
        return tuple(piece._replace(is_target=True) for piece in document)

    return Form(
        description=f"a document is {words}",
        columns=made_of.used(*roles),
        render=pieces_of,
        loss_options=frozenset({COMPLETION_ONLY}),
    )


# ---- chats


def _chat_form(made_of: _Source) -> Form:
    template = _template_of(made_of, "messages")
    assistant_only = made_of.options.assistant_only_loss

    def render(row: Row) -> Document:
        fields = Fields(row, made_of.columns)
        chat = chat_in(fields, "messages")
        try:
            return template.document(template.prepare(chat), assistant_only=assistant_only)
        except TEMPLATE_ERRORS as exc:
            raise _refused(row, exc) from exc

    return Form(
        description=f"a document is {made_of.words('messages')} in the model's chat template",
        columns=(*made_of.used("messages", *_CHAT_ROLES), "functions"),
        render=render,
        has_end=True,
        loss_options=frozenset({ASSISTANT_ONLY}),
        unused_keys=lambda row: _unused_keys(row, made_of, template, "messages"),
        notes=lambda row: _chat_notes(row, made_of, template, "messages"),
    )


def _chat_pair_form(made_of: _Source) -> Form:
    template = _template_of(made_of, "prompt", "completion")
    options = made_of.options

    def render(row: Row) -> Document:
        fields = Fields(row, made_of.columns)
        prompt = chat_in(fields, "prompt")
        completion = chat_in(fields, "completion", with_system=False)
        try:
            return template.answer(
                prompt,
                completion,
                completion_only=options.completion_only_loss,
                assistant_only=options.assistant_only_loss,
            )
        except TEMPLATE_ERRORS as exc:
            raise _refused(row, exc) from exc

    return Form(
        description=f"a document is the messages of {made_of.words('prompt')} and of "
        f"{made_of.words('completion')} in the model's chat template",
        columns=(*made_of.used("prompt", "completion", *_CHAT_ROLES), "functions"),
        render=render,
        has_end=True,
        loss_options=frozenset({COMPLETION_ONLY, ASSISTANT_ONLY}),
        unused_keys=lambda row: _unused_keys(row, made_of, template, "prompt", "completion"),
        notes=lambda row: _chat_notes(row, made_of, template, "prompt", "completion"),
    )


def _template_of(made_of: _Source, *roles: str) -> ChatTemplate:
    if not made_of.tokenizer.chat_template:
        raise BadDataset(
            f"dataset '{made_of.name}': {made_of.words(*roles)} need a chat template, and the "
            "model's tokenizer has none; take a model that has one, or put a chat_template.jinja "
            "beside this one"
        )
    return ChatTemplate(made_of.tokenizer)


def _refused(row: Row, exc: Exception) -> BadDataset:
    return BadDataset(f"{row.place}: the model's chat template refuses these messages: {exc}")


def _unused_keys(row: Row, made_of: _Source, template: ChatTemplate, *roles: str) -> list[str]:
    """Return keys of messages that the template ignores."""
    chat = template.prepare(_joined_chat(row, made_of, *roles))
    keys = dict.fromkeys(key for message in chat.messages for key in message)
    return [
        f"'{key}' of messages"
        for key in keys
        if key not in ("role", "content")
        and not template.is_changed_by(chat, chat.without_key(key))
    ]


def _joined_chat(row: Row, made_of: _Source, *roles: str) -> Chat:
    fields = Fields(row, made_of.columns)
    chat = chat_in(fields, roles[0])
    for role in roles[1:]:
        chat = chat.concatenated(chat_in(fields, role, with_system=False))
    return chat


def _chat_notes(row: Row, made_of: _Source, template: ChatTemplate, *roles: str) -> list[str]:
    """Return differences to TRL's document of a row; see docs/how-to/prepare-data.md."""
    fields, chat = Fields(row, made_of.columns), _joined_chat(row, made_of, *roles)
    renamed = {k: v for role in roles for k, v in renamed_roles(fields, role).items()}
    notes = []
    if renamed:
        names = ", ".join(f"'{name}' as {role}" for name, role in renamed.items())
        notes.append(f"roles of messages: {names}; TRL passes the names to the template")
    if chat.context_indices:
        notes.append("messages of weight 0 are only read; TRL ignores weights")
    if template.changes_calls(chat):
        notes.append(
            "tool calls: the template gets 'arguments' or 'content' in the form that it accepts; "
            "TRL passes them unchanged"
        )
    return notes


def _pair_of_either(made_of: _Source) -> Form:
    are_chats = all(
        isinstance(made_of.first.get(name), list) for name in made_of.used("prompt", "completion")
    )
    return (_chat_pair_form if are_chats else _pair_form)(made_of)


_INSTRUCTION = ("input", "system", "history")
_DOLLY = {"output": "response"}
_SHAPES = (
    _Shape(("messages",), _chat_form, _CHAT_ROLES),
    _Shape(("messages",), _chat_form, _CHAT_ROLES, {"messages": "conversations"}),
    _Shape(("messages",), _chat_form, _CHAT_ROLES, {"messages": "conversation"}),
    _Shape(("prompt", "completion"), _pair_of_either, _CHAT_ROLES),
    _Shape(("instruction", "output"), _instruction_form, _INSTRUCTION),
    _Shape(
        ("instruction", "input", "output"),
        _instruction_form,
        _INSTRUCTION,
        {"input": "context", **_DOLLY},
    ),
    _Shape(("instruction", "output"), _instruction_form, _INSTRUCTION, _DOLLY),
    _Shape((TEXT_COLUMN,), _text_form),
)
"""Known shapes; the first one that fits a row is used."""


def text_in(row: Row, column: str) -> str:
    """Return the text of a column.

    Raises:
        BadDataset: The value is missing or not text.
    """
    return Fields(row, ColumnMap(sources={})).text(column)
