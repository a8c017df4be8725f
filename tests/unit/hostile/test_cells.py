"""The outcomes of cells, and the summary of all of them."""

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
    ("outcome", "word"),
    [(Outcome(cell="a"), "holds"), (Outcome(cell="a", problem="it fell"), "BROKEN")],
    ids=["holds", "broken"],
)
def test_an_outcome_in_a_word(outcome: Outcome, word: str) -> None:
    assert outcome.word == word
    assert word in as_line(outcome)
    assert as_dict(outcome)["holds"] == (not outcome.problem)


def test_the_last_line_names_what_broke() -> None:
    outcomes = [
        Outcome(cell="one"),
        Outcome(cell="two", problem="it fell"),
        Outcome(cell="three", problem="it\nburned"),
    ]
    assert (
        verdict(outcomes) == "hostile: 1 of 3 cells hold; BROKEN: two (it fell); three (it burned)"
    )
    assert "\n" not in verdict(outcomes)
    assert verdict(outcomes[:1]) == "hostile: 1 of 1 cells hold"
