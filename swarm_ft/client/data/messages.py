"""Chat messages in common formats, converted to the form of chat templates.

Formats: OpenAI's (`role`, `content`, `tool_calls`), ShareGPT's (`from`, `value`), and content in
parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from swarm_ft.client.data.columns import Fields, flag_of, is_empty
from swarm_ft.client.data.rows import describe_type
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
"""Roles by the names of ShareGPT's `from`, in lower case; other names stay unchanged."""
FLAGS = ("weight", "loss_weight", "loss", "train", "training", "trainable", "train_on_turn")
"""Keys of a message that switch its learning: `weight` of OpenAI and Mistral, `loss_weight` of
LLaMA-Factory v1, `loss` of ms-swift and xtuner, and those in axolotl's files."""
_MEDIA = "holds media, and a swarm trains on text only"
_MASK = "marks its learned part in a way that a swarm does not support"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    **dict.fromkeys(("mask", "loss_scale", "train_detail", "training_detail"), _MASK),
    **dict.fromkeys(("label", "labels"), "marks good and bad answers"),
    **dict.fromkeys(("chosen", "rejected"), "holds preference data"),
}
"""Keys of a message that change its meaning, with the reason why such a message is refused."""
PART_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "tool_call": "tool_call",
}
"""Kinds of text parts by type: OpenAI's (both of its interfaces) and LLaMA-Factory v1's."""


class Chat(NamedTuple):
    """A chat in the form of chat templates.

    Attributes:
        messages: Messages with `role`, and `content` or `tool_calls`; without null values.
        context_indices: Indices of messages that are not learned.
        tools: Functions that the model may call; None without any.
        template_kwargs: Further variables of the template.
    """

    messages: Messages
    context_indices: frozenset[int] = frozenset()
    tools: Sequence[object] | None = None
    template_kwargs: Mapping[str, object] = {}

    def without_role(self, role: object) -> Chat:
        """Return the chat without the messages of a role."""
        return self._replace(messages=[one for one in self.messages if one["role"] != role])

    def without_key(self, key: str) -> Chat:
        """Return the chat without a key of its messages."""
        lacking = [{name: v for name, v in one.items() if name != key} for one in self.messages]
        return self._replace(messages=lacking)

    def concatenated(self, other: Chat) -> Chat:
        """Return this chat with the messages of another one appended."""
        behind = (len(self.messages) + index for index in other.context_indices)
        return self._replace(
            messages=[*self.messages, *other.messages],
            context_indices=self.context_indices.union(behind),
        )


def chat_in(fields: Fields, role: str, *, with_system: bool = True) -> Chat:
    """Return the chat of a row with its system message, tools and template variables.

    Args:
        fields: The row.
        role: Role of the list of messages.
        with_system: Whether to prepend the row's system message.

    Raises:
        BadDataset: The messages are malformed, or have a key that cannot be honoured.
    """
    messages, learned = [], []
    removed = _removed_keys(fields, role)
    for value in _list_of(fields, role):
        message, is_learned = _message_of(fields, value, removed)
        messages.append(message)
        learned.append(is_learned)
    system = fields.optional_text("system") if with_system else ""
    if system:
        if messages[0]["role"] == "system":
            raise BadDataset(
                f"{fields.place}: {fields.columns.describe('system')} and the first message "
                "are both "
                "system messages; --remove-columns system trains without the column"
            )
        messages, learned = [{"role": "system", "content": system}, *messages], [True, *learned]
    return Chat(
        messages=messages,
        context_indices=frozenset(
            index for index, is_learned in enumerate(learned) if not is_learned
        ),
        tools=_tools_of(fields),
        template_kwargs=_template_kwargs_of(fields),
    )


def renamed_roles(fields: Fields, role: str) -> dict[str, str]:
    """Return ShareGPT's names in a row that differ from the template's roles, with these roles."""
    messages = _list_of(fields, role)
    names = [one["from"] for one in messages if isinstance(one, Mapping) and one.get("from")]
    roles = {str(name): ROLE_OF.get(str(name).lower(), str(name)) for name in names}
    return {name: to for name, to in roles.items() if to != name}


