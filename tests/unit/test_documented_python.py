"""Python in documents is found, with the lines that it has there; `make check` checks its types."""

from pathlib import Path

import pytest

from deploy.documented_python import PAGES, blocks

PAGE = """# A page

<!-- python: chats: list[str] = [] -->
```python
import swarm_ft
print(chats)
```

```
not python
```

```python
1 + ""
```
"""


def test_a_block_keeps_its_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, second = blocks(page)
    assert (first.line, second.line) == (4, 13)
    lines = first.source.splitlines()
    assert lines[2:] == ["chats: list[str] = []", "", "import swarm_ft", "print(chats)"]
    assert second.source.splitlines().index('1 + ""') == PAGE.splitlines().index('1 + ""')
    compile(second.source, "page", "exec")


def test_a_block_without_an_end_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport swarm_ft\n")
    with pytest.raises(ValueError, match=r"page.md:1: a block without an end"):
        list(blocks(page))


def test_documents_have_python_that_compiles() -> None:
    pages = [page for pattern in PAGES for page in Path().glob(pattern)]
    found = [block for page in pages for block in blocks(page)]
    assert len(found) >= 6
    for block in found:
        compile(block.source, f"{block.page}:{block.line}", "exec")
