"""Writes the hashes of all that `constraints.txt` names: what is installed is what was tried.

    python -m deploy.lock_packages

asks the package index for the files of each version and keeps those for the systems named below,
beside what pip would take here, wherever that lies: a build of torch for CPUs is on no index that
has all others. `make install`, CI and the image refuse whatever has another hash.
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

from pip._internal.models.index import PyPI

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGE, TOOLS = (ROOT / "deploy" / name for name in ("locked.txt", "locked-tools.txt"))
FIRST_TOOL = "# --- tools"
FORMAT = "application/vnd.pypi.simple.v1+json"
PYTHONS = re.compile(r"-(cp31[1-3]|py3|py2\.py3|cp3\d+-abi3)-|\.tar\.gz$")
SYSTEMS = re.compile(r"-any\.whl$|manylinux.*(x86_64|aarch64)|macosx|win_amd64|\.tar\.gz$")
MARKERS = {"uvloop": 'sys_platform != "win32"', "triton": 'sys_platform == "linux"'}
"""Where else a package is not to be had."""
OTHERS = re.compile(r"-cp\d+t-")
"""Pythons without a global lock."""


def main() -> None:
    """Write both files."""
    package, tools = _pinned(CONSTRAINTS.read_text(encoding="utf-8"))
    here = _taken_here([*package, *tools])
    for path, pins in ((PACKAGE, package), (TOOLS, tools)):
        lines = [line for pin in pins for line in _locked(pin, here)]
        header = f"# Written by {Path(__file__).relative_to(ROOT)}; see there.\n"
        path.write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}: {len(pins)} packages\n")


def _pinned(text: str) -> tuple[list[str], list[str]]:
    """What the package needs, and what its tools do; `NAME==VERSION` each."""
    parts = text.partition(FIRST_TOOL)
    package, tools = (
        [line.strip() for line in part.splitlines() if "==" in line and not line.startswith("#")]
        for part in (parts[0], parts[2])
    )
    return package, tools


def _taken_here(pins: list[str]) -> dict[str, str]:
    """By normal name, the SHA-256 of the file that pip takes on this machine."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        options = ["--ignore-installed", "--report", str(report)]
        subprocess.run([*command, *options, *pins], check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {_normal(one["metadata"]["name"]): _sha256_of(one["download_info"]) for one in found}


def _sha256_of(download: dict[str, Any]) -> str:
    return str(download["archive_info"]["hashes"]["sha256"])


def _locked(pin: str, here: dict[str, str]) -> Iterator[str]:
    name, _, version = pin.partition("==")
    hashes = {*_published(name, version), here[_normal(name)]}
    marker = f" ; {MARKERS[name]}" if name in MARKERS else ""
    yield f"{pin}{marker} \\"
    lines = [f"    --hash=sha256:{digest}" for digest in sorted(hashes)]
    yield " \\\n".join(lines)


def _published(name: str, version: str) -> Iterator[str]:
    """Of the files that the index has of a version, for the systems that are thought of."""
    url = f"{PyPI.simple_url}/{_normal(name)}/"
    request = urllib.request.Request(url, headers={"Accept": FORMAT})
    with urllib.request.urlopen(request) as answer:
        files = json.load(answer)["files"]
    for file in files:
        filename = file["filename"]
        if _is_of(filename, name, version) and _is_wanted(filename):
            yield file["hashes"]["sha256"]


def _is_of(filename: str, name: str, version: str) -> bool:
    start = re.sub(r"[-_.]+", "[-_.]+", re.escape(_normal(name)).replace(r"\-", "-"))
    return bool(re.match(rf"{start}-{re.escape(version)}(-|\.tar\.gz$)", filename.lower()))


def _is_wanted(filename: str) -> bool:
    fits = PYTHONS.search(filename) and SYSTEMS.search(filename)
    return bool(fits) and not OTHERS.search(filename)


def _normal(name: str) -> str:
    """As PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
