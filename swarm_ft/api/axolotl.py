"""Axolotl's names of options, its defaults, and the row types of its datasets.

`api/arguments.py` decides on axolotl's other keys. Source: axolotl's `src/axolotl/utils/schemas`
and `core/builders`, at 067b021 (July 2026).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from swarm_ft.api.arguments import CUSTOM_CODE, OFF, TEMPLATE, shown
from swarm_ft.protocol.spec.options import suggestion

RENAMED = {
    "base_model": "model",
    "sequence_len": "seq_length",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "lr_scheduler": "lr_schedule",
    "max_grad_norm": "clip_grad_norm",
    "optimizer": "optim",
    "lora_target_modules": "target_modules",
    "sample_packing": "packing",
    "val_set_size": "eval_size",
    "output_dir": "out",
    "hub_model_id": "push_to_hub",
}
"""Field names of options, by axolotl's key for the same option."""
PLUGINS_WITHOUT_EFFECT = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin")
DEFAULTS = {
    "epochs": ("num_epochs", "1"),
    "lr_schedule": ("lr_scheduler", "cosine"),
    "warmup_ratio": ("warmup_ratio", "0.03, of 100 steps at most"),
    "seq_length": ("sequence_len", "512"),
    "batch_size": ("gradient_accumulation_steps", "1, of micro_batch_size samples"),
    "truncation": ("excess_length_strategy", "drop"),
    "shuffle": ("shuffle", "true"),
}
"""Axolotl's key and default, by field, where our default differs."""


# ---- datasets


class RowType(NamedTuple):
    """The meaning of a dataset's `type` for its rows.

    Attributes:
        loss_option: Option that `train_on_inputs` sets for such rows; empty if the loss covers all.
        roles: Columns that such rows must have, see `--column`.
        is_text: Whether a row is one text.
    """

    loss_option: str = ""
    roles: tuple[str, ...] = ()
    is_text: bool = False


_CHAT = RowType(loss_option="assistant_only_loss", roles=("messages",))
_TEXT = RowType(is_text=True)
ROW_TYPES = {
    "completion": _TEXT,
    "chat_template": _CHAT,
    "alpaca": RowType(loss_option="completion_only_loss", roles=("instruction", "output")),
    "pretraining": _TEXT,
    "pretrain": _TEXT,
    "chat_template.default": _CHAT,
}
ROLES = {"human": "user", "gpt": "assistant"}
"""Names of roles, by their names in axolotl's own mapping."""
COLUMNS = {"field_messages": "messages", "field_tools": "tools", "field_system": "system"}
"""Roles of columns, by an entry's key that names the column."""
MESSAGE_KEYS = (("role", "content"), ("from", "value"))
"""Allowed pairs of keys for a message's role and content."""


def row_problem(name: str, value: Any, known: Iterable[str]) -> str:
    """Return the reason to refuse a key of an entry of `datasets`; empty if it is allowed.

    Args:
        name: Name of the key.
        value: Value of the key, never None.
        known: Other keys; the message suggests the nearest one.
    """
    if value in OFF and name != "roles_to_train":
        return ""
    check = _ENTRY_KEYS.get(name)
    if check is not None:
        return check(value)
    return f"no such key{suggestion(name, [*known, *_ENTRY_KEYS])}"


def _roles_to_train(value: Any) -> str:
    names = value if isinstance(value, list) else [value]
    roles = {ROLES.get(name, name) for name in names if isinstance(name, str)}
    if roles == {"assistant"} and len(names) == 1:
        return ""
    return f"expected [assistant], got {shown(value)}; train_on_inputs: true trains on all roles"


def _one_of(*expected: Any) -> Callable[[Any], str]:
    words = " or ".join(map(str, expected))
    return lambda value: "" if value in expected else f"expected {words}, got {shown(value)}"


def _mappings(value: Any) -> str:
    keys = (value.get("role"), value.get("content")) if isinstance(value, dict) else ()
    if keys in MESSAGE_KEYS and len(value) == len(keys):
        return ""
    return (
        "expected role: role and content: content, or role: from and content: value, "
        f"got {shown(value)}"
    )


def _template(value: Any) -> str:
    return "" if str(value).startswith("tokenizer_default") else TEMPLATE


def _refused(words: str) -> Callable[[Any], str]:
    return lambda _value: words


_ENTRY_KEYS: dict[str, Callable[[Any], str]] = {
    "roles_to_train": _roles_to_train,
    "train_on_eos": _one_of("turn"),
    "train_on_eot": _one_of("turn"),
    "message_property_mappings": _mappings,
    "message_field_role": _one_of("role", "from"),
    "message_field_content": _one_of("content", "value"),
    "message_field_training": _one_of("train", "training", "trainable", "weight"),
    "message_field_training_detail": _refused("the loss covers whole messages only"),
    "chat_template": _template,
    "chat_template_jinja": _refused(TEMPLATE),
    "field_thinking": _one_of("reasoning_content"),
    "template_thinking_key": _one_of("reasoning_content"),
    "split_thinking": _refused("the template gets messages without changes"),
    "drop_system_message": _refused("the template gets messages without changes"),
    "roles": _refused("the template gets roles by axolotl's default names"),
    "shards": _refused("max_samples: N takes the first N samples"),
    "shards_idx": _refused("max_samples: N takes the first N samples"),
    "data_files": _refused("path: takes a file or a directory of files"),
    "revision": _refused("the client reads a dataset's newest revision"),
    "trust_remote_code": _refused(CUSTOM_CODE),
}
