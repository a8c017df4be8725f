"""What a user always wants: options of commands in `~/.config/swarm-ft.toml`.

    [serve-stage]
    invite = "swarm1QXL4a1e..."
    hours = "22-7"
    pause-when = ["user-active", "on-battery"]

Keys are the options' names. What is said on the command line goes first.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import click

from swarm_ft.errors import BadOption


def config_file() -> Path:
    """Where it is, if there is one."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "swarm-ft.toml"


def defaults_of(command: click.Command, name: str, file: Path) -> dict[str, Any]:
    """What the file says of a command, by its parameters' names as click has them.

    Args:
        command: whose.
        name: its section.
        file: that need not be there.

    Raises:
        BadOption: the file is none of TOML, or has a key that is no option.
    """
    section = _read(file).get(name, {})
    if isinstance(command, click.Group) or not section:
        return {}
    if not isinstance(section, dict):
        raise BadOption(f'{file}: [{name}]: expected options, such as hours = "22-7"')
    known = {option: param for param in command.params for option in _names(param)}
    unknown = [key for key in section if _key(key) not in known]
    if unknown:
        listed = ", ".join(sorted(known))
        raise BadOption(f"{file}: [{name}] {unknown[0]}: expected one of {listed}")
    return {str(known[_key(key)].name): value for key, value in section.items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadOption(f"{file}: expected TOML, and to be let read it: {error}") from None


def _names(param: click.Parameter) -> list[str]:
    return [_key(name.lstrip("-")) for name in param.opts]


def _key(name: str) -> str:
    return name.replace("_", "-")
