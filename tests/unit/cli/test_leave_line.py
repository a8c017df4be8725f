"""The lines that a volunteer sees while its peer leaves."""

import math

import pytest

from swarm_ft.cli.peer_lines import PeerLine, print_contribution
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import LeaveProgress

TAKES = LeaveProgress(may_go=False, words="run r, layers 2-4: peer heir takes over", seconds=12.4)


@pytest.fixture
def line() -> PeerLine:
    made = PeerLine()
    made.begin(hosts=True, timeout_s=math.inf)
    return made


def test_it_says_what_it_waits_for_how_long_and_what_else_can_be_done(line: PeerLine) -> None:
    line.show(TAKES)
    end = " (about 12 s); Ctrl-C again leaves at once"
    assert line.line() == TAKES.words + end
    assert line.line(60).endswith(end), "a narrow terminal shows the end all the same"
    assert line.line(60).startswith("run r, layers")
    assert len(line.line(60)) < 60


def test_elsewhere_than_at_a_terminal_a_line_is_told_once(
    line: PeerLine, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (5, 6, 7):
        line.show(LeaveProgress(may_go=False, words=f"{steps} steps would be lost"))
    line.show(LeaveProgress(may_go=True, words=""))
    line.end()
    assert capsys.readouterr().err == "5 steps would be lost; Ctrl-C again leaves at once\n"


def test_last_words_are_of_what_was_given_and_none_if_nothing_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for nothing in (None, Contribution()):
        print_contribution("ada-3090", nothing, as_json=False)
        assert capsys.readouterr().out == ""
    contribution = Contribution(seconds=60.0, steps=2, samples=8, sent_bytes=5000, all_bytes=6000)
    print_contribution("ada-3090", contribution, as_json=False)
    words = "8 samples in 2 steps, 1 min, 5.0 kB sent for training, 6.0 kB in all"
    thanks = f"ada-3090 gave {words}; thank you\n"
    assert capsys.readouterr().out == thanks
