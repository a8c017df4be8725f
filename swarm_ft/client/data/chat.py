"""A chat as its model's template writes it, and which part of that is learned.

A template may mark what the model writes, between `{% generation %}` and `{% endgeneration %}`; few
do. In others it is what a message of the assistant adds to the text that asks for it. That is known
only where a template writes the beginning of a chat as it writes the chat's beginning; a template
that does not (it leaves out earlier turns' thoughts, say) is refused.
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
"""A text that no chat has: letters of Unicode's private use."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of a template that does not take a chat."""


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
Span = tuple[int, int]
"""Places in a text: the first character, and the one behind the last."""


def rendered(
    messages: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_asking: bool = False,
) -> str:
    """A chat as text.

    Args:
        messages: each with role and content.
        tokenizer: whose template it is.
        is_asking: whether what stands in front of an answer follows.
    """
    return ChatTemplate(tokenizer).text(Chat([dict(one) for one in messages]), is_asking=is_asking)


def marks_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template marks what the assistant writes."""
    return _MARKED.search(tokenizer.get_chat_template()) is not None


class _Variant(NamedTuple):
    """A chat as a template takes it.

    Attributes:
        is_json: whether the template writes all arguments of calls as JSON.
    """

    chat: Chat
    is_json: bool


class ChatTemplate:
    """The chat template of a model's tokenizer.

    Args:
        tokenizer: whose template it is.

    All methods raise one of `TEMPLATE_ERRORS` where the template does not take a chat, or where the
    learned part of it cannot be found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._written: set[str] = set()

    def text(self, chat: Chat, *, is_asking: bool = False) -> str:
        """A chat as text, as `apply_chat_template` of transformers writes it."""
        messages: Any = list(chat.messages)
        return str(
            self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=is_asking,
                **self._variables(chat),
            )
        )

    def prepared(self, chat: Chat) -> Chat:
        """The chat with calls and missing contents as the template takes them.

        Raises:
            ValueError: the template leaves out tools, tool calls, or messages of a role.
        """
        chat = self._adapted(chat)
        self._check_is_written(chat)
        return chat

    def document(self, chat: Chat, *, assistant_only: bool) -> Document:
        """A chat that was `prepared`, as text with its learned part."""
        text = self.text(chat)
        return _cut(text, self._learned(chat, text, assistant_only=assistant_only))

    def answer(
        self, prompt: Chat, completion: Chat, *, completion_only: bool, assistant_only: bool
    ) -> Document:
        """A chat in two parts; the completion begins where the chat departs from its prompt.

        As in TRL, the prompt ends by asking for an answer.
        """
        chat = self.prepared(prompt.followed_by(completion))
        text = self.text(chat)
        num_asking = len(prompt.messages)
        asking = self.text(chat._replace(messages=chat.messages[:num_asking]), is_asking=True)
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
        """Find the spans that the template marks, without messages that are only read."""
        spans = self._marks(chat)
        unread: list[Span] = []
        for index in sorted(chat.only_read):
            if chat.messages[index].get("role") == ASSISTANT:
                before, until = (
                    len(self._marks(_first(chat, count))) if count else 0
                    for count in (index, index + 1)
                )
                unread += spans[before:until]
        return [span for span in spans if span not in unread]

    def _marks(self, chat: Chat) -> list[Span]:
        messages: Any = [list(chat.messages)]
        given = {**self._tokenizer.special_tokens_map, **self._variables(chat)}
        given["chat_template"] = self._source(chat)
        _, spans = render_jinja_template(
            conversations=messages, return_assistant_tokens_mask=True, **given
        )
        return [(start, stop) for start, stop in spans[0]]

    def _added(self, chat: Chat, text: str) -> Iterator[Span]:
        """What each message of the assistant that is learned adds to the text that asks for it."""
        for index, message in enumerate(chat.messages):
            if message.get("role") == ASSISTANT and index not in chat.only_read:
                asking = self.text(_first(chat, index), is_asking=True) if index else ""
                until = self.text(_first(chat, index + 1))
                if until.startswith(asking) and text.startswith(until):
                    yield len(asking), len(until)
                else:
                    yield self._found(chat, index, text)

    def _found(self, chat: Chat, index: int, text: str) -> Span:
        """A message's place in a chat of which the template writes the beginning otherwise.

        Some templates leave out the thoughts of earlier turns, so a message is written in one way
        as the last one and in another one in front of others. Another message in its place shows
        which part of the text depends on it. The message begins behind the header that asks for it,
        and goes on until the end that the template puts behind the last message.

        Raises:
            ValueError: it is not found so.
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
            "it writes a chat's beginning otherwise than the chat, so the assistant's part cannot "
            "be found; put {% generation %} and {% endgeneration %} around it in a "
            "chat_template.jinja (TRL has such templates in trl/chat_templates), or leave "
            "--assistant-only-loss out"
        )

    def _header(self, chat: Chat) -> str:
        """Return the text that asks for an answer to a chat."""
        if not chat.messages:
            return ""
        asking = self.text(chat, is_asking=True)
        return asking[common_length(asking, self.text(chat)) :]

    def _spans_of_read(self, chat: Chat, text: str) -> Iterator[Span]:
        """The whole text of each message that is only read."""
        for index in sorted(chat.only_read):
            before = self.text(_first(chat, index)) if index else ""
            is_last = index + 1 == len(chat.messages)
            until = text if is_last else self.text(_first(chat, index + 1))
            if until.startswith(before) and text.startswith(until):
                yield len(before), len(until)
            elif chat.messages[index].get("role") == ASSISTANT:
                yield self._found(chat, index, text)
            else:
                raise ValueError(
                    "it writes a chat's beginning otherwise than the chat, so a message that is "
                    "only read (its weight is 0) cannot be found; --assistant-only-loss reads it"
                )

    # ---- what the template takes

    def _variables(self, chat: Chat) -> dict[str, Any]:
        return {"tools": chat.tools, **chat.template_kwargs}

    def _source(self, chat: Chat) -> str:
        variables = self._variables(chat)
        template, tools = variables.get("chat_template"), variables.get("tools")
        return str(self._tokenizer.get_chat_template(template, tools))

    def _adapted(self, chat: Chat) -> Chat:
        """The first variant of a chat that the template writes in full; the chat itself if none.

        Templates differ in what they take: `arguments` of a call as an object or as JSON text (one
        that takes an object would quote the text once more), and a message without content as
        transformers gives it, or with an empty one. Text stays text where a template would write
        the object as JSON, too: TRL and transformers give it as it is.
        """
        if not any("tool_calls" in message for message in chat.messages):
            return chat
        has_text = any(isinstance(one, str) for one in _arguments_in(chat))
        for with_content in (_same, _with_content):
            as_given = self._variant(chat, with_content, _same)
            if as_given and not has_text:
                return as_given.chat
            as_object = self._variant(chat, with_content, _as_object)
            if as_given and (not as_object or as_object.is_json or as_given.chat == as_object.chat):
                return as_given.chat
            found = as_object or self._variant(chat, with_content, _as_text)
            if found:
                return found.chat
        return chat

    def changes_calls(self, chat: Chat) -> bool:
        """Whether the template gets calls or missing contents otherwise than the chat has them."""
        return self._adapted(chat) != chat

    def _variant(
        self, chat: Chat, change: Callable[[Message], Message], convert: Callable[[object], object]
    ) -> _Variant | None:
        """A chat with other arguments; None if the template does not write them."""
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
        """Refuse a chat of which the template leaves out a part; each kind of part is tried once.

        transformers and TRL leave it out without a word.
        """
        for name, make_without in _parts_of(chat):
            if name not in self._written and not self.is_changed_by(chat, make_without()):
                raise ValueError(f"it leaves out {name}; a chat_template.jinja can write them")
            self._written.add(name)

    def is_changed_by(self, chat: Chat, without: Chat) -> bool:
        """Whether the text of a chat is another one without a part of it."""
        text = self.text(chat)
        try:
            return self.text(without) != text
        except TEMPLATE_ERRORS:
            return True


def _first(chat: Chat, count: int) -> Chat:
    return chat._replace(messages=chat.messages[:count])


def _parts_of(chat: Chat) -> Iterator[tuple[str, Callable[[], Chat]]]:
    """Names of what a chat is made of, and for each how to make the chat without it."""
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
    """Count the letters, or tokens, that both begin by."""
    if second[: len(first)] == first:  # as a rule; it spares a loop
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (one, other) in pairs if one != other), shorter)


def _behind(header: str, text: str, until: int) -> int | None:
    """The place behind the last header in front of a place, or behind its first line alone.

    Where headers begin a thought in further lines, those may be missing in earlier turns.
    """
    for part in (header, header.partition("\n")[0] + "\n"):
        place = text.rfind(part, 0, until) if part.strip() else -1
        if place >= 0:
            return place + len(part)
    return None


def _cut(text: str, spans: Sequence[Span]) -> Document:
    """The text as pieces, of which those at `spans`, in order, are learned."""
    pieces, at = [], 0
    for start, stop in spans:
        pieces += [Piece(text[at:start], False), Piece(text[start:stop], True)]
        at = stop
    return tuple(piece for piece in (*pieces, Piece(text[at:], False)) if piece.text)


def _between(spans: Iterator[Span], length: int) -> list[Span]:
    """Return the gaps between spans, in order, of a text of this length."""
    found, at = [], 0
    for start, stop in spans:
        found.append((at, start))
        at = stop
    return [(start, stop) for start, stop in (*found, (at, length)) if start < stop]


# ---- tool calls


def _functions_of(message: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The objects of a message's calls that have `name` and `arguments`."""
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
    """Whether a template wrote arguments as JSON: text as it is, an object not by Python's repr."""
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


def _same(given: Any) -> Any:  # noqa: ANN401
    return given


def _with_content(message: Message) -> Message:
    return {"content": "", **message}
