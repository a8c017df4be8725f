"""Defaults of options from the user's own file, with one TOML section per command.

[serve-stage]
memory = "8GiB"
device = "cuda:0"

[client.train]
invite = "@/home/ann/swarm.txt"
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import suggestion


def defaults_file() -> Path:
    """Return the path of the user's file of defaults, which may not exist."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "swarm-ft.toml"


def defaults_for(cli: click.Group, words: Sequence[str]) -> dict[str, Any] | None:
    """Return the defaults of the called command, as click's `default_map`; None without any.

    Args:
        cli: Root of the commands.
        words: Arguments of the command line.

    Raises:
        BadOption: The file cannot be read, or names an unknown command or option.
    """
    path = defaults_file()
    if not path.is_file():
        return None
    document = _read(path)
    names, command = _command(cli, words)
    _check_sections(cli, document, path)
    if isinstance(command, click.Group):
        return None
    found: dict[str, Any] = {}
    for section_names in (_SHARED_SECTIONS.get(tuple(names), ()), names):
        found |= _section(cli, document, section_names, path)
    if not found:
        return None
    for name in reversed(names):
        found = {name: found}
    return found


_SHARED_SECTIONS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("client", "preview"): ("client", "train")
}
"""Second command whose defaults apply as well, by command: a preview shows a job of `train`."""


def _section(
    cli: click.Group, document: Mapping[str, Any], names: Sequence[str], path: Path
) -> dict[str, Any]:
    """Return the values of one section by the command's parameters; empty without the section."""
    section: Any = document if names else {}
    for name in names:
        section = _normal(section).get(name, {})
        if not isinstance(section, dict):
            raise BadOption(f"{path}: {'.'.join(names)}: expected a section of options")
    _, command = _command(cli, names)
    return _by_parameter(command, section, f"{path}: [{'.'.join(names)}]") if section else {}


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise BadOption(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadOption(f"{path}: not TOML: {error}") from None


def _command(cli: click.Group, words: Sequence[str]) -> tuple[list[str], click.Command]:
    """Return the called command with its names, or the innermost group if no command is named."""
    names: list[str] = []
    command: click.Command = cli
    context = click.Context(cli)
    for word in words:
        if not isinstance(command, click.Group) or word.startswith("-"):
            break
        found = command.get_command(context, word)
        if found is None:
            break
        names.append(word)
        command = found
    return names, command


def _check_sections(cli: click.Group, document: Mapping[str, Any], path: Path) -> None:
    commands = cli.list_commands(click.Context(cli))
    for name in _normal(document):
        if name not in commands:
            raise BadOption(
                f"{path}: [{name}]: there is no such command{suggestion(name, commands)}"
            )


def _normal(section: Mapping[str, Any]) -> dict[str, Any]:
    """Write the names as commands and options have them, with dashes."""
    return {name.replace("_", "-"): value for name, value in section.items()}


def _by_parameter(command: click.Command, section: Mapping[str, Any], where: str) -> dict[str, Any]:
    known: dict[str, click.Parameter] = {
        flag.lstrip("-"): param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
    }
    known |= {
        _dashed(param): param for param in command.params if isinstance(param, click.Argument)
    }
    found: dict[str, Any] = {}
    for name, value in _normal(section).items():
        param = known.get(name)
        if param is None or param.name is None:
            raise BadOption(f"{where}: {name}: there is no such option{suggestion(name, known)}")
        found[param.name] = value if isinstance(value, (bool, list)) else _word(param, value)
    return found


def _word(param: click.Parameter, value: object) -> object:
    """Convert a value to click's form: a list for an option that may be repeated."""
    return [str(value)] if getattr(param, "multiple", False) else str(value)


def _dashed(param: click.Parameter) -> str:
    return str(param.name).replace("_", "-")
