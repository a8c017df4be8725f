"""A stage dies with all who host it, in a swarm of processes without a place for snapshots."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell, Spawned
from tests.cli.test_cli_leaving import STEPS, Swarm, quietly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("swarm")]

SAVE_STEPS = 20
STORED_SHARDS = "*/kept/*/*.shard"


def kept_below(folder: Path) -> list[Path]:
    return sorted(folder.glob(STORED_SHARDS))


def until_kept(client: Spawned, folder: Path, names: set[str]) -> None:
    """Wait until peers of these names store shards of each other; the run's end is a failure."""
    while not names <= {path.relative_to(folder).parts[0] for path in kept_below(folder)}:
        assert client.process.poll() is None, client.err
        time.sleep(0.05)  # files notify nobody


def test_a_killed_stage_is_had_from_those_who_keep_it(shell: Shell, sample: DemoInput) -> None:
    swarm = Swarm(shell)
    first = swarm.peer("first", "--layers", "0-1")
    last = swarm.peer("last", "--layers", "1-3")
    quiet = quietly(swarm, sample, first, last)

    client = swarm.train("disturbed", sample, "--save-steps", SAVE_STEPS)
    client.wait_for("err", f"step {2 * SAVE_STEPS}/", 120)
    until_kept(client, shell.cwd, {"first", "last"})
    last.signal(signal.SIGKILL)
    newcomer = swarm.peer("newcomer", "--layers", "1-3")
    assert client.ends(240) == 0, client.err

    report: dict[str, Any] = json.loads((shell.cwd / "disturbed.json").read_text())
    assert report["steps"] == STEPS
    (back,) = report["went_back"]
    assert back["to_step"] >= SAVE_STEPS
    assert back["to_step"] % SAVE_STEPS == 0
    assert report["losses"] == quiet, "to the last bit"
    for peer in (first, newcomer, swarm.coordinator):
        assert peer.interrupted(60) == 0, peer.err
    left = [path for path in kept_below(shell.cwd) if path.parts[-4] != "last"]
    assert left == [], "the run is over"
