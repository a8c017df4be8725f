"""Checks the types of Python in documents and examples: `python -m deploy.documented_python`.

A fenced block of Python is a module of its own. What it takes for granted stands in a comment right
above it, which no reader sees: `<!-- python: chats: list[dict[str, object]] = [] -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mypy import api

PAGES = ("README.md", "docs/**/*.md", "benchmarks/reports/*.md")
EXAMPLES = "examples/*.py"
_FENCE = "```python"
_ASSUMED = re.compile(r"<!-- python: (.*) -->")


class Block(NamedTuple):
    """A block of Python in a document.

    Attributes:
        page: the document.
        line: of the fence, counted from 1.
        source: a module whose lines have the numbers that they have in the document.
    """

    page: Path
    line: int
    source: str


def blocks(page: Path) -> Iterator[Block]:
    """Find the blocks of Python in a document.

    Raises:
        ValueError: a block has no end.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    for start, line in enumerate(lines):
        if line != _FENCE:
            continue
        if "```" not in lines[start:]:
            raise ValueError(f"{page}:{start + 1}: a block without an end")
        stop = lines.index("```", start)
        assumed = _ASSUMED.fullmatch(lines[start - 1]) if start else None
        before = [""] * (start + 1)
        if assumed:
            before[start - 1] = assumed[1]
        yield Block(page, start + 1, "\n".join([*before, *lines[start + 1 : stop], ""]))


def problems(found: list[Block], examples: list[Path]) -> list[str]:
    """Run mypy once over all blocks and examples.

    Returns:
        Its errors, a line each, at the lines of the documents.
    """
    with TemporaryDirectory(prefix="documented-python-") as folder:
        pages = {f"{folder}/documented_{n}.py": block.page for n, block in enumerate(found)}
        for path, block in zip(pages, found, strict=True):
            Path(path).write_text(block.source, encoding="utf-8")
        out, trouble, _ = api.run(["--no-error-summary", "--strict", *pages, *map(str, examples)])
    for path, page in pages.items():
        out = out.replace(path, str(page))
    return [*out.splitlines(), *trouble.splitlines()]


def main() -> int:
    """Check all documents and examples; print errors, and return 1 if there are any."""
    pages = sorted(page for pattern in PAGES for page in Path().glob(pattern))
    found = [block for page in pages for block in blocks(page)]
    examples = sorted(Path().glob(EXAMPLES))
    lines = problems(found, examples)
    for line in lines or [f"{len(found)} blocks of Python, {len(examples)} examples: no errors"]:
        sys.stdout.write(f"{line}\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
