"""Tests that CI runs show the guarantees of docs/guarantees.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = sorted(
    set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", (ROOT / "docs/guarantees.md").read_text("utf-8")))
)


def test_there_are_some() -> None:
    assert "tests/cli/test_newcomer.py" in NAMED


@pytest.mark.parametrize("name", [name for name in NAMED if name.endswith(".py")])
def test_none_is_a_variant(name: str) -> None:
    assert "mark.variant" not in (ROOT / name).read_text("utf-8"), "CI would leave it out"
