"""Which swarm-ft this is: its version, and while no release is installed, its commit.

The commit comes from the first of these that has one: the checkout that the package runs from, the
file that `setup.py` writes into a build of a checkout, and pip's record of an installation from a
repository (PEP 610). Nothing is run, and a missing or strange file is no error.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from swarm_ft import __version__

COMMIT_FILE = "commit.txt"
"""Beside this module in a build of a checkout."""
SHOWN_DIGITS = 8
UPDATE = "pip install -U swarm-ft, or in a checkout git pull and pip install ."
"""How somebody updates."""
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


@cache
def described_version() -> str:
    """Return the version, with the commit where one is known, such as `0.1.0+g1a2b3c4d`."""
    package = Path(__file__).parent
    commit = commit_of_checkout(package.parent) or _commit_of_build(package) or _commit_of_pip()
    return f"{__version__}+g{commit[:SHOWN_DIGITS]}" if commit else __version__


def commit_of_checkout(folder: Path) -> str:
    """Return the commit that a checkout's HEAD names; empty where `folder` is none."""
    git = folder / ".git"
    if git.is_file():  # a worktree's
        git = folder / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    common = git / (_text(git / "commondir") or ".")  # branches lie in the main checkout's
    return _checked(_text(common / name)) or _packed(common, name)


def _packed(git: Path, name: str) -> str:
    lines = (line.partition(" ") for line in _text(git / "packed-refs").splitlines())
    return next((_checked(commit) for commit, _, ref in lines if ref == name), "")


def _commit_of_build(package: Path) -> str:
    return _checked(_text(package / COMMIT_FILE))


def _commit_of_pip() -> str:
    from importlib.metadata import PackageNotFoundError, distribution  # takes a while

    try:
        record = json.loads(distribution("swarm-ft").read_text("direct_url.json") or "{}")
        return _checked(str(record["vcs_info"]["commit_id"]))
    except (PackageNotFoundError, ValueError, LookupError, TypeError, OSError):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _checked(commit: str) -> str:
    return commit if _COMMIT.fullmatch(commit) else ""
