"""Bounds beside a type: refused values and texts, at any depth."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.spec.bounds import (
    MAX_ID_BYTES,
    MAX_TEXT_BYTES,
    Bound,
    Length,
    Line,
    Name,
    NameList,
    OneOf,
    Range,
    clean_text,
    cut_text,
    field_hints,
    first_refusal,
    metadata,
    refusal,
)

Step = NewType("Step", int)
Count = Annotated[int, Range(1, 9)]


@pytest.mark.parametrize(
    ("hint", "value", "words"),
    [
        (Count, 1, None),
        (Count, 9, None),
        (Count, 0, "expected 1 to 9, got 0"),
        (Count, 10, "expected 1 to 9, got 10"),
        (Count, 2.0, "expected an integer, got 2.0"),
        (Count, True, "expected an integer, got True"),
        (Count, "2", "expected an integer, got '2'"),
        (Annotated[int, Range(0)], 1 << 90, None),
        (Annotated[int, Range(0)], -1, "expected 0 or more, got -1"),
        (Annotated[float, Range(0.0)], 3, None),
        (Annotated[float, Range(0.0)], -0.5, "expected a finite number, 0 or more, got -0.5"),
        (Annotated[float, Range(0.0)], math.inf, "expected a finite number, 0 or more, got inf"),
        (Annotated[float, Range(0.0)], math.nan, "expected a finite number, 0 or more, got nan"),
        (Annotated[float, Range(0.0)], None, "expected a number, got None"),
        (Annotated[float, Range(0.0, 1e200)], 1e201, "expected a finite number, 0 to 1e+200"),
        (Annotated[str, Length(3)], "abc", None),
        (Annotated[str, Length(3)], "abcd", "expected at most 3 bytes of UTF-8, got 4"),
        (Annotated[str, Length(3, 1)], "", "expected 1 to 3 bytes of UTF-8, got 0"),
        (Annotated[bytes, Length(16, 16)], b"abcd", "expected 16 bytes, got 4"),
        (Annotated[bytes, Length(16, 16)], 5, "expected 16 entries, got 5"),
        (Annotated[str, NameList(2)], "", None),
        (Annotated[str, NameList(2)], "one,other", None),
        (Annotated[str, NameList(2)], "a,b,c", "expected at most 2 names, as NAME,NAME, got"),
        (Annotated[str, NameList(2)], "one,,", "expected at most 2 names"),
        (Annotated[str, NameList(2)], "one,", "expected 1 to 64 bytes of printable UTF-8"),
        (Annotated[str, NameList(2)], "one, other", "expected no space around a name"),
        (Annotated[str, NameList(2)], "a/b", "expected 1 to 64 bytes of printable UTF-8"),
        (Annotated[str, NameList(2)], 5, "expected at most 2 names"),
        (Annotated[int, OneOf((16, 8, 4))], 8, None),
        (Annotated[int, OneOf((16, 8, 4))], 5, "expected 16, 8 or 4, got 5"),
        (Annotated[str, OneOf(("a",))], "b", "expected a, got 'b'"),
        (Annotated[Step, Range(1, 9)], Step(10), "expected 1 to 9, got 10"),
        (Count | None, None, None),
        (Count | None, 0, "expected 1 to 9, got 0"),
        (tuple[Count, ...], (1, 2, 0), "expected 1 to 9, got 0"),
        (tuple[str, Count], ("a", 0), "expected 1 to 9, got 0"),
        (frozenset[Count], frozenset({10}), "expected 1 to 9, got 10"),
        (Mapping[Count, str], {0: "a"}, "expected 1 to 9, got 0"),
        (Mapping[str, tuple[Count, ...]], {"a": (3, 10)}, "expected 1 to 9, got 10"),
        (Annotated[tuple[Count, ...], Length(2)], (0, 0, 0), "expected at most 2 entries, got 3"),
        (Annotated[tuple[Count, ...], Length(2)], (1, 0), "expected 1 to 9, got 0"),
        (Annotated[int, "words of others"], 0, None),
        (int | str, "a", None),
        (int, "a", None),
    ],
)
def test_what_is_refused_is_said_with_what_was_expected(
    hint: object, value: object, words: str | None
) -> None:
    text = refusal(value, hint)
    assert text is None if words is None else text is not None and text.startswith(words)


@given(st.integers(), st.integers(), st.integers())
def test_a_range_takes_its_ends_and_what_lies_between(low: int, high: int, value: int) -> None:
    assert (Range(low, high).refusal(value) is None) == (low <= value <= high)


@given(st.one_of(st.floats(), st.text(), st.binary(), st.none(), st.tuples(st.text())))
def test_whatever_comes_is_refused_in_a_short_line(value: object) -> None:
    for hint in (Count, Annotated[str, OneOf(("x" * 9,))]):
        text = refusal(value, hint)
        assert text is not None
        assert len(text) < 200
        assert text.isprintable()


@dataclass(frozen=True)
class _Job:
    name: Annotated[str, Length(5), "what it is called"]
    steps: Count = 1


def test_of_a_dataclass_the_first_field_out_of_bounds_is_named() -> None:
    assert first_refusal(_Job("short")) is None
    assert first_refusal(_Job("longer", 0)) == ("name", "expected at most 5 bytes of UTF-8, got 6")
    assert first_refusal(_Job("short", 0)) == ("steps", "expected 1 to 9, got 0")


def test_metadata_of_others_is_kept() -> None:
    assert metadata(field_hints(_Job)["name"]) == (Length(5), "what it is called")
    assert metadata(int) == ()


# ---- texts are as long as their UTF-8

_PRINTABLE = st.characters().filter(lambda c: c.isprintable() and c not in "/\\,")
_TEXT_BOUNDS = [
    pytest.param(Name(), MAX_ID_BYTES, id="Name"),
    pytest.param(NameList(1), MAX_ID_BYTES, id="NameList"),
    pytest.param(Line(), MAX_TEXT_BYTES, id="Line"),
    pytest.param(Length(10), 10, id="Length"),
]


def _filled(chars: list[str], num_bytes: int) -> str:
    """Return as many of these characters as fit, and then letters, in exactly `num_bytes`."""
    text = ""
    for char in chars:
        if len((text + char).encode()) <= num_bytes:
            text += char
    return text.strip() + "x" * (num_bytes - len(text.strip().encode()))


@pytest.mark.parametrize(("bound", "max_bytes"), _TEXT_BOUNDS)
@given(chars=st.lists(_PRINTABLE, max_size=300))
def test_a_text_is_taken_up_to_its_last_byte_and_not_beyond(
    bound: Bound, max_bytes: int, chars: list[str]
) -> None:
    text = _filled(chars, max_bytes)
    assert bound.refusal(text) is None
    assert bound.refusal(text + "x") is not None


@pytest.mark.parametrize(("bound", "max_bytes"), _TEXT_BOUNDS)
@given(
    surrogate=st.characters(categories=["Cs"]),
    before=st.text("ab\N{OCTOPUS}", max_size=2),
)
def test_a_lone_surrogate_is_refused(
    bound: Bound, max_bytes: int, surrogate: str, before: str
) -> None:
    words = bound.refusal(before + surrogate)
    assert words is not None
    assert words.isascii()
    assert len(words) < 200 + max_bytes


@given(st.text(st.characters(categories=["L", "N", "So", "Cs", "Cc"])), st.integers(0, 2000))
def test_a_text_that_is_cut_fits_and_is_cut_no_shorter_than_needed(text: str, extra: int) -> None:
    text += "\N{OCTOPUS}" * extra
    cleaned = clean_text(text)
    assert len(cleaned.encode()) <= MAX_TEXT_BYTES
    assert cleaned.isprintable()
    assert len(cleaned) >= min(len(text), MAX_TEXT_BYTES // 4)
    cut = cut_text(text, 7)
    assert len(cut.encode()) <= 7
    assert text.encode(errors="replace").decode().startswith(cut)
