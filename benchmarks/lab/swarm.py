"""A swarm of real processes on the hosts of a lab. Knows commands, not what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.lab.host import Host

STOP_TIMEOUT_S = 10.0


@dataclass
class LabSwarm:
    """Use it in a `with`: at its end all of its processes are gone.

    Attributes:
        folder: for logs, the journal, what peers keep.
        hub: the host of DHT, coordinator and client, with a link that nothing waits for.
        snapshots: where they lie; None keeps none.
    """

    folder: Path
    hub: Host
    snapshots: Path | None = None
    initial_peers: str = ""
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        listen = f"/ip4/{self.hub.address}/tcp/0"
        first = self.start("dht", self.hub, ("dht", "--host-maddrs", listen, "--json"))
        self.initial_peers = str(first["addresses"][0])
        journal = str(self.folder / "coordinator.db")
        self.start(
            "coordinator",
            self.hub,
            (
                *("coordinator", "--host", self.hub.address, "--journal", journal),
                *self.common,
                *self.snapshot_options,
            ),
        )
        return self

    @property
    def common(self) -> tuple[str, ...]:
        """What every command of the swarm is told."""
        return "--initial-peers", self.initial_peers, "--json"

    @property
    def snapshot_options(self) -> tuple[str, ...]:
        """What coordinator and peers are told of snapshots."""
        return ("--snapshots", str(self.snapshots)) if self.snapshots else ()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.communicate()

    def peer(self, name: str, host: Host, layers: str, *options: str) -> None:
        """Start a peer."""
        place = ("--host", host.address, "--peer-id", name, "--layers", layers, "--threads", "1")
        told = (*options, *self.common, *self.snapshot_options)
        self.start(name, host, ("serve-stage", *place, *told))

    def start(
        self, name: str, host: Host, arguments: Sequence[str], *, module: str = "swarm_ft"
    ) -> dict[str, Any]:
        """Start `python -m MODULE ARGUMENTS` on a host; the first JSON that it prints.

        Raises:
            RuntimeError: it ended before.
        """
        process = self.begin(name, host, arguments, module=module)
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"{name} ended at once; see {self.folder / name}.log")
        words: dict[str, Any] = json.loads(line)
        return words

    def begin(
        self, name: str, host: Host, arguments: Sequence[str], *, module: str = "swarm_ft"
    ) -> subprocess.Popen[str]:
        """Start `python -m MODULE ARGUMENTS` on a host."""
        command = host.command(sys.executable, "-m", module, *arguments)
        environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.processes[name] = process
        return process

    def num_steps(self) -> int:
        """Steps of the first run that are committed."""
        runs = self.start("status", self.hub, ("status", *self.common))["runs"]
        return int(runs[0]["steps"]) if runs else 0

    def kill(self, name: str) -> None:
        """End a process without a word to anybody, and wait until it is gone."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.communicate()
