"""Options that a user always wants lie in a file."""

from pathlib import Path

import pytest

from tests.cli.conftest import RunHere

ADDRESS = "/ip4/127.0.0.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
SERVE = ("serve-stage", "--insecure", "--initial-peers", ADDRESS)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "swarm-ft.toml"


def test_options_of_the_file_hold_as_if_they_were_given(config: Path, run_here: RunHere) -> None:
    config.write_text('[serve-stage]\nhours = "7"\n')
    answer = run_here(*SERVE)
    assert answer.code == 2
    assert "--hours 7: expected START-STOP" in answer.err


def test_what_is_given_goes_first(config: Path, run_here: RunHere) -> None:
    config.write_text('[serve-stage]\nhours = "7"\nupload_mbps = 5\n')
    answer = run_here(*SERVE, "--hours", "22-7")
    assert "--upload-mbps: expected an invitation" in answer.err


def test_an_invitation_may_lie_there_and_other_commands_are_as_they_were(
    config: Path, run_here: RunHere
) -> None:
    config.write_text('[serve-stage]\ninvite = "swarm1nonsense"\n')
    answer = run_here("serve-stage")
    assert answer.code == 2
    assert "invit" in answer.err
    assert run_here("sample", "--help").code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serve-stage]\nhourz = 1\n", "[serve-stage] hourz: expected one of"),
        ("serve-stage = 3\n", "expected options, such as"),
        ("[serve-stage\n", "expected TOML"),
    ],
)
def test_what_makes_no_sense_is_told(
    config: Path, run_here: RunHere, text: str, words: str
) -> None:
    config.write_text(text)
    answer = run_here("serve-stage", "--layers", "0-1")
    assert answer.code == 2
    assert words in answer.err
