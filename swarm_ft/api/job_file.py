"""Reading and writing of jobs in YAML; `api/translation.py` translates the keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from swarm_ft.api.axolotl import RENAMED
from swarm_ft.client.formatting import printable
from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import OptionField, option_fields

MAX_FILE_BYTES = 1 << 20
LINE_SEPARATORS = "\x85\u2028\u2029"
"""Unicode's line separators beside the usual ones."""


# ---- reading


class _RepeatedKey(Exception):
    """A key that a mapping has on two lines."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
    """A loader that refuses repeated keys, of which YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping like yaml's `Composer`, and refuse repeated keys.

        Raises:
            _RepeatedKey: A key stands on two lines.
        """
        node: Any = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise _RepeatedKey(
                        f"line {line}: expected {key.value} once, got it on line {lines[name]} too"
                    )
                lines[name] = line
        return node


def read_job_file(path: Path) -> dict[str, Any]:
    """Read a file's keys and values without translation.

    Raises:
        BadOption: The file cannot be read, is no mapping in YAML, or repeats a key.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise BadOption(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
        document = yaml.load(text, _Loader)  # _Loader is a SafeLoader.
    except OSError as error:
        raise BadOption(f"{path}: {error.strerror}") from None
    except _RepeatedKey as error:
        raise BadOption(f"{path}: {printable(str(error))}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found = " ".join(str(error).split())[:300]
        raise BadOption(f"{path}: expected YAML: {found}") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise BadOption(f"{path}: expected keys and values, as 'base_model: gpt2'")
    return document


# ---- writing


def job_yaml(options: JobOptions) -> str:
    """Write a job as a file with all its options, under axolotl's keys where it has them."""
    values = {one.field: _written(one, _value_at(options, one.field)) for one in _declared()}
    document: dict[str, Any] = {}
    names = {one.field: _name(one) for one in _declared()}
    split = values.pop("split")
    values.pop("dataset")
    if values["lr_schedule"] == "constant" and (values["warmup_steps"] or values["warmup_ratio"]):
        values["lr_schedule"] = "constant_with_warmup"
    held_out = {"path": values.pop("eval_dataset"), "split": values.pop("eval_split")}
    document["base_model"] = values.pop("model")
    document["datasets"] = [_not_none({"path": path, "split": split}) for path in options.datasets]
    if held_out["path"] is not None:
        document["test_datasets"] = [_not_none(held_out)]
    elif held_out["split"] is not None:
        document["eval_split"] = held_out["split"]
    document |= {names[field]: value for field, value in _not_none(values).items()}
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc] # yaml has no types
    """A dumper that escapes line separators, which YAML's own writes and reads back as spaces."""


def _represent_text(dumper: _Dumper, text: str) -> Any:
    style = '"' if any(separator in text for separator in LINE_SEPARATORS) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _name(one: OptionField) -> str:
    """Return the key of an option: axolotl's, or our longer one."""
    axolotl = {field: key for key, field in RENAMED.items()} | {"learning_rate": "learning_rate"}
    return axolotl.get(one.field) or (one.long_flag or one.flag)[2:].replace("-", "_")


def _not_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _declared() -> tuple[OptionField, ...]:
    return option_fields(JobOptions)


def _value_at(options: JobOptions, field: str) -> Any:
    parts = (options, options.reading, options.evaluation, options.train, options.outputs)
    return next(getattr(part, field) for part in parts if hasattr(part, field))


def _written(one: OptionField, value: Any) -> Any:
    """Convert a value to a type of YAML: the option's word, a number, a bool or a text."""
    if one.is_repeated:
        return list(value) or None
    if one.choices and value is not None:
        word = one.word_for(value)
        return int(word) if one.kind is int else word
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)
