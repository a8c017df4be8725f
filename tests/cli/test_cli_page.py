"""The coordinator's page and metrics, as the command starts them."""

import socket
import ssl
import time
import urllib.request
from contextlib import closing
from hashlib import sha256
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

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
    (file,) = shell.cwd.rglob("*.page")
    assert file.read_text() == f"{words['page']}\n"
    assert running.interrupted() == 0


def over_tls(address: str, fingerprint: str) -> tuple[int, str]:
    """Return the answer at this address, if its certificate has this fingerprint."""
    url = urlsplit(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with closing(HTTPSConnection("127.0.0.1", url.port, timeout=30, context=context)) as link:
        link.connect()
        shown = link.sock.getpeercert(binary_form=True)
        assert sha256(shown or b"").hexdigest() == fingerprint.replace(":", "").lower()
        link.request("GET", f"{url.path}?{url.query}", headers={"Host": url.netloc})
        answer = link.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.thorough
def test_a_page_for_other_machines_keeps_its_key_over_a_restart(
    shell: Shell, tmp_path: Path
) -> None:
    assert shell.spawn("init", "--json").ends() == 0
    options = ("--page", "0.0.0.0:0", "--announce", "swarm.example.org")
    fingerprints = []
    for _ in range(2):
        running = shell.up("coordinator", *options)
        words = running.first_words()
        assert words["page"].startswith("https://swarm.example.org:")
        status, html = over_tls(words["page"], words["page_fingerprint"])
        assert (status, "swarm-ft" in html) == (200, True)
        fingerprints.append(words["page_fingerprint"])
        assert running.interrupted() == 0
    assert fingerprints[0] == fingerprints[1]
    assert len(fingerprints[0].split(":")) == 32
    (key,) = tmp_path.rglob("page.key")
    assert key.stat().st_mode & 0o077 == 0


def test_the_fingerprint_is_printed_beside_the_address(shell: Shell) -> None:
    assert shell.spawn("init").ends() == 0
    running = shell.spawn("coordinator", "--page", "0.0.0.0:0", "--announce", "a.example")
    address = running.wait_for("out", "in one browser): https://a.example:").rpartition(" ")[2]
    running.wait_for("out", "compare the SHA-256 fingerprint of its certificate")
    fingerprint = running.wait_for("out", "  ").strip()
    assert over_tls(address.strip(), fingerprint)[0] == 200
    assert running.interrupted() == 0


@pytest.mark.thorough
def test_a_coordinator_without_a_page_has_none(shell: Shell) -> None:
    running = shell.up("coordinator", "--insecure", "--no-page")
    words = running.first_words()
    assert (words["page"], words["page_fingerprint"], words["metrics"]) == ("", "", "")
    assert running.interrupted() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--page", "0.0.0.0:7770"),
            "--page 0.0.0.0: without keys the page is plaintext",
        ),
        (("--page", "127.0.0.1:1", "--no-page"), "--page, --no-page: expected one of the two"),
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
