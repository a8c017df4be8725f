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
from swarm_ft.api.swarm_keys import first_invitations, with_address
from swarm_ft.identity.roles import Role

STOP_TIMEOUT_S = 10.0
USES = 1000
"""Of an invitation: whoever is killed and started again may come with a new key."""


@dataclass
class LabSwarm:
    """Use it in a `with`: at its end all of its processes are gone.

    Attributes:
        folder: for logs, the journal, what peers and clients keep.
        hub: the host of DHT, coordinator and client, with a link that nothing waits for.
        snapshots: where they lie; None keeps none.
        tls: links are encrypted, as users have them; else plaintext.
        ways: by role, the options with which others join.
    """

    folder: Path
    hub: Host
    snapshots: Path | None = None
    tls: bool = True
    ways: dict[Role, tuple[str, ...]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        listen = f"/ip4/{self.hub.address}/tcp/0"
        first = self.start("dht", self.hub, ("dht", "--host-maddrs", listen, "--json"))
        nodes = ("--initial-peers", str(first["addresses"][0]))
        journal = str(self.folder / "coordinator.db")
        command = ("coordinator", "--host", self.hub.address, "--journal", journal, *nodes)
        options = (*self.snapshot_options, "--json")
        if self.tls:
            invited = first_invitations(journal, {Role.PEER: USES, Role.CLIENT: USES})
            words = self.start("coordinator", self.hub, (*command, *options))
            for role, invite in invited.items():
                self.ways[role] = ("--invite", str(with_address(words["endpoint"], invite)))
        else:
            self.start("coordinator", self.hub, (*command, *options, "--insecure"))
            self.ways = dict.fromkeys((Role.PEER, Role.CLIENT), ("--insecure", *nodes))
        return self

    @property
    def client_way(self) -> tuple[str, ...]:
        """The options of a client of the swarm."""
        return self.ways[Role.CLIENT]

    @property
    def snapshot_options(self) -> tuple[str, ...]:
        """The snapshot options of coordinator and peers."""
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
        """Start a peer; jobs may name models beside this swarm's folder, or in `options`."""
        place = ("--host", host.address, "--layers", layers, "--threads", "1")
        way = self.ways[Role.PEER]
        identity = way[1:] if self.tls else (*way, "--peer-id", name)
        models = ("--models", str(self.folder.parent))
        arguments = (*place, *models, *options, *self.snapshot_options, "--json")
        self.start(name, host, ("serve-stage", *identity, *arguments))

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
        environment: Mapping[str, str] = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(self.folder / "clients"),
            "XDG_CACHE_HOME": str(self.folder / "peers"),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        self.processes[name] = process
        return process

    def trained(self, folder: Path, job: Sequence[str]) -> dict[str, Any]:
        """Let a client at the hub train a job to its end; its report. The result is in `folder`.

        Raises:
            RuntimeError: it failed; the text is its log.
        """
        report = folder / "report.json"
        written = ("--json", str(report), "--out", str(folder / "out"))
        command = ("client", "train", *job, *written, *self.client_way)
        if self.begin("client", self.hub, command).wait() != 0:
            raise RuntimeError((self.folder / "client.log").read_text(encoding="utf-8"))
        document: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return document

    def num_steps(self) -> int:
        """Return the committed steps of the first run."""
        runs = self.start("status", self.hub, ("status", *self.client_way, "--json"))["runs"]
        return int(runs[0]["steps"]) if runs else 0

    def kill(self, name: str) -> None:
        """End a process without a word to anybody, and wait until it is gone."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.communicate()
