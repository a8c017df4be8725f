"""The coordinator's page and metrics, as the command starts them."""

import socket
import time
import urllib.request
from contextlib import closing
from http.client import HTTPResponse
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.cli.conftest import RunHere, Shell


def got(address: str) -> str:
    with closing(urllib.request.urlopen(address, timeout=30)) as answer:
        assert isinstance(answer, HTTPResponse)
        return answer.read().decode()


def becomes_ready(place: str) -> bool:
    """Once time passes, which is a moment after it listens."""
    while True:
        try:
            return got(f"http://{place}/readyz") == "ok\n"
        except HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(0.05)


def test_a_coordinator_has_a_page_and_metrics_until_it_ends(shell: Shell) -> None:
    running = shell.up(
        "coordinator", "--insecure", "--page", "127.0.0.1:0", "--metrics", "127.0.0.1:0"
    )
    words = running.first_words()
    assert becomes_ready(words["metrics"])
    assert "swarm_ft_peers 0.0" in got(f"http://{words['metrics']}/metrics")
    assert "swarm-ft" in got(words["page"])
    running.wait_for("err", "the page was opened; for another browser: http://127.0.0.1:")
    assert running.interrupted() == 0


def test_a_coordinator_without_a_page_has_none(shell: Shell) -> None:
    running = shell.up("coordinator", "--insecure", "--no-page")
    words = running.first_words()
    assert (words["page"], words["metrics"]) == ("", "")
    assert running.interrupted() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--page", "0.0.0.0:7770"), "the page steers runs and is plaintext"),
        (("--page", "127.0.0.1:1", "--no-page"), "--page, --no-page: give one of the two"),
        (("--metrics", "nowhere"), "--metrics: expected HOST:PORT, got 'nowhere'"),
    ],
)
def test_a_bad_place_begins_nothing(
    run_here: RunHere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_here("coordinator", "--insecure", *options)
    assert result.code == 2
    assert words in result.err
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_begins_nothing(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_here("coordinator", "--insecure", "--metrics", f"127.0.0.1:{port}")
    assert result.code == 2
    assert str(port) in result.err
    assert not list(tmp_path.iterdir())
