"""A command that suggests another one names the invitation's file, never the invitation."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from swarm_ft.api.connections import SwarmAddress
from swarm_ft.cli.swarm_options import way_in

INVITE = "swarm1KNiD7aJ4ghup2YUyAbDu8WP6PXoZo84MjH3JdoS2orsahzsvjuLVvze"


@click.command
@way_in()
def suggest(way: SwarmAddress) -> None:
    click.echo(str(way))


@pytest.mark.parametrize(
    ("name", "words"),
    [("client.txt", "--invite @client.txt"), ("my key.txt", "--invite '@my key.txt'")],
)
def test_an_invitation_in_a_file_is_suggested_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(INVITE)
    assert CliRunner().invoke(suggest, ["--invite", f"@{name}"]).output == f"{words}\n"


def test_an_invitation_in_the_command_line_is_not_repeated() -> None:
    output = CliRunner().invoke(suggest, ["--invite", INVITE]).output
    assert output == "--invite @FILE\n"
