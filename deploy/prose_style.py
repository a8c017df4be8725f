"""Check the prose of code and documents: `python -m deploy.prose_style [--list CHECK]`.

It reads docstrings and names from the syntax tree, comments from the tokens, and pages as text.
Each check has a limit. A limit above 0 counts what is left today: lower it, and never raise it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("swarm_ft", "benchmarks", "deploy", "tests", "examples")
LIMITS = {
    "fragment": 10,
    "speech": 8,
    "name": 276,
    "long-sentence": 198,
    "wide-line": 0,
    "readme": 0,
}
MAX_WORDS, MAX_COLUMNS = 25, 100
README_LIMITS = {"lines": 110, "words": 950, "links": 12}

# First words of a clause that stands for a noun, or of a phrase that leans on the name above it.
_FRAGMENT = re.compile(
    r"(?:what|who|whom|whose|whoever|whatever|which|how|of|by|so|as|where|when|while|with|without"
    r"|for|from|in|at|on|to|beside|behind|until|since|if)(?![\w-])",
    re.I,
)
_SPEECH = re.compile(
    r"\b(?:tells?|told|telling|says?|said|saying|hears?|heard|hearing|asks?|asked|asking"
    r"|retold|foretold|speaks?|spoken?|speaking|obeys?|obeyed)\b",
    re.I,
)
_NO_NAME = re.compile(
    r"(?:.*_)?(?:tells?|told|says?|said|hears?|heard|asks?|asked|retold|foretold)(?:_.*)?"
    r"|kept|given|held|lent|here|there|gone|went|came|whom?|whose|beside|nowhere|elsewhere"
)
# Names: code, and the subjects of a section's items. Also a verb of the field, for protocols.
_ALLOWED = re.compile(r"`[^`]*`|^\s+\w+:|\bspeaks? (?=(?:bare )?(?:gRPC|HTTP|TLS)\b)")
_DIRECTIVE = re.compile(r"#(?:!|:? ?(?:noqa|type:|fmt:))")
# A heading of a section, an item of one ("    count: samples."), an item of a list.
_ITEM = re.compile(r"\w+:$|\s+[\w`*., ]+: |\s*(?:-|\d+\.) ")


class Finding(NamedTuple):
    """One place that a check found.

    Attributes:
        check: a key of `LIMITS`.
        path: the file.
        line: counted from 1.
        text: the line, sentence or name.
    """

    check: str
    path: Path
    line: int
    text: str


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield each docstring with its first line's number, and whether a function of bools has it."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            returns = getattr(node, "returns", None)
            is_of_bool = isinstance(returns, ast.Name) and returns.id == "bool"
            yield node.body[0].lineno, text, is_of_bool


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line; directives to tools are left out."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            yield token.start[0], token.string.lstrip("#: ")


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the names that a module gives to classes, functions, parameters and values."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def is_fragment(line: str, *, is_of_bool: bool = False) -> bool:
    """Return whether a docstring's first line is a clause, or leans on the name above it."""
    is_condition = line.startswith("Whether ") and not is_of_bool
    return is_condition or _FRAGMENT.match(line) is not None


def long_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of more than `MAX_WORDS` words; an item of a list begins a sentence."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if all(line.startswith(" ") for line in lines):
            continue  # commands, code or a table
        starts = [number for number, line in enumerate(lines) if number == 0 or _ITEM.match(line)]
        for start, stop in pairwise([*starts, len(lines)]):
            for sentence in re.split(r"(?<=[.!?])\s", " ".join(lines[start:stop])):
                if len(re.findall(r"\S*\w\S*", sentence)) > MAX_WORDS:
                    yield " ".join(sentence.split())


def in_module(path: Path, source: str) -> Iterator[Finding]:
    """Check the docstrings, comments and names of a Python file."""
    tree = ast.parse(source)
    prose = list(comments(source))
    for start, text, is_of_bool in docstrings(tree):
        lines = text.splitlines()
        prose += enumerate(lines, start)
        if is_fragment(lines[0], is_of_bool=is_of_bool):
            yield Finding("fragment", path, start, lines[0])
        for sentence in long_sentences(text):
            yield Finding("long-sentence", path, start, sentence)
    for line, text in prose:
        if _SPEECH.search(_ALLOWED.sub("", text)):
            yield Finding("speech", path, line, text.strip())
    for line, name in [(1, path.stem), *defined_names(tree)]:
        if _NO_NAME.fullmatch(name.lower().strip("_")) and not name.startswith("test_"):
            yield Finding("name", path, line, name)


def in_page(path: Path, text: str) -> Iterator[Finding]:
    """Yield the lines of a page, outside tables and blocks of code, that are too wide."""
    is_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and len(line) > MAX_COLUMNS and not line.startswith(("|", "    ")):
            yield Finding("wide-line", path, number, line)


def in_readme(path: Path, text: str) -> Iterator[Finding]:
    """Check the limits of the first page that people see; blocks of code count, too."""
    lines = text.splitlines()
    counts = {"lines": len(lines), "words": len(text.split()), "links": text.count("](")}
    for name, limit in README_LIMITS.items():
        if counts[name] > limit:
            yield Finding("readme", path, 1, f"{counts[name]} {name}, expected at most {limit}")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_COLUMNS:
            yield Finding("readme", path, number, line)


def find_all(root: Path) -> Iterator[Finding]:
    """Check all code and pages of a checkout, but for generated code."""
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        if path.parent != root / "swarm_ft" / "proto":
            yield from in_module(path, path.read_text(encoding="utf-8"))
    for path in sorted((root / "docs").rglob("*.md")):
        yield from in_page(path, path.read_text(encoding="utf-8"))
    yield from in_readme(root / "README.md", (root / "README.md").read_text(encoding="utf-8"))


def main() -> int:
    """Print the count and limit of each check; return 1 if a count is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", choices=LIMITS, help="print every place that this check finds")
    listed = parser.parse_args().list
    found = list(find_all(Path()))
    counts = Counter(finding.check for finding in found)
    for check, path, line, text in found:
        if check == listed or (LIMITS[check] == 0 and listed is None):
            sys.stdout.write(f"{path}:{line}: {check}: {text}\n")
    for check, limit in LIMITS.items():
        verdict = "too many" if counts[check] > limit else "ok"
        sys.stdout.write(f"{check}: {counts[check]} of at most {limit}, {verdict}\n")
    return int(any(counts[check] > limit for check, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
