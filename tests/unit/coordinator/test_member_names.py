"""The names of a swarm's members: unique, whatever they choose."""

from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.protocol.messages.enrolment import name_lookup
from swarm_ft.protocol.spec.bounds import MAX_TEXT_BYTES, num_utf8_bytes
from swarm_ft.protocol.spec.member_name import ShownName, default_name

ADA, EVE, BOB = "a" * 32, "e" * 32, "b" * 32
MEMBER_IDS = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=32, max_size=32)
CHOSEN = st.sampled_from(["", "", "ada", "Ada", "a-d-a", default_name(ADA), "bob"])


def of(chosen: dict[str, str], revoked: frozenset[str] = frozenset()) -> MemberNames:
    names = MemberNames()
    names.replace(chosen, revoked)
    return names


@given(st.dictionaries(MEMBER_IDS | st.sampled_from([ADA]), CHOSEN, max_size=6))
def test_each_shown_name_stands_for_one_member(chosen: dict[str, str]) -> None:
    names = of(chosen)
    shown = {one: names.shown(one) for one in chosen}
    assert len(set(shown.values())) == len(chosen)
    assert all(ShownName().refusal(name) is None for name in shown.values())
    added = MemberNames()
    for one, name in chosen.items():
        added.add(one, name)
    assert {one: added.shown(one) for one in chosen} == shown
    name_of = name_lookup(names.of(chosen, 10))
    assert {one: name_of(one) for one in chosen} == shown  # readers see the same


def test_whoever_takes_anothers_name_is_told_apart_and_so_is_the_other() -> None:
    names = of({ADA: "ada-3090"})
    assert names.shown(ADA) == "ada-3090"
    names.add(EVE, "Ada-3O90")
    assert names.shown(EVE) == "Ada-3O90 (eeeeeeee)"
    assert names.shown(ADA) == "ada-3090 (aaaaaaaa)"
    assert names.found("ada-3090") == (ADA,)
    names.add(EVE, "ada-3090")
    assert set(names.found("ada-3090")) == {ADA, EVE}
    names.add(EVE, "eve")
    assert names.shown(ADA) == "ada-3090"


def test_a_name_drawn_from_a_key_can_be_taken_by_nobody_else_unseen() -> None:
    names = of({ADA: "", EVE: default_name(ADA)})
    assert names.shown(ADA) == f"{default_name(ADA)} (aaaaaaaa)"
    assert names.shown(EVE) == f"{default_name(ADA)} (eeeeeeee)"
    assert name_lookup(names.of([ADA], 1))(ADA) == names.shown(ADA)


def test_a_name_that_begins_as_anothers_id_makes_a_command_line_ask() -> None:
    names = of({ADA: "", EVE: "aaaaaaaa"})
    assert set(names.found("aaaaaaaa")) == {ADA, EVE}


def test_the_name_of_a_revoked_key_is_free_and_is_told_apart() -> None:
    names = of({ADA: "ada", EVE: "ada"}, frozenset({EVE}))
    assert names.shown(ADA) == "ada"
    assert names.shown(EVE) == "ada (eeeeeeee)"


def test_a_name_stays_when_a_member_comes_again_without_one() -> None:
    names = of({})
    names.add(ADA, "ada")
    names.add(ADA)
    assert names.shown(ADA) == "ada"


def test_texts_have_names_in_place_of_known_ids_alone() -> None:
    names = of({ADA: "ada", BOB: ""})
    text = f"peer {ADA} (layers 0-2) failed: {BOB}, not {EVE}, x{ADA} or {ADA}7"
    expected = f"peer ada (layers 0-2) failed: {default_name(BOB)}, not {EVE}, x{ADA} or {ADA}7"
    assert names.in_text(text) == expected
    names.add(EVE, "ada")
    long = names.in_text(" ".join([ADA] * 30))
    assert long.startswith("ada (aaaaaaaa) ada")
    assert (num_utf8_bytes(long) or 0) <= MAX_TEXT_BYTES
    assert len(names.in_text(f"{ADA} " * 25 + "x" * 900)) == MAX_TEXT_BYTES


def test_ids_that_people_chose_are_their_names() -> None:
    names = of({})
    assert names.shown("stage-0-3") == "stage-0-3"
    assert names.of(["stage-0-3", "b"], 9) == ()
    assert names.in_text("peer stage-0-3 left") == "peer stage-0-3 left"
