"""A swarm of a few peers and a client, each a machine of a lab or this one, through one job."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.host import THIS_MACHINE, Host
from benchmarks.lab.hub import Link
from swarm_ft.base.failpoints import VARIABLE, reached_file
from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell, Spawned

DELAYED = Link(delay_ms=10.0)
"""What homes of a town are at, so that links take their time to be made."""
LAYERS = ("0-1", "1-3")
STEP_TIMEOUT_S, END_TIMEOUT_S = 120.0, 200.0
PARTS = 10
"""Of a run; a client tells of each."""
POLL_S = 0.01


@dataclass
class Town:
    """See the module's docstring. Use it once.

    Attributes:
        public: where the coordinator is.
        peers: where they are.
        client: where that is.
        seen_at: the coordinator's address, as the others see it, and its port, where its router
            forwards nothing else; empty: its machine's own, and any.
        relay: where a relay of its own process is; None: there is only the coordinator's.
        layers: the layers that each peer hosts.
    """

    folder: Path
    public: Host = THIS_MACHINE
    peers: tuple[Host, ...] = (THIS_MACHINE, THIS_MACHINE)
    client: Host = THIS_MACHINE
    seen_at: tuple[str, int] | tuple[()] = ()
    relay: Host | None = None
    layers: Sequence[str] = LAYERS
    running: dict[str, Spawned] = field(default_factory=dict)
    _shells: dict[str, Shell] = field(default_factory=dict)

    def train(
        self, sample: DemoInput, num_steps: int, troubles: Sequence[Trouble] = ()
    ) -> dict[str, Any]:
        """The report of one job, after which all have ended as they should.

        Args:
            sample: its model and its text.
            num_steps: of it.
            troubles: what happens meanwhile, one after the other.
        """
        hosts = {"public": self.public, "client": self.client}
        hosts |= {f"peer-{i}": host for i, host in enumerate(self.peers)}
        hosts |= {"relay": self.relay} if self.relay else {}
        with ExitStack() as stack:
            for name, host in hosts.items():
                (self.folder / name).mkdir(parents=True)
                self._shells[name] = Shell(self.folder / name, host)
                self._shells[name].env[VARIABLE] = str(self._orders(name))
                stack.callback(self._shells[name].close)
            self._open()
            self._submit(sample, num_steps)
            for trouble in troubles:
                self.reaches(trouble.part, num_steps)
                trouble.happens(self)
            client = self.running.pop("client")
            assert client.ends(END_TIMEOUT_S) == 0, self.said()
            for process in reversed(self.running.values()):
                assert process.interrupted() == 0, process.err
        document: dict[str, Any] = json.loads(self._report.read_text(encoding="utf-8"))
        return document

    def reaches(self, part: int, num_steps: int, timeout_s: float = STEP_TIMEOUT_S) -> None:
        """Wait until so many tenths of the run are done."""
        step = part * num_steps // PARTS
        try:
            self.running["client"].wait_for("err", f"step {step}/", timeout_s)
        except AssertionError:
            raise AssertionError(f"no step {step}: {json.dumps(self.said(), indent=1)}") from None

    def said(self) -> Mapping[str, list[str]]:
        """Return everybody's standard error."""
        return {name: process.err for name, process in self.running.items()}

    def start_coordinator(self) -> None:
        """Start it, or start it again from its journal."""
        address, port = self.seen_at or (self.public.address, 0)
        listening = ("--host", "0.0.0.0", "--port", port, "--announce", address)
        self.running["public"] = self._shells["public"].up("coordinator", *listening)

    def kill_coordinator(self) -> None:
        """Kill the coordinator with the relay beside it."""
        self.running["public"].signal(signal.SIGKILL)
        self.running["public"].ends()

    def kill_relay(self) -> None:
        """Kill the relay in the middle of a step, with links over it; wait for new ones."""
        relay = self.running.pop("relay")
        before = self._times_relayed()
        with self._held("peer-0", "mid-backward"):
            assert carries_any(relay), relay.err
            relay.signal(signal.SIGKILL)
            relay.ends()
        self._wait_until(lambda: self._times_relayed() > before)

    def order(self, fault: str) -> None:
        """The coordinator meets this fault as it sends the next commit to exactly one peer."""
        self._orders("public").write_text(f"{fault} commit-said 1", encoding="utf-8")

    @contextmanager
    def _held(self, name: str, point: str) -> Iterator[None]:
        """Hold this process at a fail point, which it soon reaches."""
        self._orders(name).write_text(f"hold {point} 1", encoding="utf-8")
        reached = reached_file(self._orders(name))
        self._wait_until(reached.exists)
        yield
        reached.unlink()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Other processes see to it."""
        until_s = time.monotonic() + STEP_TIMEOUT_S
        while not is_so():
            assert time.monotonic() < until_s, json.dumps(self.said(), indent=1)
            time.sleep(POLL_S)

    def _times_relayed(self) -> int:
        """Count the times at which one peer reached the other over a relay."""
        peers = [self.running[f"peer-{i}"] for i in range(len(self.peers))]
        return sum("relayed, after" in line for peer in peers for line in peer.err)

    def _orders(self, name: str) -> Path:
        return self.folder / f"{name}.orders"

    @property
    def _report(self) -> Path:
        return self.folder / "report.json"

    def _open(self) -> None:
        public = self._shells["public"]
        assert public.spawn("init").ends() == 0
        self.start_coordinator()
        if self.relay:
            self._start_relay(public.invited("--role", "relay"))
        word = public.invited("--uses", len(self.layers))
        for i, layers in enumerate(self.layers):
            peer = self._shells[f"peer-{i}"].up("serve-stage", word, "--layers", layers)
            self.running[f"peer-{i}"] = peer

    def _start_relay(self, word: str) -> None:
        shell = self._shells["relay"]
        shell.env["XDG_STATE_HOME"] = str(shell.cwd)
        self.running["relay"] = shell.up("relay", word, "--log-level", "DEBUG")

    def _submit(self, sample: DemoInput, num_steps: int) -> None:
        self.running["client"] = self._shells["client"].spawn(
            *("client", "train", "--model", sample.model_dir, "--json", self._report),
            *("--dataset", sample.train_file, "--steps", num_steps, "--max-samples", 40),
            *("--batch-size", 4, "--seq-length", 32, "--fw", "aq4", "--bw", "q8"),
            *("--invite", self._shells["public"].invited("--role", "client")),
        )


@dataclass(frozen=True, slots=True)
class Trouble:
    """A disturbance in the midst of a job.

    Attributes:
        part: tenths of the run that are done by then.
        happens: does it.
    """

    part: int
    happens: Callable[[Town], None]


def carries_any(relay: Spawned) -> bool:
    """Whether a link is over this relay now; it logs each."""
    begun_or_ended = [
        line for line in relay.err if "a link begins" in line or "a link ended" in line
    ]
    return bool(begun_or_ended) and not begun_or_ended[-1].endswith(": 0 now")
