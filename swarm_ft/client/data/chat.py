"""Chats rendered by a model's chat template, with the part of the text that is learned.

A template may mark what the model writes, between `{% generation %}` and `{% endgeneration %}`; few
do. Without marks, the learned part is what an assistant message adds to its prompt.
This works only if the template renders the first messages of a chat as a prefix of the whole chat.
Other templates, such as those that drop the thoughts of earlier turns, are refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from swarm_ft.client.data.messages import ASSISTANT, Chat, Message, parse_json
from swarm_ft.protocol.spec.sample_rows import NO_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ue000\ue001"
"""Text that no chat contains: characters of Unicode's private use area."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of a template that refuses a chat."""


class Piece(NamedTuple):
    """A part of a document.

    Attributes:
        text: Text of the piece.
        is_target: Whether the model learns to write the text, rather than to read it.
        label: Class of the piece; `NO_LABEL` for language modelling.
    """

    text: str
    is_target: bool
    label: int = NO_LABEL


Document = tuple[Piece, ...]
Span = tuple[int, int]
"""Character range of a text: start and stop."""


def render_chat(
    messages: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Render a chat as text.

    Args:
        messages: Messages with role and content.
        tokenizer: Tokenizer with the template.
        add_generation_prompt: Whether to append the header of an answer (generation prompt).
    """
    return ChatTemplate(tokenizer).text(
        Chat([dict(one) for one in messages]), add_generation_prompt=add_generation_prompt
    )


def marks_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template marks the assistant's text."""
    return _MARKED.search(tokenizer.get_chat_template()) is not None


class _Variant(NamedTuple):
    """A chat in a form that a template accepts.

    Attributes:
        chat: The chat.
        is_json: Whether the template writes all arguments of calls as JSON.
    """

    chat: Chat
    is_json: bool


class ChatTemplate:
    """Chat template of a model's tokenizer.

    Args:
        tokenizer: Tokenizer with the template.

    All methods raise one of `TEMPLATE_ERRORS` if the template refuses a chat, or if the learned
    part cannot be located.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._written: set[str] = set()

    def text(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        """Render a chat as `apply_chat_template` of transformers does."""
        messages: Any = list(chat.messages)
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._variables(chat),
            )
        )

    def prepare(self, chat: Chat) -> Chat:
        """Return the chat with calls and empty contents in the form that the template accepts.

        Raises:
            ValueError: The template omits tools, tool calls, or messages of a role.
        """
        chat = self._adapted(chat)
        self._check_is_written(chat)
        return chat

    def document(self, chat: Chat, *, assistant_only: bool) -> Document:
        """Return a `prepared` chat as text with its learned part."""
        text = self.text(chat)
        return _cut(text, self._learned(chat, text, assistant_only=assistant_only))

    def answer(
        self, prompt: Chat, completion: Chat, *, completion_only: bool, assistant_only: bool
    ) -> Document:
        """Return a prompt and its completion as text; the completion starts where the texts differ.

        The prompt ends with the header of an answer, as in TRL.
        """
        chat = self.prepare(prompt.concatenated(completion))
        text = self.text(chat)
        num_asking = len(prompt.messages)
        asking = self.text(
            chat._replace(messages=chat.messages[:num_asking]), add_generation_prompt=True
        )
        first = common_length(asking, text) if completion_only else 0
        spans = self._learned(chat, text, assistant_only=assistant_only)
        return _cut(text, [(max(first, start), stop) for start, stop in spans if stop > first])

    # ---- which part is learned

    def _learned(self, chat: Chat, text: str, *, assistant_only: bool) -> Sequence[Span]:
        if not assistant_only:
            return _between(self._spans_of_read(chat, text), len(text))
        if _MARKED.search(self._source(chat)):
            return self._marked(chat)
        return list(self._added(chat, text))

    def _marked(self, chat: Chat) -> list[Span]:
        """Return the spans that the template marks, except those of messages that are only read."""
        spans = self._marks(chat)
        unread: list[Span] = []
        for index in sorted(chat.context_indices):
            if chat.messages[index].get("role") == ASSISTANT:
                before, until = (
                    len(self._marks(_first(chat, count))) if count else 0
                    for count in (index, index + 1)
                )
                unread += spans[before:until]
        return [span for span in spans if span not in unread]

    def _marks(self, chat: Chat) -> list[Span]:
        messages: Any = [list(chat.messages)]
        variables = {**self._tokenizer.special_tokens_map, **self._variables(chat)}
        variables["chat_template"] = self._source(chat)
        _, spans = render_jinja_template(
            conversations=messages, return_assistant_tokens_mask=True, **variables
        )
        return [(start, stop) for start, stop in spans[0]]

    def _added(self, chat: Chat, text: str) -> Iterator[Span]:
        """Yield the text that each learned assistant message adds to its prompt."""
        for index, message in enumerate(chat.messages):
            if message.get("role") == ASSISTANT and index not in chat.context_indices:
                asking = self.text(_first(chat, index), add_generation_prompt=True) if index else ""
                until = self.text(_first(chat, index + 1))
                if until.startswith(asking) and text.startswith(until):
                    yield len(asking), len(until)
                else:
                    yield self._found(chat, index, text)

    def _found(self, chat: Chat, index: int, text: str) -> Span:
        """Return the span of a message in a chat that does not start with its own prefix.

        Some templates drop the thoughts of earlier turns, so a message is rendered differently as
        the last one. Replacing the message by a mark shows which part of the text depends on it.
        The span begins behind the header of the answer and ends with the end that the template
        writes after the last message.

        Raises:
            ValueError: The message cannot be located.
        """
        header = self._header(_first(chat, index))
        message = chat.messages[index]
        for other in ({"role": message["role"], "content": MARK}, {**message, "content": MARK}):
            messages = [*chat.messages[:index], other, *chat.messages[index + 1 :]]
            try:
                changed = self.text(chat._replace(messages=messages))
                *_, end = self.text(chat._replace(messages=messages[: index + 1])).partition(MARK)
            except TEMPLATE_ERRORS:
                continue
            first = common_length(text, changed)
            rest = min(len(text), len(changed)) - first
            last = len(text) - min(rest, common_length(text[::-1], changed[::-1]))
            start = _behind(header, text, first)
            if start is not None and end and text.startswith(end, last):
                return start, last + len(end)
        raise ValueError(
            "it renders the first messages of a chat differently than the whole chat, so the "
            "assistant's part cannot be found; put {% generation %} and {% endgeneration %} "
            "around it in a chat_template.jinja (TRL has such templates in trl/chat_templates), "
            "or leave --assistant-only-loss out"
        )

    def _header(self, chat: Chat) -> str:
        """Return the prompt for an answer to a chat."""
        if not chat.messages:
            return ""
        asking = self.text(chat, add_generation_prompt=True)
        return asking[common_length(asking, self.text(chat)) :]

    def _spans_of_read(self, chat: Chat, text: str) -> Iterator[Span]:
        """Yield the spans of messages that are only read."""
        for index in sorted(chat.context_indices):
            before = self.text(_first(chat, index)) if index else ""
            is_last = index + 1 == len(chat.messages)
            until = text if is_last else self.text(_first(chat, index + 1))
            if until.startswith(before) and text.startswith(until):
                yield len(before), len(until)
            elif chat.messages[index].get("role") == ASSISTANT:
                yield self._found(chat, index, text)
            else:
                raise ValueError(
                    "it renders the first messages of a chat differently than the whole chat, so a "
                    "message of weight 0 cannot be found; --assistant-only-loss handles it"
                )

    # ---- what the template takes

    def _variables(self, chat: Chat) -> dict[str, Any]:
        return {"tools": chat.tools, **chat.template_kwargs}

    def _source(self, chat: Chat) -> str:
        variables = self._variables(chat)
        template, tools = variables.get("chat_template"), variables.get("tools")
        return str(self._tokenizer.get_chat_template(template, tools))

    def _adapted(self, chat: Chat) -> Chat:
        """Return the first variant of a chat that the template renders in full, or the chat itself.

        Templates differ in two ways. Some accept `arguments` of a call as an object, others as JSON
        text (an object template would quote the text again). Some accept a message without content,
        as transformers passes it, others need an empty one. Text stays text where the template
        would write an object as JSON as well, because TRL and transformers pass it unchanged.
        """
        if not any("tool_calls" in message for message in chat.messages):
            return chat
        has_text = any(isinstance(one, str) for one in _arguments_in(chat))
        for with_content in (_same, _with_content):
            unchanged = self._variant(chat, with_content, _same)
            if unchanged and not has_text:
                return unchanged.chat
            as_object = self._variant(chat, with_content, _as_object)
            if unchanged and (
                not as_object or as_object.is_json or unchanged.chat == as_object.chat
            ):
                return unchanged.chat
            found = as_object or self._variant(chat, with_content, _as_text)
            if found:
                return found.chat
        return chat

    def changes_calls(self, chat: Chat) -> bool:
        """Whether the template receives calls or empty contents in a changed form."""
        return self._adapted(chat) != chat

    def _variant(
        self, chat: Chat, change: Callable[[Message], Message], convert: Callable[[object], object]
    ) -> _Variant | None:
        """Return a chat with converted arguments; None if the template does not render them."""
        messages = [_with_arguments(change(dict(one)), convert) for one in chat.messages]
        variant = chat._replace(messages=messages)
        try:
            text = self.text(variant)
        except TEMPLATE_ERRORS:
            return None
        arguments = list(_arguments_in(variant))
        if not all(_is_written(one, text) for one in arguments):
            return None
        return _Variant(variant, all(_as_text(one) in text for one in arguments))

    def _check_is_written(self, chat: Chat) -> None:
        """Refuse a chat if the template omits a part of it; each kind of part is tried once.

        transformers and TRL omit such parts silently.
        """
        for name, make_without in _parts_of(chat):
            if name not in self._written and not self.is_changed_by(chat, make_without()):
                raise ValueError(f"it omits {name}; a chat_template.jinja can write them")
            self._written.add(name)

    def is_changed_by(self, chat: Chat, without: Chat) -> bool:
        """Whether the text of a chat changes without a part of it."""
        text = self.text(chat)
        try:
            return self.text(without) != text
        except TEMPLATE_ERRORS:
            return True


def _first(chat: Chat, count: int) -> Chat:
    return chat._replace(messages=chat.messages[:count])


def _parts_of(chat: Chat) -> Iterator[tuple[str, Callable[[], Chat]]]:
    """Yield the name of each part of a chat with a function that removes it."""
    if chat.tools:
        name = "'tools' (--remove-columns tools trains without them)"
        yield name, lambda: chat._replace(tools=None)
    if any("tool_calls" in message for message in chat.messages):
        yield "'tool_calls'", lambda: chat.without_key("tool_calls")
    roles = dict.fromkeys(one["role"] for one in chat.messages if one.get("content"))
    for role in roles:
        yield f"messages of '{role}'", functools.partial(chat.without_role, role)


# ---- spans


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts or token lists."""
    if second[: len(first)] == first:  # the usual case, without a loop
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (one, other) in pairs if one != other), shorter)


