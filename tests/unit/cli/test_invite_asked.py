"""An invitation that is in no command line: typed at a prompt, or read from a pipe."""

import io

import click
import pytest

from swarm_ft.cli.main import INVITATION
from swarm_ft.cli.swarm_options import prompt_invite
from swarm_ft.errors import BadInvite
from swarm_ft.identity.invites import PREFIX

WORD = "swarm1KNiD7aJ4ghup2YUyAbDu8WP6PXoZo84MjH3JdoS2orsahzsvjuLVvze"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", [f"{WORD}\n", f"  {WORD}  ", f"{WORD}\nanother line\n"])
def test_a_piped_invitation_is_read_from_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert str(prompt_invite(reads_pipe=True)) == WORD


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_pipe_gives_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert prompt_invite(reads_pipe=True) is None


def test_a_pipe_that_is_for_something_else_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.StringIO("a question for the model")
    monkeypatch.setattr("sys.stdin", stdin)
    assert prompt_invite(reads_pipe=False) is None
    assert stdin.read() == "a question for the model"


def test_a_terminal_is_asked_without_an_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: dict[str, object] = {}

    def prompt(text: str, **options: object) -> str:
        prompts.update(options, text=text)
        return WORD

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(click, "prompt", prompt)
    assert str(prompt_invite(reads_pipe=False)) == WORD
    assert prompts == {"text": "invitation", "hide_input": True, "err": True}


def test_a_piped_word_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("nonsense"))
    with pytest.raises(BadInvite):
        prompt_invite(reads_pipe=True)


def test_the_command_knows_an_invitation_when_it_sees_one() -> None:
    assert INVITATION.pattern.startswith(PREFIX)
    assert INVITATION.findall(f"--invite={WORD}") == [WORD]
