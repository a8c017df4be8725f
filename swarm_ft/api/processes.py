"""A whole swarm on this machine as child processes: their start, supervision and end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from swarm_ft.api.connections import DHT_PREFIX, SwarmAddress, connect
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.swarm_keys import first_invitations, keys_folder, with_address
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import NotFound, OutOfTurn, RunFailed
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.spec.options import arguments

JOURNAL, CLIENT_KEY = "coordinator.db", "client.pem"
"""Names of files in a swarm's folder."""
START_TIMEOUT_S = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""Signals that stop a child: drain, leave at once, kill."""
STOP_TIMEOUT_S = 5.0
"""Seconds to wait after each signal."""


@dataclass(frozen=True, slots=True)
class Child:
    """A running command; children named ROLE.1, ROLE.2, ... can replace each other."""

    name: str
    process: asyncio.subprocess.Process
    log_file: Path

    @property
    def role(self) -> str:
        """The role of the child, of which the run needs at least one."""
        return self.name.partition(".")[0]


class ProcessSwarm:
    """Commands of `swarm-ft` as children of this process, each with its own log.

    Args:
        log_dir: Directory for one log file per process, created if absent.

    Attributes:
        page: Address of the coordinator's web page, once the coordinator is running.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []
        self.page = ""

    async def start_all(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start several commands at once.

        Args:
            commands: Arguments of each command, by the child's name.

        Raises:
            RunFailed: A child ended or was not ready in time; the others may be running.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name, arguments in commands.items():
                    group.create_task(self.start(name, arguments))
        except* RunFailed as failures:
            raise failures.exceptions[0] from None

    async def start(self, name: str, arguments: Sequence[str]) -> dict[str, object]:
        """Start `swarm-ft ARGUMENTS --json`, and return its first line of JSON.

        Raises:
            RunFailed: The child ended or was not ready in time.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_file = self._log_dir / f"{name}.log"
        command = (sys.executable, "-m", "swarm_ft", *arguments, "--json")
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                # This process handles Ctrl-C in the terminal, and stops the children in order.
                start_new_session=True,
            )
        child = Child(name, process, log_file)
        self._children.append(child)
        return await self._first_line(child)

    async def _first_line(self, child: Child) -> dict[str, object]:
        stdout = child.process.stdout
        if stdout is None:
            raise RunFailed(f"{child.name}: started without a pipe")
        try:
            line = await asyncio.wait_for(stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise RunFailed(
                f"{child.name} was not ready in {START_TIMEOUT_S:g} s; see {child.log_file}"
            ) from None
        if not line:
            await child.process.wait()
            raise RunFailed(f"{child.name} ended at once: {_last_line(child.log_file)}")
        document: dict[str, object] = json.loads(line)
        return document

    async def wait_for_failure(self, on_end: Callable[[str], None]) -> None:
        """Wait until a child ends that no other child can replace.

        Args:
            on_end: Callback for a line about a child that ended while its replicas go on.

        Raises:
            RunFailed: Always, with the child's name and its last log line.
        """
        waits = {asyncio.ensure_future(c.process.wait()): c for c in self._children}
        try:
            while True:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for child in [waits.pop(wait) for wait in done]:
                    ended = f"{child.name} ended with {child.process.returncode}"
                    if child.role not in {other.role for other in waits.values()}:
                        raise RunFailed(f"{ended}: {_last_line(child.log_file)}")
                    on_end(f"{ended}; others host its layers, and the run goes on")
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Stop all children, the last one first, by stronger and stronger signals."""
        for number in ENDING_SIGNALS:
            alive = [child.process for child in self._children if child.process.returncode is None]
            for process in reversed(alive):
                process.send_signal(number)
            if alive:
                waits = [asyncio.ensure_future(process.wait()) for process in alive]
                await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
        self._children.clear()

    def kill(self, name: str | None = None) -> None:
        """Kill a child, or all of them."""
        for child in self._children:
            if child.process.returncode is None and name in (None, child.name):
                child.process.kill()


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1]} (see {log_file})" if lines else f"see {log_file}"


# ---- a whole swarm


