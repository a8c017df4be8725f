"""The user unit for volunteers gives a peer the time that it takes to leave."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from swarm_ft.api.serve_options import LEAVE_TIMEOUT_S

FOLDER = Path(__file__).parents[2] / "deploy" / "volunteer"
UNIT = FOLDER / "swarm-ft-peer.service"
VERIFY = shutil.which("systemd-analyze")


def test_who_is_stopped_may_take_as_long_as_it_takes_to_leave() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > LEAVE_TIMEOUT_S
    assert service["ExecStart"].endswith("swarm-ft serve-stage $INVITE $OPTIONS")
    assert service["RestartPreventExitStatus"] == "2"
    assert unit["Install"]["WantedBy"] == "default.target"
    assert (
        f"stop_grace_period: {service['TimeoutStopSec']}s"
        in (FOLDER / "docker-compose.yml").read_text()
    )


@pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not installed")
def test_systemd_understands_it(tmp_path: Path) -> None:
    program = tmp_path / ".local" / "bin" / "swarm-ft"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    verified = subprocess.run(
        [str(VERIFY), "verify", "--user", "--man=no", str(UNIT)],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    about_it = [line for line in verified.stderr.splitlines() if UNIT.name in line]
    assert not about_it, verified.stderr
