"""Messages of a chat in the shapes that people have, as chat templates take them.

OpenAI's (`role`, `content`, `tool_calls`), ShareGPT's (`from`, `value`) and content in parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from swarm_ft.client.data.columns import Fields, flag_of, is_empty
from swarm_ft.client.data.rows import kind_of
from swarm_ft.errors import BadDataset

Message = dict[str, object]
Messages = Sequence[Message]

ASSISTANT = "assistant"
FUNCTION_CALL = "function_call"
ROLE_OF = {
    **{name: name for name in ("system", "user", ASSISTANT, "tool", FUNCTION_CALL)},
    "human": "user",
    "prompter": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool_call": FUNCTION_CALL,
}
"""Roles by the names of ShareGPT's `from`, in small letters; other names stay as they are."""
FLAGS = ("weight", "loss_weight", "loss", "train", "training", "trainable", "train_on_turn")
"""Keys of a message that say whether it is learned: OpenAI's and Mistral's `weight`, LLaMA-Factory
v1's `loss_weight`, `loss` of ms-swift and xtuner, and those that axolotl's files have."""
_MEDIA = "holds media, and a swarm trains on text alone"
_MASK = "says which of it is learned in a way that a swarm does not read"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    **dict.fromkeys(("mask", "loss_scale", "train_detail", "training_detail"), _MASK),
    **dict.fromkeys(("label", "labels"), "tells good answers from bad ones"),
    **dict.fromkeys(("chosen", "rejected"), "compares answers (preference data)"),
}
"""Keys of a message that change its meaning, and why a message that has one is refused."""
PART_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "tool_call": "tool_call",
}
"""Types of parts that are text: OpenAI's (of both its interfaces) and LLaMA-Factory v1's."""


class Chat(NamedTuple):
    """A chat as a template takes it.

    Attributes:
        messages: each with `role`, and `content` or `tool_calls`; without nulls.
        only_read: places of messages that are not learned.
        tools: functions that the model may call; None if there are none.
        template_kwargs: further variables of the template.
    """

    messages: Messages
    only_read: frozenset[int] = frozenset()
    tools: Sequence[object] | None = None
    template_kwargs: Mapping[str, object] = {}

    def without_role(self, role: object) -> Chat:
        """The chat without the messages of a role."""
        return self._replace(messages=[one for one in self.messages if one["role"] != role])

    def without_key(self, key: str) -> Chat:
        """The chat without one of its messages' keys."""
        lacking = [{name: v for name, v in one.items() if name != key} for one in self.messages]
        return self._replace(messages=lacking)

    def followed_by(self, other: Chat) -> Chat:
        """This chat and, behind it, the messages of another one."""
        behind = (len(self.messages) + index for index in other.only_read)
        return self._replace(
            messages=[*self.messages, *other.messages],
            only_read=self.only_read.union(behind),
        )


def chat_in(fields: Fields, role: str, *, with_system: bool = True) -> Chat:
    """The chat of a row, with the row's system message, tools and variables of the template.

    Args:
        fields: of the row.
        role: whose value is the list of messages.
        with_system: whether the row's system message goes in front.

    Raises:
        BadDataset: the messages are malformed, or one has a key that cannot be honoured.
    """
    messages, learned = [], []
    removed = _removed_keys(fields, role)
    for given in _list_of(fields, role):
        message, is_learned = _message_of(fields, given, removed)
        messages.append(message)
        learned.append(is_learned)
    system = fields.optional_text("system") if with_system else ""
    if system:
        if messages[0]["role"] == "system":
            raise BadDataset(
                f"{fields.place}: {fields.columns.words('system')} stands beside a first message "
                "of the system's; --remove-columns system trains without it"
            )
        messages, learned = [{"role": "system", "content": system}, *messages], [True, *learned]
    return Chat(
        messages=messages,
        only_read=frozenset(index for index, is_learned in enumerate(learned) if not is_learned),
        tools=_tools_of(fields),
        template_kwargs=_template_kwargs_of(fields),
    )


def renamed_roles(fields: Fields, role: str) -> dict[str, str]:
    """Names of ShareGPT's `from` in a row, with the template's role where that is another name."""
    messages = _list_of(fields, role)
    names = [one["from"] for one in messages if isinstance(one, Mapping) and one.get("from")]
    roles = {str(name): ROLE_OF.get(str(name).lower(), str(name)) for name in names}
    return {name: to for name, to in roles.items() if to != name}


def _list_of(fields: Fields, role: str) -> list[object]:
    messages = fields.get(role)
    if not isinstance(messages, list) or not messages:
        raise BadDataset(
            f"{fields.place}: expected {fields.columns.words(role)} to be a list of at least one, "
            f"got {kind_of(messages) if messages != [] else 'an empty one'}"
        )
    return messages


class _RemovedKeys(NamedTuple):
    """Keys of messages that the user removes, and what `--remove-columns` puts in front of them."""

    prefix: str
    keys: frozenset[str]


def _removed_keys(fields: Fields, role: str) -> _RemovedKeys:
    prefix = f"{fields.columns.columns_of(role)[0]}."
    names = (name for name in fields.columns.removed if name.startswith(prefix))
    return _RemovedKeys(prefix, frozenset(name.removeprefix(prefix) for name in names))


