"""The compose files for volunteers say what they should; no engine is needed for that."""

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
    given = [word for name in files for word in ("-f", str(FOLDER / name))]
    kept = {name: value for name, value in os.environ.items() if name not in ("INVITE", "OPTIONS")}
    return subprocess.run(
        [str(COMPOSE), *given, "config"],
        cwd=FOLDER,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("files", [("docker-compose.yml",), ("docker-compose.yml", "nvidia.yml")])
def test_a_peer_with_an_invitation_stays_and_publishes_nothing(files: tuple[str, ...]) -> None:
    said = config(*files, INVITE="swarm1abc", OPTIONS="--layers 0-2")
    assert said.returncode == 0, said.stderr
    assert "command: serve-stage swarm1abc --layers 0-2" in said.stdout
    assert "restart: unless-stopped" in said.stdout
    assert "home:/home/swarm/.cache" in said.stdout
    assert "ports:" not in said.stdout
    assert ("driver: nvidia" in said.stdout) == ("nvidia.yml" in files)


def test_without_an_invitation_it_says_what_is_missing() -> None:
    said = config("docker-compose.yml")
    assert said.returncode != 0
    assert "an invitation, as 'swarm-ft invite' prints it" in said.stderr
