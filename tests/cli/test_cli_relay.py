"""`swarm-ft relay`: what it refuses, and two in a swarm of homes, one of which dies."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.lab.homes import Home, Internet, Nat, why_not
from benchmarks.lab.host import THIS_MACHINE, Host
from benchmarks.lab.hub import Link
from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import RunHere, Shell, Spawned

DELAYED = Link(delay_ms=10.0)
NUM_STEPS = 40

in_homes = pytest.mark.skipif(bool(why_not(Home(link=DELAYED))), reason=why_not(Home(link=DELAYED)))


def test_a_relay_needs_an_invitation(run_here: RunHere) -> None:
    ended = run_here("relay")
    assert (ended.code, ended.out) == (2, "")
    assert "swarm-ft invite --role relay" in ended.err


@pytest.mark.parametrize(
    ("option", "value"), [("--max-links", "0"), ("--max-mbps", "0"), ("--max-link-mbps", "-1")]
)
def test_a_relay_gives_something_or_is_none(run_here: RunHere, option: str, value: str) -> None:
    ended = run_here("relay", option, value)
    assert ended.code == 2
    assert option in ended.err


def test_a_relays_invitation_is_for_nothing_else(
    run_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_here("init")
    made = run_here("invite", "--role", "relay", "--address", "h:1")
    assert made.code == 0
    assert "for 1 relay, until" in made.err
    assert "swarm-ft relay @FILE" in made.err
    assert made.out.strip() not in made.err, "users copy the command, and 'ps' shows its words"
    refused = run_here("invite", "--role", "relay", "--layers", "0-2", "--address", "h:1")
    assert refused.code == 2
    assert "a relay hosts no layers" in refused.err


@pytest.mark.slow
@pytest.mark.xdist_group("swarm")
def test_a_relay_is_known_as_long_as_it_is_there(shell: Shell) -> None:
    assert shell.spawn("init").ends() == 0
    coordinator = shell.up("coordinator", "--no-relay")
    word = shell.invited("--role", "relay")
    relay = shell.up("relay", word, "--host", "127.0.0.1", "--max-links", 7)
    greeting = relay.first_words()
    assert greeting["max_links"] == 7
    client = shell.invited("--role", "client")
    status = shell.spawn("status", "--invite", client, "--json")
    assert status.ends() == 0
    (known,) = status.first_words()["relays"]
    assert (known["relay"], known["endpoint"]) == (greeting["relay"], greeting["endpoint"])
    shell.env["XDG_STATE_HOME"] = str(shell.cwd / "another's")
    peer = shell.spawn("relay", shell.invited(), "--host", "127.0.0.1")
    assert peer.ends() == 1
    assert "expected a call by a relay, got one by peer" in peer.err[-1]
    assert relay.interrupted() == 0, relay.err
    assert coordinator.interrupted() == 0


# ---- in homes


@pytest.fixture
def furnish() -> Iterator[Callable[[Nat], Host]]:
    """The machine of a household of this kind on the one internet."""
    with Internet() as internet:
        yield lambda nat: internet.household(Home(nat, link=DELAYED)).machines[0]


Furnish = Callable[[Nat], Host]


class Town:
    """A swarm of two peers and a client, whose every machine has its own state."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def shell(self, name: str, host: Host) -> Shell:
        folder = self._folder / name
        folder.mkdir(parents=True)
        shell = Shell(folder, host)
        shell.env["XDG_STATE_HOME"] = str(folder)
        self._stack.callback(shell.close)
        return shell

    def coordinator(self, host: Host, *options: object) -> Shell:
        shell = self.shell("coordinator", host)
        assert shell.spawn("init").ends() == 0
        shell.up("coordinator", "--host", "0.0.0.0", "--announce", host.address, *options)
        return shell

    def peers(self, owner: Shell, *hosts: Host) -> list[Spawned]:
        return [
            self.shell(f"peer-{layers}", host).up(
                "serve-stage", owner.invited(), "--layers", layers
            )
            for host, layers in zip(hosts, ("0-1", "1-3"), strict=True)
        ]

    def train(self, owner: Shell, host: Host, sample: DemoInput) -> Callable[[], list[float]]:
        shell = self.shell("client", host)
        report = shell.cwd / "report.json"
        client = shell.spawn(
            *("client", "train", "--model", sample.model_dir, "--json", report),
            *("--dataset", sample.train_file, "--steps", NUM_STEPS, "--max-samples", 40),
            *("--batch-size", 4, "--seq-length", 32, "--fw", "aq4", "--bw", "q8"),
            *("--invite", owner.invited("--role", "client")),
        )

        def losses() -> list[float]:
            assert client.ends(200) == 0, client.err
            found: list[float] = json.loads(report.read_text(encoding="utf-8"))["losses"]
            return found

        return losses


@pytest.fixture(scope="module")
def quiet(sample: DemoInput, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the same job on one machine, on which nothing happens."""
    with ExitStack() as stack:
        town = Town(tmp_path_factory.mktemp("quiet"), stack)
        owner = town.coordinator(THIS_MACHINE)
        town.peers(owner, THIS_MACHINE, THIS_MACHINE)
        return town.train(owner, THIS_MACHINE, sample)()


@pytest.mark.slow
@pytest.mark.homes
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("swarm")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@in_homes
def test_a_relay_that_dies_costs_no_step(
    furnish: Furnish, quiet: list[float], sample: DemoInput, tmp_path: Path, how: signal.Signals
) -> None:
    with ExitStack() as stack:
        town = Town(tmp_path / "homes", stack)
        owner = town.coordinator(furnish("open"), "--no-relay")
        relays = [
            town.shell(f"relay-{i}", furnish("open")).up(
                "relay", owner.invited("--role", "relay"), "--log-level", "DEBUG"
            )
            for i in range(2)
        ]
        peers = town.peers(owner, furnish("symmetric"), furnish("symmetric"))
        losses = town.train(owner, furnish("cone"), sample)
        peers[0].wait_for("err", f"step 8 of {NUM_STEPS}")
        carrying, other = sorted(relays, key=carries_any, reverse=True)
        assert carries_any(carrying)
        before = times_relayed(peers)
        carrying.signal(how)
        assert losses() == quiet
        assert times_relayed(peers) > before, [peer.err for peer in peers]
        assert carries_any(other)
        assert other.interrupted() == 0


def carries_any(relay: Spawned) -> bool:
    return any("a link begins" in line for line in relay.err)


def times_relayed(peers: list[Spawned]) -> int:
    """Count the times at which one of them had a stream to the other."""
    return sum("relayed, after" in line for peer in peers for line in peer.err)
