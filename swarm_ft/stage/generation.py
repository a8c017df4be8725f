"""A checkpoint's settings for `generate` of transformers, and the tokens that end texts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from swarm_ft.stage.skeleton import ModelConfig
from swarm_ft.stage.source import Source, one_line

GENERATION_FILE = "generation_config.json"


def generation_settings(source: Source) -> dict[str, Any]:
    """Return the fields of a checkpoint's `generation_config.json`; empty if there is no such file.

    Raises:
        BadModel: The file is unreadable.
    """
    path = source.find(GENERATION_FILE)
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, ValueError) as exc:
        raise source.error(f"{GENERATION_FILE} is unreadable ({one_line(exc)})") from exc
    if not isinstance(settings, dict):
        raise source.error(f"{GENERATION_FILE} is unreadable (expected an object)")
    return settings


def end_tokens_in(source: Source, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens at which `generate` ends a text, from the settings or else the config.

    Raises:
        BadModel: The settings are unreadable.
    """
    ends = generation_settings(source).get("eos_token_id", getattr(config, "eos_token_id", None))
    several = ends if isinstance(ends, list) else [ends]
    if not all(end is None or isinstance(end, int) for end in several):
        raise source.error(f"{GENERATION_FILE} is unreadable (eos_token_id: {ends!a:.80})")
    return tuple(end for end in several if end is not None)


def save_generation_settings(
    source: Source, config: ModelConfig, more_ends: Iterable[int], directory: Path
) -> None:
    """Write a result's `generation_config.json`: the model's own, with more end tokens.

    Args:
        source: Source of the model.
        config: Config of the model.
        more_ends: Tokens that end texts or turns in the training data.
        directory: Existing directory.

    Raises:
        BadModel: The model's own settings are unreadable.
    """
    path, ends = source.find(GENERATION_FILE), end_tokens_in(source, config)
    more = [token for token in more_ends if token not in ends]
    if more:
        settings = generation_settings(source) or _of_config(config)
        settings["eos_token_id"] = [*ends, *more]
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (directory / GENERATION_FILE).write_text(text, encoding="utf-8")
    elif path is not None:
        shutil.copyfile(path, directory / GENERATION_FILE)


def _of_config(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that `from_pretrained` uses without a file."""
    found: dict[str, Any] = GenerationConfig.from_model_config(config).to_diff_dict()
    found.pop("_from_model_config", None)
    return found
