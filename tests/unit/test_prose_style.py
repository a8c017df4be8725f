"""The check of prose finds each kind of fault, and nothing in prose without faults."""

from pathlib import Path

import pytest

from deploy.prose_style import in_module, in_page, in_readme, long_sentences

FAULTY = '''"""What a module does."""

# The peer tells its coordinator. `said` is a name.

class Frame:
    """A frame."""

    def size(self, told: int) -> int:
        """Of the frame.

        Args:
            told: The number that the caller says.
        """
        kept = told
        return kept
'''
SOUND = '''"""Frames of a link."""

# A peer reports to its coordinator, see `said`.

class Frame:
    """One frame."""

    held_out: int = 0

    @property
    def is_key(self) -> bool:
        """Whether it begins a buffer."""
        return True

    def test_size(self, kept_bytes: int) -> int:
        """Return the size in bytes."""
        return kept_bytes
'''
WORDS_OF_25 = " ".join(["word"] * 25)


def found(source: str) -> list[tuple[str, int, str]]:
    return [(check, line, text) for check, _, line, text in in_module(Path("a.py"), source)]


def test_each_fault_is_found_with_its_line() -> None:
    assert found(FAULTY) == [
        ("fragment", 1, "What a module does."),
        ("fragment", 9, "Of the frame."),
        ("speech", 3, "The peer tells its coordinator. `said` is a name."),
        ("speech", 12, "told: The number that the caller says."),
        ("name", 8, "told"),
        ("name", 14, "kept"),
    ]


def test_sound_prose_has_no_findings() -> None:
    assert found(SOUND) == []


def test_a_module_has_a_name_too() -> None:
    assert [text for _, _, _, text in in_module(Path("here.py"), '"""Places."""\n')] == ["here"]


def test_whether_is_for_functions_of_bools_alone() -> None:
    source = 'def f() -> {}:\n    """Whether it is so."""\n'
    assert found(source.format("bool")) == []
    assert [check for check, _, _ in found(source.format("str"))] == ["fragment"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"{WORDS_OF_25}.", 0),
        (f"{WORDS_OF_25} more.", 1),
        (f"{WORDS_OF_25}. {WORDS_OF_25}.", 0),
        (f"{WORDS_OF_25}\nmore.", 1),
        (f"{WORDS_OF_25} - + =.", 0),
        (f"Args:\n    count: {WORDS_OF_25}.", 1),
        (f"Args:\n    count: some.\n    size: {WORDS_OF_25[5:]}.", 0),
        (f"Run it:\n\n    {WORDS_OF_25} more\n\nThen stop.", 0),
    ],
)
def test_a_sentence_has_25_words_at_most(text: str, count: int) -> None:
    assert len(list(long_sentences(text))) == count


def test_a_page_is_100_columns_wide_outside_tables_and_code() -> None:
    wide = "x" * 101
    page = f"{wide}\n| {wide} |\n```\n{wide}\n```\n\n    {wide}\n{'x' * 100}\n{wide}\n"
    assert [line for _, _, line, _ in in_page(Path("a.md"), page)] == [1, 9]


def test_the_first_page_is_short() -> None:
    lines = [text for _, _, _, text in in_readme(Path("README.md"), "[a](b) " * 13 + "\n" * 111)]
    assert lines == ["111 lines, expected at most 110", "13 links, expected at most 12"]
    words = [text for _, _, _, text in in_readme(Path("README.md"), "word " * 951)]
    assert words[0] == "951 words, expected at most 950"
    assert len(words) == 2  # and its line is too wide
