"""Two clients whose jobs train side by side in one swarm of processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.sample import SampleInput
from tests.cli.conftest import RunHere, Shell, Spawned

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("swarm")]

STEPS, ENDLESS = 60, 1_000_000


def status_of(run_here: RunHere, *join: object) -> dict[str, Any]:
    result = run_here("status", *join, "--json")
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def run_of(client: Spawned) -> str:
    return client.wait_for("err", "watching run-").split("watching ")[1].split(";")[0]


def test_two_clients_train_side_by_side_and_a_third_waits_behind_them(
    shell: Shell, sample: SampleInput, run_here: RunHere, tmp_path: Path
) -> None:
    text = shell.cwd / "text.txt"
    text.write_text(Path(sample.train_file).read_text(encoding="utf-8")[:1500], encoding="utf-8")
    address = shell.up("dht").first_words()["addresses"][0]
    join = ("--insecure", "--initial-peers", address, "--dht-prefix", "beside")
    shell.up("coordinator", *join)
    for layers in ("0-1", "1-3", "0-1", "1-3"):
        shell.spawn("serve-stage", "--layers", layers, *join).wait_for("err", "joined")

    def train(name: str, steps: int) -> Spawned:
        data = ("--dataset", text, "--batch-size", 4, "--seq-length", 32, "--lr", "1e-2")
        out = ("--out", name, "--json", f"{name}.json")
        model = ("--model", sample.model_dir)
        return shell.spawn("client", "train", *model, *data, *out, "--steps", steps, *join)

    first = train("first", ENDLESS)
    first.wait_for("err", "step 1/")  # with all four: two replicas of each stage
    second = train("second", ENDLESS)
    second.wait_for("err", "step 1/")
    runs = (run_of(first), run_of(second))
    found = {run["run"]: run for run in status_of(run_here, *join)["runs"]}
    hosts = [[stage["peer"] for stage in found[run]["stages"]] for run in runs]
    assert [len(peers) for peers in hosts] == [2, 2]
    assert len({*hosts[0], *hosts[1]}) == 4, "nobody works for both"

    third = train("third", STEPS)
    third.wait_for("err", f"behind {runs[0]} and {runs[1]}")
    refused = run_here("client", "cancel", *join)
    assert refused.code == 2
    assert "--run: 3 runs are under way, name one of them" in refused.err
    assert all(f"{run} (training, step " in refused.err for run in runs)
    assert run_here("client", "attach", *join).code == 2

    assert run_here("client", "cancel", "--run", runs[0], *join).code == 0
    assert first.ends() == 1
    assert third.ends() == 0, third.err
    losses = json.loads((shell.cwd / "third.json").read_text())["losses"]
    assert len(losses) == STEPS
    assert run_here("client", "cancel", *join).code == 0, "one is left: it is meant"
    assert second.ends() == 1
