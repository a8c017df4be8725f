"""A peer finds again what it left on this machine, and keeps out of other peers' way."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from swarm_ft.api.peer_home import PeerHome, claim_home, work_folder
from swarm_ft.buffers import BufferLimits
from swarm_ft.cli.client import who_sees as who_sees_a_job
from swarm_ft.cli.serve_stage import who_sees
from swarm_ft.errors import BadOption
from swarm_ft.ids import PeerId
from swarm_ft.peer.buffer_storage import BufferStorage
from swarm_ft.peer.node import PeerOptions
from swarm_ft.peer.snapshot_keeper import KeeperStorage


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


def test_what_a_killed_start_left_of_states_is_deleted_by_the_next(claim: Claim) -> None:
    home = claim()
    with work_folder(home) as left:
        (Path(left) / "state.safetensors").write_bytes(b"somebody's weights")
        with work_folder(home) as folder:
            assert not Path(left).exists()
            assert Path(folder).parent == home.path / "work"
            assert Path(folder).stat().st_mode & 0o077 == 0
    assert list((home.path / "work").iterdir()) == []


def test_without_a_home_states_are_with_other_temporary_files() -> None:
    with work_folder(None) as folder:
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


@pytest.mark.parametrize("is_encrypted", [True, False])
@pytest.mark.parametrize("encrypts", [True, False])
def test_a_peer_says_what_passes_its_machine(
    tmp_path: Path, is_encrypted: bool, encrypts: bool
) -> None:
    offer = PeerOptions(
        peer_id=PeerId("me"),
        layers=None,
        memory_bytes=1,
        shard_dir=tmp_path / "work" / "x",
        buffers=BufferStorage(limits=BufferLimits(), directory=tmp_path / "buffers"),
        encrypts=encrypts,
        keeper_storage=KeeperStorage(directory=tmp_path / "kept", max_bytes=3_000_000),
    )
    seen, files, snapshots = who_sees(offer, is_encrypted=is_encrypted)
    assert ("Links are not encrypted" in seen) != is_encrypted
    assert f"in {tmp_path} until the run ends" in files
    assert ("unencrypted (see --encrypt-at-rest)" in files) != encrypts
    assert "up to 2.9 MiB (--keep-disk)" in snapshots


def test_a_client_is_told_who_sees_its_text() -> None:
    line = who_sees_a_job(is_encrypted=True)
    assert "the coordinator, which stores it until the run is over" in line[0]
    assert line[1].endswith("Links are encrypted.")
    assert "the network can read them" in who_sees_a_job(is_encrypted=False)[1]
