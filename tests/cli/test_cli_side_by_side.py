"""Two owners whose runs train side by side in one swarm of processes.

The first run never ends by itself, so the second finds it at work however slow the machine is. A
step has one sample, which replicas cannot share: its sums have the same bits however many they are.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import RunHere, Shell, Spawned, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("swarm")]

STEPS, ENDLESS = 40, 1_000_000
RATES = {"first": "1e-2", "second": "3e-3"}
END_S = 300.0

Run = dict[str, Any]
Runs = dict[str, Run]


class Owner:
    """A client that trains in the swarm, with a key of its own."""

    def __init__(self, shell: Shell, word: str, sample: DemoInput) -> None:
        self.way = ("--invite", word)
        self._shell = shell
        self._sample = sample

    def trains(self, name: str, steps: int, report: str) -> Spawned:
        text = self._shell.cwd / "text.txt"
        whole = Path(self._sample.train_file).read_text(encoding="utf-8")
        text.write_text(whole[:4000], encoding="utf-8")
        codecs = ("--fw", "none", "--bw", "none", "--dp", "none", "--lr-schedule", "constant")
        return self._shell.spawn(
            *("client", "train", "--model", self._sample.model_dir, "--dataset", text),
            *("--steps", steps, "--batch-size", 1, "--micro-batch-size", 1, "--seq-length", 32),
            *("--lr", RATES[name], "--out", report, "--json", f"{report}.json", *codecs, *self.way),
        )

    def losses(self, report: str) -> list[float]:
        document: dict[str, Any] = json.loads((self._shell.cwd / f"{report}.json").read_text())
        assert document["went_back"] == []
        losses: list[float] = document["losses"]
        return losses


def run_of(client: Spawned) -> str:
    return client.wait_for("err", "watching run-").split("watching ")[1].split(";")[0]


def peers_of(run: Run) -> set[str]:
    return {stage["peer"] for stage in run["stages"] if not stage["joining"]}


@pytest.fixture
def owners(shell: Shell, sample: DemoInput, tmp_path: Path) -> tuple[Owner, Owner]:
    """Start a swarm with two peers for each of two stages, and return its two owners."""
    port = free_port()
    assert shell.spawn("init").ends() == 0
    place = ("--address", f"127.0.0.1:{port}", "--uses", 10)
    # Keys of one invitation share one claim to the peers: each owner has an invitation.
    peers, first, second = (
        shell.invited("--role", role, *place) for role in ("peer", "client", "client")
    )
    shell.up("coordinator", "--port", port, "--no-page")
    for index, layers in enumerate(("0-1", "1-3", "0-1", "1-3")):
        shell.up("serve-stage", peers, "--layers", layers, "--buffer-dir", f"peer-{index}")
    other = Shell(shell.cwd)
    other.env |= {"XDG_STATE_HOME": str(tmp_path / "other")}
    shell.closes(other)
    return Owner(shell, first, sample), Owner(other, second, sample)


def test_two_owners_train_side_by_side_and_each_as_if_alone(
    owners: tuple[Owner, Owner], run_here: RunHere
) -> None:
    one, two = owners

    def until(is_so: Callable[[Runs], bool]) -> Runs:
        """Return the runs that `status` shows once the condition holds."""
        while True:
            printed = run_here("status", "--json", *one.way)
            assert printed.code == 0, printed.err
            runs = {run["run"]: run for run in json.loads(printed.out)["runs"]}
            if is_so(runs):
                return runs

    first = one.trains("first", ENDLESS, "first")
    mine = run_of(first)
    until(lambda runs: runs[mine]["steps"] > 0 and len(peers_of(runs[mine])) == 4)

    second = two.trains("second", STEPS, "second")
    others = run_of(second)
    both = until(lambda runs: len(runs) == 2 and runs[others]["phase"] == "training")
    shares = [peers_of(both[run]) for run in (mine, others)]
    assert [len(peers) for peers in shares] == [2, 2]
    assert shares[0].isdisjoint(shares[1]), "nobody works for both"
    assert [both[run]["own"] for run in (mine, others)] == [True, False]
    assert both[mine]["phase"] == "training"

    assert second.ends(END_S) == 0, second.err
    until(lambda runs: runs[mine]["steps"] > STEPS and len(peers_of(runs[mine])) == 4)
    printed = run_here("losses", "--run", mine, "--json", *one.way)
    rows = [json.loads(line) for line in printed.out.splitlines()]
    disturbed = [row["loss"] for row in rows if "loss" in row][:STEPS]
    assert "went-back" not in run_here("events", *one.way).out
    assert run_here("client", "cancel", *one.way).code == 0, "of two runs it is one's own"
    assert first.ends() == 1

    for owner, name, losses in ((one, "first", disturbed), (two, "second", two.losses("second"))):
        quiet = owner.trains(name, STEPS, f"{name}-quiet")
        assert quiet.ends(END_S) == 0, quiet.err
        assert owner.losses(f"{name}-quiet") == losses
        assert len(losses) == STEPS