def _list_of(fields: Fields, role: str) -> list[object]:
    messages = fields.get(role)
    if not isinstance(messages, list) or not messages:
        raise BadDataset(
            f"{fields.place}: expected {fields.columns.describe(role)} to be a list of at "
            "least one, "
            f"got {describe_type(messages) if messages != [] else 'an empty one'}"
        )
    return messages


class _RemovedKeys(NamedTuple):
    """Keys of messages that the user removed, and their prefix in `--remove-columns`."""

    prefix: str
    keys: frozenset[str]


def _removed_keys(fields: Fields, role: str) -> _RemovedKeys:
    prefix = f"{fields.columns.columns_of(role)[0]}."
    names = (name for name in fields.columns.removed if name.startswith(prefix))
    return _RemovedKeys(prefix, frozenset(name.removeprefix(prefix) for name in names))


def _message_of(fields: Fields, value: object, removed: _RemovedKeys) -> tuple[Message, bool]:
    """Return a message and whether it is learned."""
    if not isinstance(value, Mapping):
        raise BadDataset(
            f"{fields.place}: expected messages with 'role' and 'content', "
            f"got {describe_type(value)}"
        )
    message = {key: v for key, v in value.items() if v is not None and key not in removed.keys}
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
    """Return a message with OpenAI's keys and with text as its content."""
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
    function = message.pop(FUNCTION_CALL, None)  # OpenAI's older form of tool calls
    if not is_empty(function):
        message["tool_calls"] = _calls_in(place, function)
    _check_calls(place, message)
    for name in ("role", "content"):
        may_lack = name == "content" and name not in message and "tool_calls" in message
        if not may_lack and not isinstance(message.get(name), str):
            raise BadDataset(
                f"{place}: expected messages with 'role' and 'content', both text; "
                f"'{name}' of one is {describe_type(message.get(name))}"
            )
    return message


def _join_parts(place: str, message: Message) -> None:
    """Replace a list of parts by their joined text; move calls and reasoning to their own keys.

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
    """Return the kind of a part and its text."""
    if not isinstance(part, Mapping):
        raise BadDataset(
            f"{place}: expected parts of 'content' with 'type' and 'text', "
            f"got {describe_type(part)}"
        )
    type_name = "text" if part.keys() == {"text"} else part.get("type")
    kind, text = PART_KINDS.get(str(type_name)), part.get("text", part.get("value"))
    if kind is None:
        raise BadDataset(
            f"{place}: a part of 'content' has type {type_name!a:.40}; a swarm trains on text only"
        )
    if not isinstance(text, str):
        raise BadDataset(f"{place}: expected a part's 'text' to be text, got {describe_type(text)}")
    return kind, text


def _calls_in(place: str, text: object) -> list[object]:
    """Return the tool calls in a JSON object or array."""
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
    value = message.pop("tool_calls", None)
    if is_empty(value):
        return  # the key is omitted, because templates treat an empty list as a call
    calls = parse_json(value) if isinstance(value, str) else value
    if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
        raise BadDataset(f"{place}: expected 'tool_calls' to be a list of objects")
    message["tool_calls"] = calls


def _tools_of(fields: Fields) -> list[object] | None:
    """Return the tools of a row: a list, or JSON text of a list."""
    value = fields.get("tools")
    tools = parse_json(value) if isinstance(value, str) and value else value
    functions = fields.get("functions")  # OpenAI's older form of tools
    if is_empty(tools) and isinstance(functions, list):
        tools = [_call_of(function) for function in functions]
    if is_empty(tools) and (is_empty(value) or tools is not None):
        return None
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) for one in tools):
        raise BadDataset(
            f"{fields.place}: expected {fields.columns.describe('tools')} to be a list of "
            "objects, or "
            f"JSON text of one, got {value!a:.80}"
        )
    return tools


def _template_kwargs_of(fields: Fields) -> dict[str, object]:
    variables = fields.get("chat_template_kwargs")
    if is_empty(variables):
        return {}
    if not isinstance(variables, Mapping):
        raise BadDataset(
            f"{fields.place}: expected {fields.columns.describe('chat_template_kwargs')} to be an "
            f"object, got {describe_type(variables)}"
        )
    return {str(name): value for name, value in variables.items() if value is not None}


def parse_json(text: str) -> object:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found
