"""Two owners with two machines each, and volunteers who come: all of them processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

from benchmarks.day.processes import Command, run_command
from swarm_ft.client.demo_input import DemoInput, write_demo_input

OWNERS = ("ann", "ben")
RATES = {"ann": "5e-3", "ben": "2e-3"}
OWN_LAYERS = ("0-2", "2-4", "0-2", "2-4")
CAP_MBPS = 1
"""With it links take most of a step, so both runs are about as fast, however many replicas."""
SEQ_LENGTH = 256


class Swarm:
    """See the module's docstring; use `open` and `close`.

    Args:
        folder: for all that is written.
        steps: of each run.
        is_quiet: two machines will do, and need no caps: one run comes after the other.

    Attributes:
        machines: that were started, by their names here.
        names: of the same in the swarm.
        page, metrics: the coordinator's.
    """

    def __init__(self, folder: Path, steps: int, *, is_quiet: bool = False) -> None:
        self.machines: dict[str, Command] = {}
        self.names: dict[str, str] = {}
        self.page = self.metrics = ""
        self.way: tuple[str, str] = ("", "")
        self._folder = folder
        self._steps = steps
        self._own_layers = OWN_LAYERS[:2] if is_quiet else OWN_LAYERS
        self._caps = () if is_quiet else ("--upload-mbps", CAP_MBPS)
        self._coordinator: Command | None = None
        self._peer_word = ""
        self._clients: list[Command] = []
        self._sample = make_sample(folder)

    async def open(self) -> None:
        """Start the coordinator and the owners' own machines."""
        home = self._folder / "coordinator"
        await (await Command.start("init", home, "init")).ends()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        place = ("--address", f"127.0.0.1:{port}", "--uses", 100)
        words = {
            role: (await run_command("invite", home, "invite", "--role", role, *place))[0]["invite"]
            for role in ("peer", "client")
        }
        self._peer_word, self.way = words["peer"], ("--invite", words["client"])
        http = ("--page", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        self._coordinator = await Command.start(
            "coordinator", home, "coordinator", "--port", port, *http, "--json"
        )
        greeting = await self._coordinator.first_words()
        self.page, self.metrics = greeting["page"], f"http://{greeting['metrics']}/metrics"
        await asyncio.gather(
            *(self.comes(f"owner-{i + 1}", layers) for i, layers in enumerate(self._own_layers))
        )

    async def close(self) -> None:
        """End everybody."""
        if self._coordinator is not None:
            everybody = [*self._clients, *self.machines.values(), self._coordinator]
            for command in everybody:
                await command.kill()

    def home(self, name: str) -> Path:
        """Return the directory of an owner or a machine."""
        return self._folder / name

    # ---- owners

    async def trains(self, owner: str, *others: object) -> Command:
        """Start a run; one sample a step, so that its sums are the same on any replicas.

        Args:
            owner: whose.
            others: options of `client train`, in the place of those here.
        """
        client = await Command.start(
            *(f"train-{owner}", self.home(owner), "client", "train"),
            *("--model", self._sample.model_dir, "--dataset", self._sample.train_file),
            *("--steps", self._steps, "--batch-size", 1, "--micro-batch-size", 1),
            *("--seq-length", SEQ_LENGTH),
            *("--adapter", "lora", "--lora-r", 2, "--lr", RATES[owner]),
            *("--fw", "none", "--bw", "none", "--dp", "none"),
            *("--max-eval-samples", 8, "--eval-steps", max(1, self._steps // 5)),
            *("--out", "out", "--json", "report.json", *self.way, *others),
        )
        self._clients.append(client)
        return client

    def report(self, owner: str) -> dict[str, Any]:
        """Read the report of an owner's run after its end."""
        text = (self.home(owner) / "report.json").read_text(encoding="utf-8")
        report: dict[str, Any] = json.loads(text)
        return report

    # ---- machines

    async def comes(self, name: str, layers: str = "auto", *others: object) -> None:
        """Let a machine join, or join again.

        Args:
            name: here.
            layers: that it offers.
            others: options of `serve-stage`, in the place of those here.
        """
        models = ("--models", self._sample.model_dir)
        resources = ("--layers", layers, "--threads", 1, *models, *self._caps, *others)
        home = ("--buffer-dir", self.home(name) / "peer")
        self.machines[name] = await Command.start(
            name, self.home(name), "serve-stage", self._peer_word, *resources, *home, "--json"
        )
        self.names[name] = (await self.machines[name].first_words())["peer"]

    async def pauses(self, name: str) -> None:
        """Pause a peer by its volunteer's command and wait until it has paused."""
        await self._control(name, "pause")

    async def resumes(self, name: str) -> None:
        """Resume a peer by its volunteer's command and wait until it has resumed."""
        await self._control(name, "resume")

    async def leaves(self, name: str) -> None:
        """Ctrl-C, and it goes when it may."""
        await self.machines[name].leaves()

    async def fails(self, name: str) -> None:
        """Kill a machine without notice."""
        await self.machines[name].kill()

    def signals(self, name: str, number: signal.Signals) -> None:
        """Freeze it, or let it go on."""
        self.machines[name].send(number)

    async def _control(self, name: str, verb: str) -> None:
        home = ("--buffer-dir", self.home(name) / "peer")
        await run_command(f"{name}-{verb}", self.home(name), "peer", verb, *home)


def make_sample(folder: Path) -> DemoInput:
    """Write the model and its text; they are the same each time."""
    return write_demo_input(folder / "input", seed=1, num_layers=4, hidden_size=64, vocab_size=300)
