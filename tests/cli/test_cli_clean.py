"""`swarm-ft clean` deletes what a peer left, and nothing that is in use or not its own."""

from pathlib import Path

import pytest

from swarm_ft.api.connections import state_folder
from swarm_ft.api.peer_home import CACHES, KEY_FILE, PeerHome, claim_home, homes
from swarm_ft.cli.defaults import defaults_file
from tests.cli.conftest import RunHere


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))


def make_home(directory: Path | None = None) -> PeerHome:
    home = claim_home(None, directory)
    (home.path / KEY_FILE).write_text("secret")
    for name in CACHES:
        (home.path / name / "run").mkdir(parents=True)
        (home.path / name / "run" / "data").write_bytes(bytes(1000))
    return home


def test_caches_are_deleted_and_keys_stay(run_here: RunHere) -> None:
    home = make_home()
    home.close()
    listed = run_here("clean", "--dry-run")
    assert listed.code == 0
    assert listed.out.count("1000 bytes  ") == len(CACHES)
    assert all((home.path / name).exists() for name in CACHES)
    done = run_here("clean", "--yes")
    assert (done.code, done.out.splitlines()[-1]) == (0, "deleted 3.9 KiB")
    assert not any((home.path / name).exists() for name in CACHES)
    assert (home.path / KEY_FILE).read_text() == "secret"
    assert run_here("clean", "--yes").out == "nothing to delete\n"


def test_all_leaves_nothing(run_here: RunHere, tmp_path: Path) -> None:
    make_home().close()
    make_home(tmp_path / "own").close()
    for path in (state_folder() / "client.pem", defaults_file()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# secret")
    done = run_here("clean", "--all", "--yes", "--buffer-dir", tmp_path / "own")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].endswith("pip uninstall swarm-ft")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_peer_that_runs_keeps_its_folder(run_here: RunHere, tmp_path: Path) -> None:
    running, stopped = make_home(), make_home()
    stopped.close()
    done = run_here("clean", "--all", "--yes")
    assert done.code == 1
    assert f"skipped {running.path}: its peer is running; stop it with" in done.out
    assert (running.path / "kept/run/data").exists()
    assert not stopped.path.exists()
    running.close()


def test_another_folder_is_refused(run_here: RunHere, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    done = run_here("clean", "--yes", "--buffer-dir", tmp_path / "photos")
    assert done.code == 2
    assert "expected a peer's folder" in done.err
    assert (tmp_path / "photos").exists()


def test_nobody_is_asked_without_a_terminal(run_here: RunHere) -> None:
    home = make_home()
    home.close()
    done = run_here("clean")
    assert done.code == 2
    assert "--yes: expected this option, as standard input is not a terminal" in done.err
    assert all((home.path / name).exists() for name in CACHES)
    assert homes() == home.path.parent
