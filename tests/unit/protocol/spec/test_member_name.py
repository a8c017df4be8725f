"""Names: what may be chosen, what follows from an id, and that two members have different ones."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.spec.member_name import (
    ADJECTIVES,
    ANIMALS,
    MAX_NAME_CHARS,
    MIN_PREFIX_CHARS,
    SHORT_ID_CHARS,
    ChosenName,
    ShownName,
    default_name,
    distinct_name,
    is_meant,
    is_member_id,
    skeleton_of,
)

MEMBER_IDS = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=32, max_size=32)


@pytest.mark.parametrize("name", ["", "a", "ada-3090", "Anna", "A.b_c-9", "x" * MAX_NAME_CHARS])
def test_such_names_may_be_chosen(name: str) -> None:
    assert ChosenName().refusal(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "-a",
        "a-",
        "a b",
        "a/b",
        "a\n",
        "a\x1b[2J",
        "a\u202eb",
        "\u0430da",  # a Cyrillic letter
        "\uff41da",
        "x" * (MAX_NAME_CHARS + 1),
        "ada (v2avztnz)",
        "coordinator",
        "C00rdinator",
        "Owner",
        7,
        None,
        b"ada",
    ],
)
def test_such_names_may_not(name: object) -> None:
    words = ChosenName().refusal(name)
    assert words is not None
    assert words.isprintable()
    assert len(words) < 300


@given(st.text(max_size=40))
def test_whatever_is_allowed_is_short_plain_and_no_member_id(name: str) -> None:
    if ChosenName().refusal(name) is None:
        assert len(name) <= MAX_NAME_CHARS
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set(" ()[]/\\'\"$`,:;%<>&")
        assert not is_member_id(name)


@given(MEMBER_IDS)
def test_a_default_name_follows_from_the_id_and_may_be_chosen(member_id: str) -> None:
    name = default_name(member_id)
    assert name == default_name(member_id)
    assert ChosenName().refusal(name) is None
    adjective, animal, number = name.split("-")
    assert adjective in ADJECTIVES
    assert animal in ANIMALS
    assert 10 <= int(number) <= 99


def test_an_id_that_a_person_chose_is_its_own_name() -> None:
    assert default_name("stage-0-3") == "stage-0-3"
    assert default_name("a" * 31) == "a" * 31


def test_one_id_has_this_name_for_ever() -> None:
    assert default_name("a" * 32) == "kind-bison-67"


def test_no_two_words_are_taken_for_each_other() -> None:
    for words in (ADJECTIVES, ANIMALS):
        assert len(words) == len(set(words)) == 64
        assert max(map(len, words)) <= 7
        for one, other in combinations(words, 2):
            assert _distance(one, other) > 1, (one, other)


def _distance(one: str, other: str) -> int:
    """Edits from one word to the other."""
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, 1):
        above = [place]
        for column, second in enumerate(other, 1):
            changed = row[column - 1] + (letter != second)
            above.append(min(row[column] + 1, above[-1] + 1, changed))
        row = above
    return row[-1]


@given(st.lists(MEMBER_IDS, min_size=1, max_size=5, unique=True), st.integers(0, 32))
def test_members_of_one_name_are_told_apart(ids: list[str], num_shared: int) -> None:
    ids = list(dict.fromkeys(ids[0][:num_shared] + one[num_shared:] for one in ids))
    shown = [distinct_name("ada-3090", one, set(ids) - {one}) for one in ids]
    assert len(set(shown)) == len(ids)
    assert all(ShownName().refusal(name) is None for name in shown)
    if len(ids) == 1:
        assert shown == ["ada-3090"]
    elif num_shared == 0:
        assert max(map(len, shown)) <= len("ada-3090 ()") + 32


@pytest.mark.parametrize("look_alike", ["ada-3O9o", "ADA-3090", "ada_3090", "ada.3090"])
def test_names_that_look_alike_count_as_one(look_alike: str) -> None:
    assert skeleton_of(look_alike) == skeleton_of("ada-3090")
    assert skeleton_of("ada-3091") != skeleton_of("ada-3090")


def test_a_command_line_names_a_member_by_its_name_or_by_letters_of_its_id() -> None:
    member_id = "v2avztnz" + "q" * 24
    shown = "ada-3090 (v2avztnz)"
    for text in (shown, "ada-3090", member_id, member_id[:SHORT_ID_CHARS], "v2av"):
        assert is_meant(text, member_id, shown)
    for text in ("ada-309", "v2a"[: MIN_PREFIX_CHARS - 1], "", "2avz", "ada-3090 (v2av"):
        assert not is_meant(text, member_id, shown)