def _message_of(fields: Fields, given: object, removed: _RemovedKeys) -> tuple[Message, bool]:
    """A message, and whether it is learned."""
    if not isinstance(given, Mapping):
        raise BadDataset(
            f"{fields.place}: expected messages with 'role' and 'content', got {kind_of(given)}"
        )
    message = {key: v for key, v in given.items() if v is not None and key not in removed.keys}
    for key in message.keys() & REASONS.keys():
        if not is_empty(message[key]):
            raise BadDataset(
                f"{fields.place}: '{key}' of a message {REASONS[key]}; --remove-columns "
                f"{removed.prefix}{key} trains without it"
            )
    flags = [
        flag_of(message.pop(key), key, fields.place, removed.prefix)
        for key in FLAGS
        if key in message
    ]
    return _normalised(fields.place, message), all(flags)


def _normalised(place: str, message: Message) -> Message:
    """A message by OpenAI's names, its content a text."""
    if "role" not in message and "from" in message:
        role = message.pop("from")
        message["role"] = ROLE_OF.get(str(role).lower(), role)
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if isinstance(message.get("content"), list):
        _join_parts(place, message)
    if message.get("role") == FUNCTION_CALL:
        message["role"] = ASSISTANT
        message["tool_calls"] = _calls_in(place, message.pop("content", None))
    function = message.pop(FUNCTION_CALL, None)  # OpenAI's, before there were tools
    if not is_empty(function):
        message["tool_calls"] = _calls_in(place, function)
    _check_calls(place, message)
    for name in ("role", "content"):
        may_lack = name == "content" and name not in message and "tool_calls" in message
        if not may_lack and not isinstance(message.get(name), str):
            raise BadDataset(
                f"{place}: expected messages with 'role' and 'content', both text; "
                f"'{name}' of one is {kind_of(message.get(name))}"
            )
    return message


def _join_parts(place: str, message: Message) -> None:
    """Put the text of all parts in place of a list of parts; calls and reasoning beside it.

    Parts are OpenAI's `{"type": "text", "text": ...}`, or LLaMA-Factory v1's with `value`.
    """
    texts: dict[str, list[str]] = {"text": [], "reasoning": [], "tool_call": []}
    parts = message.pop("content")
    for part in parts if isinstance(parts, list) else ():
        kind, text = _part_of(place, part)
        texts[kind].append(text)
    calls = [call for text in texts["tool_call"] for call in _calls_in(place, text)]
    if calls:
        before = message.get("tool_calls")
        message["tool_calls"] = [*(before if isinstance(before, list) else ()), *calls]
    if texts["reasoning"]:
        message["reasoning_content"] = "".join(texts["reasoning"])
    if texts["text"] or "tool_calls" not in message:
        message["content"] = "".join(texts["text"])


def _part_of(place: str, part: object) -> tuple[str, str]:
    """The kind of a part of a message, and its text."""
    if not isinstance(part, Mapping):
        raise BadDataset(
            f"{place}: expected parts of 'content' with 'type' and 'text', got {kind_of(part)}"
        )
    given = "text" if part.keys() == {"text"} else part.get("type")
    kind, text = PART_KINDS.get(str(given)), part.get("text", part.get("value"))
    if kind is None:
        raise BadDataset(
            f"{place}: a part of 'content' is of type {given!a:.40}; a swarm trains on text alone"
        )
    if not isinstance(text, str):
        raise BadDataset(f"{place}: expected a part's 'text' to be text, got {kind_of(text)}")
    return kind, text


def _calls_in(place: str, text: object) -> list[object]:
    """Tool calls of a text: one as a JSON object, or an array of them."""
    calls = parse_json(text) if isinstance(text, str) else text
    many = calls if isinstance(calls, list) else [calls]
    if not many or not all(isinstance(one, Mapping) and "name" in one for one in many):
        raise BadDataset(
            f"{place}: expected a tool call as a JSON object with 'name' and 'arguments', got "
            f"{text!a:.80}"
        )
    return [_call_of(one) for one in many]


def _call_of(function: object) -> object:
    return {"type": "function", "function": function}


def _check_calls(place: str, message: Message) -> None:
    given = message.pop("tool_calls", None)
    if is_empty(given):
        return  # left out: templates take an empty list for a call
    calls = parse_json(given) if isinstance(given, str) else given
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise BadDataset(f"{place}: expected 'tool_calls' to be a list of objects")
    message["tool_calls"] = calls


def _tools_of(fields: Fields) -> list[object] | None:
    """The tools of a row: a list, or JSON text of one."""
    given = fields.get("tools")
    tools = parse_json(given) if isinstance(given, str) and given else given
    functions = fields.get("functions")  # OpenAI's, before there were tools
    if is_empty(tools) and isinstance(functions, list):
        tools = [_call_of(function) for function in functions]
    if is_empty(tools) and (is_empty(given) or tools is not None):
        return None
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) for one in tools):
        raise BadDataset(
            f"{fields.place}: expected {fields.columns.words('tools')} to be a list of objects, or "
            f"JSON text of one, got {given!a:.80}"
        )
    return tools


def _template_kwargs_of(fields: Fields) -> dict[str, object]:
    given = fields.get("chat_template_kwargs")
    if is_empty(given):
        return {}
    if not isinstance(given, Mapping):
        raise BadDataset(
            f"{fields.place}: expected {fields.columns.words('chat_template_kwargs')} to be an "
            f"object, got {kind_of(given)}"
        )
    return {str(name): value for name, value in given.items() if value is not None}


def parse_json(text: str) -> object:
    """Parse a JSON text; None if it is not JSON."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found
