"""A version includes its commit if a checkout, a build or an installation has one."""

import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from swarm_ft import __version__, build
from swarm_ft.build import commit_of_checkout, described_version

ROOT = Path(build.__file__).parents[1]
COMMIT = "1a2b3c4d" * 5


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    described_version.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a package outside of any checkout, which pip does not know."""
    monkeypatch.setattr(build, "__file__", str(tmp_path / "swarm_ft" / "build.py"))
    (tmp_path / "swarm_ft").mkdir()
    monkeypatch.setattr("importlib.metadata.distribution", unknown)
    return tmp_path / "swarm_ft"


def unknown(_name: str) -> Any:
    raise PackageNotFoundError


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words),
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


@pytest.mark.parametrize("kind", ["branch", "packed", "detached", "worktree"])
def test_the_commit_of_a_checkout_is_the_one_that_git_names(checkout: Path, kind: str) -> None:
    folder = checkout
    if kind == "packed":
        git(checkout, "pack-refs", "--all")
    elif kind == "detached":
        git(checkout, "checkout", "-q", "--detach")
    elif kind == "worktree":
        folder = checkout.with_name("another")
        git(checkout, "worktree", "add", "-q", str(folder), "-b", "other/branch")
    assert commit_of_checkout(folder) == git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize("damage", ["nothing", "no HEAD", "a HEAD of nonsense", "an empty branch"])
def test_where_git_says_nothing_there_is_no_commit(tmp_path: Path, damage: str) -> None:
    if damage != "nothing":
        (tmp_path / ".git").mkdir()
    if damage == "a HEAD of nonsense":
        (tmp_path / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    elif damage == "an empty branch":
        (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main")
    assert commit_of_checkout(tmp_path) == ""


def test_without_any_record_the_version_is_plain(package: Path) -> None:
    assert described_version() == __version__


def test_a_build_says_the_commit_that_it_was_made_of(package: Path) -> None:
    (package / build.COMMIT_FILE).write_text(f"{COMMIT}\n")
    assert described_version() == f"{__version__}+g1a2b3c4d"


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        (f'{{"url": "https://example.org", "vcs_info": {{"commit_id": "{COMMIT}"}}}}', True),
        ('{"url": "file:///somewhere", "dir_info": {}}', False),
        ('{"vcs_info": {"commit_id": "../../x"}}', False),
        ("[]", False),
        ("nonsense", False),
        (None, False),
    ],
)
def test_pip_says_the_commit_of_an_installation_from_a_repository(
    package: Path, monkeypatch: pytest.MonkeyPatch, record: str | None, shown: bool
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return record

    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: Installed())
    assert described_version() == (f"{__version__}+g1a2b3c4d" if shown else __version__)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these tests run outside of a checkout")
def test_a_wheel_of_a_checkout_has_its_commit(tmp_path: Path) -> None:
    source = tmp_path / "source"
    git(ROOT, "clone", "-q", "--depth", "1", f"file://{ROOT}", str(source))
    command = (sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(tmp_path / "dist"))
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        commit = files.read(f"swarm_ft/{build.COMMIT_FILE}").decode().strip()
    assert commit == git(source, "rev-parse", "HEAD")