class ProcessMembers:
    """A coordinator and peers as own processes, with the interface of `MembersHere`.

    Args:
        folder: Directory for keys, journal, snapshots, buffers and logs.
        threads: CPU threads of each peer.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self._folder = folder
        self._threads = threads
        self._swarm = ProcessSwarm(folder / "logs")
        self._connection = AsyncExitStack()
        self._layers: dict[str, str] = {}
        self._model = ""
        self._client: SwarmClient | None = None

    @property
    def client(self) -> SwarmClient:
        """The connection to the swarm.

        Raises:
            OutOfTurn: No job has started the swarm yet.
        """
        if self._client is None:
            raise OutOfTurn("no job has started this swarm's processes yet; call train() first")
        return self._client

    @property
    def peers(self) -> Mapping[str, str]:
        """The layers of each peer, by its name."""
        return self._layers

    async def open(self) -> None:
        """Do nothing: the first `host` starts the processes."""

    async def host(self, layers: Mapping[str, str], model: str) -> None:
        """Restart the swarm with these peers, unless it has them and this model.

        Args:
            layers: Layers of each peer, by its name.
            model: Directory or hub id that jobs may name.

        Raises:
            RunFailed: A process ended or was not ready in time.
        """
        if layers == self._layers and model == self._model:
            return
        await self.close()
        delete_leftovers(self._folder, BufferOptions(directory=self._folder / "buffers"))
        buffers = BufferOptions(directory=self._folder / "buffers")
        way = await start_swarm(
            self._swarm, layers, buffers, self._folder, model=model, threads=self._threads
        )
        key = keys_folder(str(self._folder / JOURNAL)) / CLIENT_KEY
        self._client = await self._connection.enter_async_context(connect(way, key))
        self._layers, self._model = dict(layers), model

    async def kill(self, name: str) -> None:
        """Kill a peer without a handover.

        Raises:
            NotFound: There is no such peer.
        """
        if self._layers.pop(name, None) is None:
            known = ", ".join(self._layers) or "none"
            raise NotFound(f"peer: expected one of {known}, got {name}")
        self._swarm.kill(name)

    async def wait_for_failure(self) -> None:
        """Wait until a process ends that no other process can replace.

        Raises:
            RunFailed: Always, with the process's name and its last log line.
        """
        await self._swarm.wait_for_failure(lambda _words: None)

    async def close(self) -> None:
        """Stop all members."""
        await self._connection.aclose()
        await self._swarm.stop()
        self._layers, self._client = {}, None


async def start_swarm(
    swarm: ProcessSwarm,
    peers: Mapping[str, str],
    buffers: BufferOptions,
    work_dir: Path,
    *,
    model: str,
    threads: int = 1,
) -> SwarmAddress:
    """Start a coordinator and peers with new keys, and return a client's way in.

    Args:
        swarm: Owner of the processes.
        peers: Layers of each peer, by its name.
        buffers: Buffers of each peer, which gets its own folder in the directory.
        work_dir: Directory for the journal, the keys and the snapshots.
        model: Directory or hub id that jobs may name.
        threads: CPU threads of each peer.

    Raises:
        RunFailed: A process ended or was not ready in time.
    """
    journal = str(work_dir / JOURNAL)
    invited = first_invitations(journal, {Role.PEER: len(peers), Role.CLIENT: 1})
    common = ("--snapshots", str((work_dir / "snapshots").resolve()))
    started = await swarm.start("coordinator", ["coordinator", "--journal", journal, *common])
    swarm.page = str(started.get("page") or "")
    at_coordinator = partial(with_address, str(started["endpoint"]))
    invite = str(at_coordinator(invited[Role.PEER]))
    commands = {}
    for name, part in peers.items():
        own = buffers.directory.resolve() / name if buffers.directory else None
        offer = (
            "--layers",
            part,
            "--threads",
            str(threads),
            *arguments(replace(buffers, directory=own)),
        )
        commands[name] = ["serve-stage", *offer, *_models(model), *common, invite]
    await swarm.start_all(commands)
    client_invite = at_coordinator(invited[Role.CLIENT])
    return SwarmAddress(invite=client_invite, initial_peers=(), dht_prefix=DHT_PREFIX)


def _models(model: str) -> tuple[str, str]:
    """Return the options that let a peer open this user's own model."""
    is_directory = Path(model).is_dir()
    return ("--models", str(Path(model).resolve())) if is_directory else ("--model", model)


def delete_leftovers(work_dir: Path, buffers: BufferOptions) -> None:
    """Delete an earlier swarm's journal and buffers, since a new swarm would resume its run."""
    for leftover in work_dir.glob(f"{JOURNAL}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    if buffers.directory == work_dir / "buffers":
        shutil.rmtree(buffers.directory, ignore_errors=True)
