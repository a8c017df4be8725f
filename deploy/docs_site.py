"""Hooks of the docs site: generated pages, the reports of benchmarks, and links into the code.

`mkdocs.yml` names this file. The site has three parts that `docs/` has not. The reference of
commands comes from the commands, the Python API from `swarm_ft/__init__.pyi`, and the reports are
`benchmarks/reports`. A link from a page to another file of the repository becomes its text.
"""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS, REPORTS = "docs", "benchmarks/reports"
PICTURES = {".png", ".svg"}
WIDTH = 88
"""Columns of a command's help."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_EXPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CLI_HEAD = """\
# Commands

`swarm-ft COMMAND --help` prints the same. The options of a job are on
[a page of their own](options.md).
"""
API_HEAD = """\
# Python API

Every public name of `import swarm_ft`. [Use Python](../how-to/python.md) has examples.
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the folders that the navigation names with a slash at their end."""
    config.nav = [
        {title: _listed(value) if isinstance(value, str) else value}
        for entry in config.nav or []
        for title, value in entry.items()
    ]
    return config


def _listed(value: str) -> str | list[str]:
    if not value.endswith("/"):
        return value
    folder = ROOT / (REPORTS if value == "reports/" else f"{DOCS}/{value}")
    names = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    return [f"{value}README.md", *(value + name for name in names)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the reports."""
    files.append(File.generated(config, "reference/cli.md", content=cli_page()))
    files.append(File.generated(config, "reference/api.md", content=api_page()))
    for path in sorted((ROOT / REPORTS).rglob("*")):
        if path.suffix in PICTURES | {".md"}:
            uri = f"reports/{path.relative_to(ROOT / REPORTS).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has their targets."""
    parts = _FENCED.split(markdown)
    uri = page.file.src_uri
    parts[::2] = [with_plain_pipes(with_site_links(part, uri)) for part in parts[::2]]
    return "".join(parts)


def with_site_links(text: str, uri: str) -> str:
    """Return a page's text with its links as the site has them.

    Args:
        text: Markdown without fenced code.
        uri: Place of the page in the site.
    """

    def moved(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match("[a-z]+:", path):
            return found[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(_place_of(uri)), path))
        there = _uri_of(place)
        if there is None:
            return label if (ROOT / place).exists() else found[0]
        relative = posixpath.relpath(there, posixpath.dirname(uri) or ".")
        return f"{mark}[{label}]({relative}{hash_}{anchor})"

    return _LINK.sub(moved, text)


def with_plain_pipes(text: str) -> str:
    """Return a page's text without the backslashes that GitHub needs before pipes in code."""
    return _CODE.sub(lambda found: found[0].replace(r"\|", "|"), text)


def _place_of(uri: str) -> str:
    if uri.startswith("reports/"):
        return f"{REPORTS}/{uri.removeprefix('reports/')}"
    return f"{DOCS}/{uri}"


def _uri_of(place: str) -> str | None:
    if Path(place).suffix not in PICTURES | {".md"}:
        return None
    if place.startswith(f"{REPORTS}/"):
        return f"reports/{place.removeprefix(REPORTS + '/')}"
    return place.removeprefix(f"{DOCS}/") if place.startswith(f"{DOCS}/") else None


# ---- generated pages


def api_page() -> str:
    """Return the page of the Python API: a block for each public name."""
    stub = (ROOT / "swarm_ft/__init__.pyi").read_text(encoding="utf-8")
    names = {name: module for module, name in _EXPORT.findall(stub)}
    return "\n".join([API_HEAD, *(f"::: {names[name]}.{name}\n" for name in sorted(names))])


def cli_page() -> str:
    """Return the page of all commands: what `--help` prints, a section each."""
    from swarm_ft.cli.main import cli

    return "\n".join([CLI_HEAD, *map(_section, _contexts(cli, "swarm-ft", None))])


def _contexts(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[click.Context]:
    """Yield the context of a command and of all commands in it."""
    widths = {"max_content_width": WIDTH, "terminal_width": WIDTH}
    settings: dict[str, Any] = {**widths, **command.context_settings}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from _contexts(found, each, context)


def _section(context: click.Context) -> str:
    text = textwrap.dedent(context.command.get_help(context)).strip()
    return f"## `{context.command_path}`\n\n```text\n{text}\n```\n"
