"""Version of this swarm-ft, with its commit while no release is installed.

The first of these sources that knows a commit supplies it: the checkout that the package runs from,
the file that `setup.py` writes into a build of a checkout, and pip's record of an installation from
a repository (PEP 610). The module runs no program, and a missing or malformed file is no error.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from swarm_ft import __version__

COMMIT_FILE = "commit.txt"
"""Name of the file with the commit, beside this module in a build of a checkout."""
SHOWN_DIGITS = 8
"""Hexadecimal digits of the commit that the version shows."""
UPDATE = "pip install -U swarm-ft, or in a checkout git pull and pip install ."
"""Commands that update an installation."""
_COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


@cache
def described_version() -> str:
    """Return the version, with the commit where one is known, such as `0.1.0+g1a2b3c4d`."""
    package = Path(__file__).parent
    commit = commit_of_checkout(package.parent) or _commit_of_build(package) or _commit_of_pip()
    return f"{__version__}+g{commit[:SHOWN_DIGITS]}" if commit else __version__


def commit_of_checkout(folder: Path) -> str:
    """Return the commit at a checkout's HEAD; empty if `folder` is no checkout."""
    git = folder / ".git"
    if git.is_file():  # in a worktree, `.git` is a file that names the folder
        git = folder / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref:"):
        return _checked(head)
    name = head.removeprefix("ref:").strip()
    common = git / (_text(git / "commondir") or ".")  # the main checkout has the branches
    return _checked(_text(common / name)) or _packed(common, name)


def _packed(git: Path, name: str) -> str:
    lines = (line.partition(" ") for line in _text(git / "packed-refs").splitlines())
    return next((_checked(commit) for commit, _, ref in lines if ref == name), "")


def _commit_of_build(package: Path) -> str:
    return _checked(_text(package / COMMIT_FILE))


def _commit_of_pip() -> str:
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

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
