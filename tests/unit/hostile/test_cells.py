"""What a cell came to, and what is said of all of them at the end."""

import pytest

from swarm_ft.errors import BadOption
from tests.hostile.cells import Outcome, as_dict, as_line, chosen, verdict

NAMES = ("Join:stranger", "Join:client", "15-quota")


def test_cells_are_chosen_by_patterns() -> None:
    assert chosen(NAMES, ()) == NAMES
    assert chosen(NAMES, ("15-*", "Join:str*")) == ("Join:stranger", "15-quota")
    with pytest.raises(BadOption, match=r"Leave:\*: no such cell; for example Join:stranger"):
        chosen(NAMES, ("Join:*", "Leave:*"))


@pytest.mark.parametrize(
    ("outcome", "word", "is_red"),
    [
        (Outcome(cell="a"), "holds", False),
        (Outcome(cell="a", problem="it fell"), "BROKEN", True),
        (Outcome(cell="a", problem="it fell", awaits="a wall"), "awaited", False),
        (Outcome(cell="a", awaits="a wall"), "holds already", False),
    ],
    ids=["holds", "broken", "awaited", "already"],
)
def test_an_outcome_in_a_word(outcome: Outcome, word: str, is_red: bool) -> None:
    assert (outcome.word, outcome.is_red) == (word, is_red)
    assert word in as_line(outcome)
    assert as_dict(outcome)["holds"] == (not outcome.problem)


def test_the_last_line_names_what_broke() -> None:
    outcomes = [
        Outcome(cell="one"),
        Outcome(cell="two", problem="it fell"),
        Outcome(cell="three", problem="it fell", awaits="a wall"),
        Outcome(cell="four", awaits="a wall"),
        Outcome(cell="five", problem="it burned"),
    ]
    assert verdict(outcomes) == (
        "hostile: 2 of 5 cells hold; awaited: three; hold already, make them strict: four; "
        "BROKEN: two, five"
    )
    assert "\n" not in verdict(outcomes)
    assert verdict(outcomes[:1]) == "hostile: 1 of 1 cells hold"
