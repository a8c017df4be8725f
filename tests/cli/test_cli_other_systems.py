"""A whole swarm without what Linux has alone: its losses are those of one with it."""

from __future__ import annotations

import json
import os
import textwrap

import pytest

from tests.cli.conftest import Shell

pytestmark = [
    pytest.mark.slow,
    pytest.mark.variant,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("swarm"),
]

TAKEN_AWAY = textwrap.dedent(
    """
    import os, socket, sys
    import psutil  # whose part for Linux needs what others' parts do without

    for name in ("splice", "pwritev", "fdatasync", "posix_fallocate"):
        delattr(os, name)
    del os.memfd_create, socket.TCP_USER_TIMEOUT
    print("without", file=sys.stderr)
    """
)
"""Runs first in each process."""


def losses(shell: Shell) -> list[float]:
    demo = shell.spawn(
        "demo", "--stages", 2, "--steps", 4, "--max-eval-samples", 4, "--json", "report.json"
    )
    assert demo.ends(280) == 0, demo.err
    assert shell.all_gone(), shell.alive()
    found: list[float] = json.loads((shell.cwd / "report.json").read_text())["losses"]
    return found


def test_a_swarm_trains_without_what_linux_has_alone(shell: Shell) -> None:
    quiet = losses(shell)
    (shell.cwd / "sitecustomize.py").write_text(TAKEN_AWAY)
    shell.env["PYTHONPATH"] = os.pathsep.join((str(shell.cwd), shell.env["PYTHONPATH"]))
    assert losses(shell) == quiet
    for log in (shell.cwd / "swarm-ft-output-demo" / "logs").iterdir():
        assert log.read_text().startswith("without\n"), "the file above was not read"
