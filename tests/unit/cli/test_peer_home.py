"""A peer finds again what it left on this machine, and keeps out of other peers' way."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from swarm_ft.cli.serve_stage import PeerHome, claim_home
from swarm_ft.errors import BadOption


class Claim(Protocol):
    def __call__(self, name: str | None = None, directory: Path | None = None) -> PeerHome: ...


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "swarm-ft" / "peers"


@pytest.fixture
def claim() -> Iterator[Claim]:
    """`claim_home`, and homes are left at the end."""
    with contextlib.ExitStack() as claimed:

        def claim(name: str | None = None, directory: Path | None = None) -> PeerHome:
            return claimed.enter_context(contextlib.closing(claim_home(name, directory)))

        yield claim


def test_a_peer_without_a_name_comes_back_under_the_one_that_it_drew(
    cache: Path, claim: Claim
) -> None:
    first = claim()
    assert first.name("peer-1") == "peer-1"
    first.close()
    again = claim()
    assert (again.path, again.name("peer-2")) == (cache / "0", "peer-1")


def test_peers_side_by_side_have_homes_of_their_own(cache: Path, claim: Claim) -> None:
    homes = [claim() for _ in range(3)]
    assert [home.path for home in homes] == [cache / "0", cache / "1", cache / "2"]


def test_a_named_peer_has_the_home_of_its_name(cache: Path, claim: Claim) -> None:
    assert claim("volunteer").path == cache / "volunteer"


def test_a_directory_that_another_peer_uses_is_refused(tmp_path: Path, claim: Claim) -> None:
    first = claim("one", tmp_path / "shared")
    with pytest.raises(BadOption, match="another peer uses it"):
        claim("two", tmp_path / "shared")
    first.close()
    assert claim("two", tmp_path / "shared").path == tmp_path / "shared"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, claim: Claim) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadOption, match="--buffer-disk 0"):
        claim(None, tmp_path / "file" / "buffers")


@pytest.mark.usefixtures("no_umask")
def test_a_home_is_its_owners_alone(cache: Path, claim: Claim) -> None:
    home = claim()
    home.name("peer-1")
    home.close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in home.path.iterdir()}
    assert modes == {"lock": 0o600, "peer-id": 0o600}
    assert home.path.stat().st_mode & 0o777 == 0o700


def test_a_home_that_all_could_read_is_its_owners_from_its_next_start(
    cache: Path, claim: Claim
) -> None:
    home = claim()
    home.name("peer-1")
    home.close()
    home.path.chmod(0o755)
    for path in home.path.iterdir():
        path.chmod(0o644)
    assert claim().name("peer-2") == "peer-1"
    modes = {path.stat().st_mode & 0o777 for path in home.path.iterdir()}
    assert (home.path.stat().st_mode & 0o777, modes) == (0o700, {0o600})
