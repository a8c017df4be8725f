"""The compose files for volunteers have the right content; no engine is needed for that."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "volunteer"
COMPOSE = shutil.which("docker-compose")

pytestmark = pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")


def config(*files: str, **env: str) -> subprocess.CompletedProcess[str]:
    options = [word for name in files for word in ("-f", str(FOLDER / name))]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("INVITE", "OPTIONS")
    }
    return subprocess.run(
        [str(COMPOSE), *options, "config"],
        cwd=FOLDER,
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("files", [("docker-compose.yml",), ("docker-compose.yml", "nvidia.yml")])
def test_a_peer_with_an_invitation_stays_and_publishes_nothing(files: tuple[str, ...]) -> None:
    configured = config(*files, INVITE="swarm1abc", OPTIONS="--layers 0-2")
    assert configured.returncode == 0, configured.stderr
    assert "command: serve-stage swarm1abc --layers 0-2" in configured.stdout
    assert "restart: unless-stopped" in configured.stdout
    assert "home:/home/swarm/.cache" in configured.stdout
    assert "ports:" not in configured.stdout
    assert ("driver: nvidia" in configured.stdout) == ("nvidia.yml" in files)


def test_without_an_invitation_it_says_what_is_missing() -> None:
    configured = config("docker-compose.yml")
    assert configured.returncode != 0
    assert "an invitation, as 'swarm-ft invite' prints it" in configured.stderr
