"""The command `swarm-ft clean`, which deletes the files of swarm-ft on this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click

from swarm_ft.api.connections import state_folder
from swarm_ft.api.peer_home import CACHES, LOCK_FILE, homes, lock_home
from swarm_ft.cli.defaults import defaults_file
from swarm_ft.cli.options import examples
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.sizes import format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPath:
    """A file or a folder that the command deletes.

    Attributes:
        path: Path of the file or folder.
        purpose: Description of its contents, for people.
        num_bytes: Size on the disk in bytes, of all files of a folder together.
    """

    path: Path
    purpose: str
    num_bytes: int


@click.command(
    short_help="Delete the files of swarm-ft on this machine.",
    epilog=examples(
        "swarm-ft clean --dry-run     list them",
        "swarm-ft clean               delete the caches of peers that are not running",
        "swarm-ft clean --all         delete keys and defaults too, before you uninstall",
    ),
)
@click.option(
    "--buffer-dir",
    "extra_homes",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    multiple=True,
    metavar="DIR",
    help="A peer's --buffer-dir, to clean as well. May be repeated.",
)
@click.option("--all", "with_keys", is_flag=True, help="Delete keys and defaults too.")
@click.option("--dry-run", is_flag=True, help="List the files without deleting them.")
@click.option("--yes", "-y", "is_confirmed", is_flag=True, help="Do not ask for confirmation.")
def clean(
    extra_homes: tuple[Path, ...], *, with_keys: bool, dry_run: bool, is_confirmed: bool
) -> int:
    """Delete the caches of this user's peers: buffers, work, backups, models.

    The command skips the folders of running peers. It never deletes a coordinator's journal, a
    swarm's keys, or results.
    """
    with ExitStack() as locks:
        found, has_running = _stored_paths(extra_homes, locks, with_keys=with_keys)
        for one in found:
            click.echo(f"{format_size(one.num_bytes):>10}  {one.path}  ({one.purpose})")
        if not found:
            click.echo("nothing to delete")
        elif not dry_run:
            if not is_confirmed:
                _confirm(with_keys=with_keys)
            locks.close()
            _delete(found)
            click.echo(f"deleted {format_size(sum(one.num_bytes for one in found))}")
    if with_keys and not dry_run and not has_running:
        pip = Path(sys.executable).parent / "pip"
        click.echo(f"to uninstall the program: {pip} uninstall swarm-ft")
    return 1 if has_running and not dry_run else 0


def _stored_paths(
    extra_homes: Sequence[Path], locks: ExitStack, *, with_keys: bool
) -> tuple[list[StoredPath], bool]:
    """Find the files to delete; `locks` keeps peers from starting in these folders.

    Returns:
        The files and folders, and whether the command skipped a running peer's folder.
    """
    for home in extra_homes:
        if not (home / LOCK_FILE).exists():
            raise BadOption(f"--buffer-dir {home}: expected a peer's folder, got another one")
    found: list[StoredPath] = []
    has_running = False
    for home in [*_default_homes(), *extra_homes]:
        claimed = lock_home(home)
        if claimed is None:
            has_running = True
            click.echo(f"skipped {home}: its peer is running; stop it with 'swarm-ft peer drain'")
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
        defaults_file(): "your defaults of options",
    }
    return (_stored(path, purpose) for path, purpose in places.items() if path.exists())


def _stored(path: Path, purpose: str) -> StoredPath:
    return StoredPath(path=path, purpose=purpose, num_bytes=_bytes_in(path))


def _confirm(*, with_keys: bool) -> None:
    """Request a confirmation at the terminal.

    Raises:
        BadOption: Standard input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise BadOption("--yes: expected this option, as standard input is not a terminal")
    keys = " (this machine will need a new invitation)" if with_keys else ""
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