def _behind(header: str, text: str, until: int) -> int | None:
    """Return the end of the last header before `until`, or of the header's first line.

    Headers may begin a thought on further lines, which earlier turns may lack.
    """
    for part in (header, header.partition("\n")[0] + "\n"):
        place = text.rfind(part, 0, until) if part.strip() else -1
        if place >= 0:
            return place + len(part)
    return None


def _cut(text: str, spans: Sequence[Span]) -> Document:
    """Return the text as pieces; those at `spans`, in order, are targets."""
    pieces, at = [], 0
    for start, stop in spans:
        pieces += [Piece(text[at:start], False), Piece(text[start:stop], True)]
        at = stop
    return tuple(piece for piece in (*pieces, Piece(text[at:], False)) if piece.text)


def _between(spans: Iterator[Span], length: int) -> list[Span]:
    """Return the gaps between ordered spans in a text of this length."""
    found, at = [], 0
    for start, stop in spans:
        found.append((at, start))
        at = stop
    return [(start, stop) for start, stop in (*found, (at, length)) if start < stop]


# ---- tool calls


def _functions_of(message: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the objects with `name` and `arguments` of a message's calls."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function


def _arguments_in(chat: Chat) -> Iterator[object]:
    for message in chat.messages:
        for function in _functions_of(message):
            yield function.get("arguments")


def _is_written(arguments: object, text: str) -> bool:
    """Whether arguments appear as JSON: text unquoted, an object not as Python's repr."""
    if isinstance(arguments, str):
        return arguments in text and json.dumps(arguments, ensure_ascii=False) not in text
    return not (isinstance(arguments, dict) and arguments) or str(arguments) not in text


def _with_arguments(message: Message, convert: Callable[[object], object]) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    message["tool_calls"] = [_call_with(call, convert) for call in calls]
    return message


def _call_with(call: object, convert: Callable[[object], object]) -> object:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with(call["function"], convert)}
    return {**call, "arguments": convert(call.get("arguments", {}))}


def _as_object(arguments: object) -> object:
    found = parse_json(arguments) if isinstance(arguments, str) else arguments
    return arguments if found is None else found


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _same(value: Any) -> Any:  # noqa: ANN401
    return value


def _with_content(message: Message) -> Message:
    return {"content": "", **message}
