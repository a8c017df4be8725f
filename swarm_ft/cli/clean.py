"""`swarm-ft clean`: delete the files that swarm-ft stored on this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from swarm_ft.api.joining import state_folder
from swarm_ft.api.peer_home import CACHES, LOCK_FILE, homes, lock_home
from swarm_ft.cli.defaults import defaults_file
from swarm_ft.cli.options import examples
from swarm_ft.errors import BadOption


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPath:
    """A file or a folder that the command deletes.

    Attributes:
        path: its place.
        purpose: its contents, for people.
        num_bytes: its size on the disk, all files of a folder together.
    """

    path: Path
    purpose: str
    num_bytes: int


@click.command(
    short_help="Delete the files that swarm-ft stored here.",
    epilog=examples(
        "swarm-ft clean --dry-run     list them",
        "swarm-ft clean               delete the caches of peers that do not run",
        "swarm-ft clean --all         keys and defaults too, before you uninstall",
    ),
)
@click.option(
    "--buffer-dir",
    "extra_homes",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    metavar="DIR",
    help="A folder that a peer had as its --buffer-dir. May be repeated.",
)
@click.option("--all", "with_keys", is_flag=True, help="Delete keys and defaults too.")
@click.option("--dry-run", is_flag=True, help="List the files, and delete none.")
@click.option("--yes", "-y", "is_confirmed", is_flag=True, help="Do not ask for confirmation.")
def clean(
    extra_homes: tuple[Path, ...], *, with_keys: bool, dry_run: bool, is_confirmed: bool
) -> int:
    """Delete the caches of this user's peers: buffers, work, backups, models.

    A peer that runs keeps its folder. A journal, a swarm's keys and results stay; they lie where
    you put them.
    """
    with ExitStack() as locks:
        found, has_running = _stored_paths(extra_homes, locks, with_keys=with_keys)
        for one in found:
            click.echo(f"{_size(one.num_bytes):>9}  {one.path}  ({one.purpose})")
        if not found:
            click.echo("nothing to delete")
        elif not dry_run:
            if not is_confirmed:
                _confirm(with_keys=with_keys)
            locks.close()  # Windows deletes no file that is open
            _delete(found)
            click.echo(f"deleted {_size(sum(one.num_bytes for one in found))}")
    if with_keys and not dry_run and not has_running:
        click.echo(f"The program itself: {Path(sys.executable).parent / 'pip'} uninstall swarm-ft")
    return 1 if has_running and not dry_run else 0


def _stored_paths(
    extra_homes: Sequence[Path], locks: ExitStack, *, with_keys: bool
) -> tuple[list[StoredPath], bool]:
    """Find what can be deleted; the locks keep peers from starting in these folders.

    Returns:
        The files and folders, and whether a running peer keeps any.
    """
    for home in extra_homes:
        if not (home / LOCK_FILE).exists():
            raise BadOption(f"--buffer-dir {home}: expected the folder of a peer, got another one")
    found: list[StoredPath] = []
    has_running = False
    for home in [*_default_homes(), *extra_homes]:
        claimed = lock_home(home)
        if claimed is None:
            has_running = True
            click.echo(f"a peer that runs uses {home}; stop it first: swarm-ft peer drain")
            continue
        locks.callback(claimed.close)
        found += _stored_in(home, with_keys=with_keys)
    if with_keys and not has_running:
        found += _of_user()
    return found, has_running


def _default_homes() -> list[Path]:
    return sorted(path for path in homes().glob("*") if (path / LOCK_FILE).exists())


def _stored_in(home: Path, *, with_keys: bool) -> Iterator[StoredPath]:
    if with_keys:
        yield _stored(home, "a peer's key, counts and caches")
        return
    for name, purpose in CACHES.items():
        if (home / name).exists():
            yield _stored(home / name, purpose)


def _of_user() -> Iterator[StoredPath]:
    places = {
        state_folder(): "keys of clients and relays; a new key needs a new invitation",
        defaults_file(): "defaults of options",
    }
    return (_stored(path, purpose) for path, purpose in places.items() if path.exists())


def _stored(path: Path, purpose: str) -> StoredPath:
    return StoredPath(path=path, purpose=purpose, num_bytes=_bytes_in(path))


def _confirm(*, with_keys: bool) -> None:
    """Ask whether to go on.

    Raises:
        BadOption: nobody can answer.
    """
    if not sys.stdin.isatty():
        raise BadOption("--yes: expected it where standard input is no terminal")
    keys = "; this machine then needs a new invitation" if with_keys else ""
    click.confirm(f"Delete these files{keys}?", abort=True)


def _delete(found: Sequence[StoredPath]) -> None:
    for one in found:
        if one.path.is_dir() and not one.path.is_symlink():
            shutil.rmtree(one.path)
        else:
            one.path.unlink()


def _bytes_in(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def _size(num_bytes: int) -> str:
    """Return a size as Hugging Face's tools print it: `1.2G`, `47.0M`, `512`."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "K")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f}{letter}"
    return str(num_bytes)
