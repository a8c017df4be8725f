"""Writes the hashes of all that `constraints.txt` names: what is installed is what was tried.

    python -m deploy.lock_packages

requests the files of each version from the package index. It keeps those for the systems named
below, and the ones that pip would take here from any place. A build of torch for CPUs is on no
index that has all others. `make install`, CI and the image refuse whatever has another hash.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version
from pip._internal.models.index import PyPI

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
NAMES = "locked.txt", "locked-client.txt", "locked-tools.txt", "locked-docs.txt"
FILES = tuple(ROOT / "deploy" / name for name in NAMES)
FIRST_LINES = re.compile("^# --- (?:client|tools|docs):.*$", re.MULTILINE)
"""Lines of constraints.txt at which the parts for all files but the first begin."""
FORMAT = "application/vnd.pypi.simple.v1+json"
PYTHONS = {"cp311", "cp312", "cp313", "py3"}
SYSTEMS = re.compile(r"any|manylinux.*_(x86_64|aarch64)|macosx.*|win_amd64")
MARKERS = {"uvloop": 'sys_platform != "win32"', "triton": 'sys_platform == "linux"'}
"""Where else a package is not to be had."""
NO_LOCK = "t"
"""At the end of the ABI of a Python without a global lock."""


def main() -> None:
    """Write all files."""
    parts = pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    taken = _taken_here([pin for pins in parts for pin in pins])
    for path, pins in zip(FILES, parts, strict=True):
        lines = [line for pin in pins for line in _locked(pin, taken)]
        header = f"# Written by {Path(__file__).relative_to(ROOT)}; see there.\n"
        path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}: {len(pins)} packages\n")


def pinned(text: str) -> list[list[str]]:
    """Return `NAME==VERSION` of all packages: the package's own, client's, tools', docs site's."""
    return [
        [line.strip() for line in part.splitlines() if "==" in line and not line.startswith("#")]
        for part in FIRST_LINES.split(text)
    ]


def _taken_here(pins: list[str]) -> dict[str, str]:
    """Return the SHA-256 of the file that pip takes on this machine, by normalised name."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        options = ["--ignore-installed", "--report", str(report)]
        subprocess.run([*command, *options, *pins], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(one["metadata"]["name"]): _sha256_of(one["download_info"])
        for one in found
    }


def _sha256_of(download: dict[str, Any]) -> str:
    return str(download["archive_info"]["hashes"]["sha256"])


def _locked(pin: str, taken: dict[str, str]) -> Iterator[str]:
    name, _, version = pin.partition("==")
    hashes = {*_published(name, version), taken[canonicalize_name(name)]}
    marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
    yield f"{pin}{marker} \\"
    lines = [f"    --hash=sha256:{digest}" for digest in sorted(hashes)]
    yield " \\\n".join(lines)


def _published(name: str, version: str) -> Iterator[str]:
    """Yield the hashes of a version's files on the index, for the supported systems."""
    url = f"{PyPI.simple_url}/{canonicalize_name(name)}/"
    request = urllib.request.Request(url, headers={"Accept": FORMAT})
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    for file in files:
        if is_wanted(file["filename"], Version(version)):
            yield file["hashes"]["sha256"]


def is_wanted(filename: str, version: Version) -> bool:
    """Whether an index's file is of this version, and for the systems that are thought of."""
    try:
        if filename.endswith(".tar.gz"):
            return parse_sdist_filename(filename)[1] == version
        _, of, _, tags = parse_wheel_filename(filename)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False
    return of == version and any(map(_fits, tags))


def _fits(tag: Tag) -> bool:
    is_python = tag.interpreter in PYTHONS or (tag.interpreter[:3] == "cp3" and tag.abi == "abi3")
    is_locked = not tag.abi.endswith(NO_LOCK)
    return is_python and is_locked and SYSTEMS.fullmatch(tag.platform) is not None


if __name__ == "__main__":
    main()
