"""A swarm whose peers and client are behind home routers, by one word each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.homes import Home, Household, Internet, Nat, why_not
from benchmarks.lab.host import THIS_MACHINE, Host
from benchmarks.lab.hub import Link
from swarm_ft.client.sample import SampleInput
from tests.cli.conftest import Shell

DELAYED = Link(delay_ms=10.0)
NUM_STEPS, LONG = 20, 400
"""Each tenth part is told of: troubles come then."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("swarm"),
    pytest.mark.skipif(bool(why_not(Home(link=DELAYED))), reason=why_not(Home(link=DELAYED))),
]

Furnish = Callable[[Nat], Household]
Troubles = Sequence[tuple[int, Callable[[], None]]]


@pytest.fixture
def furnish() -> Iterator[Furnish]:
    """A household of this kind on the one internet."""
    with Internet() as internet:
        yield lambda nat: internet.household(Home(nat, link=DELAYED))


@dataclass
class Town:
    """A swarm of two peers and a client, each in its place.

    Attributes:
        public: where the coordinator is.
    """

    folder: Path
    public: Host
    peers: tuple[Host, Host]
    client: Host

    def train(
        self, sample: SampleInput, num_steps: int = NUM_STEPS, troubles: Troubles = ()
    ) -> dict[str, Any]:
        """The report of one job, after which all have ended as they should.

        Args:
            sample: its model and its text.
            num_steps: of it.
            troubles: what to do once the client tells of a step.
        """
        with ExitStack() as stack:
            hosts = {"public": self.public, "client": self.client}
            hosts |= {f"peer-{i}": host for i, host in enumerate(self.peers)}
            at = {name: self._shell(name, host, stack) for name, host in hosts.items()}
            assert at["public"].spawn("init").ends() == 0
            listening = ("--host", "0.0.0.0", "--announce", self.public.address)
            coordinator = at["public"].up("coordinator", *listening)
            word = at["public"].invited("--uses", 2)
            peers = [
                at[f"peer-{i}"].up("serve-stage", word, "--layers", layers)
                for i, layers in enumerate(("0-1", "1-3"))
            ]
            report = self.folder / "report.json"
            client = at["client"].spawn(
                *("client", "train", "--model", sample.model_dir, "--json", report),
                *("--dataset", sample.train_file, "--steps", num_steps, "--max-samples", 40),
                *("--batch-size", 4, "--seq-length", 32, "--fw", "aq4", "--bw", "q8"),
                *("--invite", at["public"].invited("--role", "client")),
            )
            for step, trouble in troubles:
                client.wait_for("err", f"step {step}/", timeout_s=120)
                trouble()
            assert client.ends(200) == 0, client.err
            for process in (*peers, coordinator):
                assert process.interrupted() == 0, process.err
        told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return told

    def _shell(self, name: str, host: Host, stack: ExitStack) -> Shell:
        folder = self.folder / name
        folder.mkdir(parents=True)
        shell = Shell(folder, host)
        stack.callback(shell.close)
        return shell


def test_a_swarm_behind_routers_trains_as_one_on_one_machine(
    furnish: Furnish, sample: SampleInput, tmp_path: Path
) -> None:
    public = furnish("open").machines[0]
    houses = [furnish(nat) for nat in ("cone", "cgnat", "symmetric")]
    one, two, three = (house.machines[0] for house in houses)
    told = Town(tmp_path / "homes", public, (one, two), three).train(sample)
    here = (THIS_MACHINE, THIS_MACHINE)
    quiet = Town(tmp_path / "quiet", THIS_MACHINE, here, THIS_MACHINE).train(sample)
    assert told["losses"] == quiet["losses"]
    assert [house.router.num_accepted for house in houses] == [0, 0, 0]


def test_routers_that_forget_and_addresses_that_change_cost_no_step(
    furnish: Furnish, sample: SampleInput, tmp_path: Path
) -> None:
    public = furnish("open").machines[0]
    houses = [furnish(nat) for nat in ("cone", "cone", "symmetric")]
    one, two, three = (house.machines[0] for house in houses)
    troubles = (
        (40, houses[0].router.flush_connections),
        (120, houses[1].router.change_address),
        (200, houses[2].router.flush_connections),
    )
    town = Town(tmp_path / "homes", public, (one, two), three)
    told = town.train(sample, num_steps=LONG, troubles=troubles)
    here = (THIS_MACHINE, THIS_MACHINE)
    quiet = Town(tmp_path / "quiet", THIS_MACHINE, here, THIS_MACHINE).train(sample, num_steps=LONG)
    assert told["losses"] == quiet["losses"]
