"""Volunteers who leave, pause and come back, as processes: nothing is lost by it."""

import json
import re
import signal
from typing import Any

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell, Spawned, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.xdist_group("swarm")]

STEPS = 200


class Swarm:
    """A coordinator and its members."""

    def __init__(self, shell: Shell, *options: object) -> None:
        self.shell = shell
        port, journal = free_port(), ("--journal", shell.cwd / "journal.db")
        assert shell.spawn("init", *journal).ends() == 0
        place = ("--address", f"127.0.0.1:{port}", "--uses", 100, *journal)
        self.peer_way = shell.invited(*place)
        self.client_way = ("--invite", shell.invited("--role", "client", *place))
        self.coordinator = shell.up("coordinator", "--port", port, *journal, *options)

    def peer(self, name: str, *options: object) -> Spawned:
        home = ("--buffer-dir", self.shell.cwd / name)
        return self.shell.spawn("serve-stage", self.peer_way, *home, *options)

    def train(self, name: str, sample: DemoInput, *options: object) -> Spawned:
        report = self.shell.cwd / f"{name}.json"
        return self.shell.spawn(
            *("client", "train", "--model", sample.model_dir, "--dataset", sample.train_file),
            *("--steps", STEPS, "--batch-size", 4, "--seq-length", 32, "--fw", "none"),
            *("--bw", "none", "--dp", "none", "--json", report, "--out", self.shell.cwd / name),
            *(*self.client_way, *options),
        )

    def report(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.shell.cwd / f"{name}.json").read_text())
        return report


def quietly(swarm: Swarm, sample: DemoInput, *peers: Spawned) -> list[float]:
    """The losses of a run that nothing disturbed."""
    for peer in peers:
        peer.wait_for("out", "Ctrl-C leaves")
    client = swarm.train("quiet", sample)
    assert client.ends(120) == 0, client.err
    losses: list[float] = swarm.report("quiet")["losses"]
    return losses


def assert_one_count(swarm: Swarm, peer: Spawned, shell: Shell) -> None:
    """The farewell, the event of the end and `status` have the same digits (users-3, volunteer 3).

    Without the tunnel's and TLS' bytes, training traffic is a part of all traffic.
    """
    farewell = re.fullmatch(r"\S+ gave (?P<given>.+); thank you", peer.out[-1])
    assert farewell is not None, peer.out
    events = shell.spawn("events", *swarm.client_way, "--since", 0)
    assert events.ends(60) == 0, events.err
    assert any(line.endswith(f" left; it gave {farewell['given']}") for line in events.out), (
        events.out
    )
    status = shell.spawn("status", *swarm.client_way, "--json")
    assert status.ends(60) == 0, status.err
    known = json.loads("".join(status.out))["contributors"]
    (contribution,) = [one for one in known if one["words"] == farewell["given"]]
    assert 0 < contribution["sent_bytes"] < contribution["all_bytes"]


def test_ctrl_c_on_the_last_peer_of_a_stage_loses_no_step(shell: Shell, sample: DemoInput) -> None:
    swarm = Swarm(shell)
    first = swarm.peer("first", "--layers", "0-1")
    last = swarm.peer("last", "--layers", "1-3")
    quiet = quietly(swarm, sample, first, last)

    auto = swarm.peer("auto")
    auto.wait_for("out", "Ctrl-C leaves")
    client = swarm.train("disturbed", sample)
    client.wait_for("err", "step 1/")
    first.signal(signal.SIGINT)
    assert first.ends(100) == 0, first.err
    assert any("copies the state" in line or "can take over" in line for line in first.err)
    assert_one_count(swarm, first, shell)
    assert client.ends(120) == 0, client.err

    report = swarm.report("disturbed")
    assert report["steps"] == STEPS
    # Of two replicas' sums the last bits are others than of one's.
    assert report["losses"] == pytest.approx(quiet, abs=1e-5)
    lines = (*client.err, *swarm.coordinator.err)
    assert not any("goes back" in line or "went back" in line for line in lines)
    assert auto.interrupted() == 0
    assert "; thank you" in auto.out[-1]


def test_no_file_stays(shell: Shell) -> None:
    """Walk the steps of docs/how-to/lend-a-machine.md, "Leave, and uninstall".

    The name is short: the path of the peer's socket has room for 107 letters.
    """
    swarm = Swarm(shell)
    peer = shell.spawn("serve-stage", swarm.peer_way)
    peer.wait_for("out", "Ctrl-C leaves")
    running = shell.spawn("clean", "--all", "--yes")
    assert running.ends() == 1
    assert "its peer is running" in running.out[0]
    assert shell.spawn("peer", "drain").ends(60) == 0
    assert peer.ends(60) == 0
    assert shell.spawn("clean", "--all", "--yes").ends() == 0
    places = [shell.cwd / name for name in ("cache", "state", "config")]
    assert [path for place in places for path in place.rglob("*") if path.is_file()] == []
