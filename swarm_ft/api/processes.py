"""Commands as child processes: a whole swarm of them on this machine, started, watched, ended."""

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

from swarm_ft.api.joining import DHT_PREFIX, WayIn, connected
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.swarm_keys import first_invitations, keys_folder, leading_to
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import NotFound, OutOfTurn, RunFailed
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.spec.options import arguments

JOURNAL, CLIENT_KEY = "coordinator.db", "client.pem"
"""Below a swarm's folder."""
START_TIMEOUT_S = 60.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""Politely; then for those that keep a result for its client; then for good."""
STOP_TIMEOUT_S = 5.0
"""After each of them."""


@dataclass(frozen=True, slots=True)
class Child:
    """One running command of ours; those named ROLE.1, ROLE.2, ... stand in for each other."""

    name: str
    process: asyncio.subprocess.Process
    log_file: Path

    @property
    def role(self) -> str:
        """What the run needs at least one of."""
        return self.name.partition(".")[0]


class ProcessSwarm:
    """Commands of `swarm-ft` as children of this process, each with a log of its own.

    Args:
        log_dir: made if absent; one file a process.

    Attributes:
        page: where the coordinator's page is, once that was started.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []
        self.page = ""

    async def start_all(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start several commands side by side, by their names.

        Raises:
            RunFailed: one of them ended, or said nothing in time; the others may be up.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name, arguments in commands.items():
                    group.create_task(self.start(name, arguments))
        except* RunFailed as failures:
            raise failures.exceptions[0] from None

    async def start(self, name: str, arguments: Sequence[str]) -> dict[str, object]:
        """Start `swarm-ft ARGUMENTS --json`; what it prints first, once it is up.

        Raises:
            RunFailed: it ended, or said nothing in time.
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
                # Ctrl-C in the terminal is for us; we then end the children in order.
                start_new_session=True,
            )
        child = Child(name, process, log_file)
        self._children.append(child)
        return await self._first_words(child)

    async def _first_words(self, child: Child) -> dict[str, object]:
        stdout = child.process.stdout
        if stdout is None:
            raise RunFailed(f"{child.name}: started without a pipe")
        try:
            line = await asyncio.wait_for(stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            raise RunFailed(f"{child.name} did not come up; see {child.log_file}") from None
        if not line:
            await child.process.wait()
            raise RunFailed(f"{child.name} ended at once: {_last_line(child.log_file)}")
        words: dict[str, object] = json.loads(line)
        return words

    async def first_loss(self, on_end: Callable[[str], None]) -> None:
        """Wait until a child ends that no other can stand in for.

        Args:
            on_end: told in words of a child that ended and whose replicas go on.

        Raises:
            RunFailed: always; it says which and why.
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
        """End all children, last started first: politely, and at last for good."""
        for number in ENDING_SIGNALS:
            alive = [child.process for child in self._children if child.process.returncode is None]
            for process in reversed(alive):
                process.send_signal(number)
            if alive:
                waits = [asyncio.ensure_future(process.wait()) for process in alive]
                await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
        self._children.clear()

    def kill(self, name: str | None = None) -> None:
        """End a child at once, or all of them."""
        for child in self._children:
            if child.process.returncode is None and name in (None, child.name):
                child.process.kill()


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1]} (see {log_file})" if lines else f"see {log_file}"


# ---- a whole swarm


class MembersApart:
    """A coordinator and peers as processes of their own; see `MembersHere`, which has the same.

    Args:
        folder: for the keys, the journal, snapshots, buffers and logs.
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
        """A connection to the swarm.

        Raises:
            OutOfTurn: it is not up before its first job.
        """
        if self._client is None:
            raise OutOfTurn("these processes are started by the first job; there is none yet")
        return self._client

    @property
    def peers(self) -> Mapping[str, str]:
        """By name, the layers of each."""
        return self._layers

    async def open(self) -> None:
        """Nothing is started before it is known who is to host what."""

    async def host(self, layers: Mapping[str, str], model: str) -> None:
        """Have just these peers, each with its layers.

        Args:
            layers: by the peers' names.
            model: directory or hub id that jobs may name; another one means other peers.

        Raises:
            RunFailed: one of them ended, or said nothing in time; or others are there already.
        """
        if layers == self._layers and model == self._model:
            return
        await self.close()
        forget(self._folder, BufferOptions(directory=self._folder / "buffers"))
        buffers = BufferOptions(directory=self._folder / "buffers")
        way = await start_swarm(
            self._swarm, layers, buffers, self._folder, model=model, threads=self._threads
        )
        key = keys_folder(str(self._folder / JOURNAL)) / CLIENT_KEY
        self._client = await self._connection.enter_async_context(connected(way, key))
        self._layers, self._model = dict(layers), model

    async def kill(self, name: str) -> None:
        """End a peer without a word to anybody.

        Raises:
            NotFound: there is no such peer.
        """
        if self._layers.pop(name, None) is None:
            raise NotFound(f"peer {name}: there are {', '.join(self._layers) or 'none'}")
        self._swarm.kill(name)

    async def first_loss(self) -> None:
        """Wait until a process ends that no other can stand in for.

        Raises:
            RunFailed: always; it says which and why.
        """
        await self._swarm.first_loss(lambda _words: None)

    async def close(self) -> None:
        """End everybody."""
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
) -> WayIn:
    """Start a coordinator and peers, with keys of their own; a client's way in.

    Args:
        swarm: that they become processes of.
        peers: the layers that each hosts, by its name.
        buffers: what each lends; each has a folder of its own in that named.
        work_dir: for the journal, the keys beside it, and snapshots.
        model: directory or hub id that jobs may name.
        threads: CPU threads of each.

    Raises:
        RunFailed: one of them ended, or said nothing in time.
    """
    journal = str(work_dir / JOURNAL)
    invited = first_invitations(journal, {Role.PEER: len(peers), Role.CLIENT: 1})
    common = ("--snapshots", str((work_dir / "snapshots").resolve()))
    words = await swarm.start("coordinator", ["coordinator", "--journal", journal, *common])
    swarm.page = str(words.get("page") or "")
    to_here = partial(leading_to, str(words["endpoint"]))
    word = str(to_here(invited[Role.PEER]))
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
        commands[name] = ["serve-stage", *offer, *_models(model), *common, word]
    await swarm.start_all(commands)
    return WayIn(invite=to_here(invited[Role.CLIENT]), initial_peers=(), dht_prefix=DHT_PREFIX)


def _models(model: str) -> tuple[str, str]:
    """Options that let a peer open this user's own choice, of the hub as this user would."""
    is_directory = Path(model).is_dir()
    return ("--models", str(Path(model).resolve())) if is_directory else ("--model", model)


def forget(work_dir: Path, buffers: BufferOptions) -> None:
    """Delete what an earlier swarm left in its folder: a new one would take up its run."""
    for leftover in work_dir.glob(f"{JOURNAL}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    if buffers.directory == work_dir / "buffers":
        shutil.rmtree(buffers.directory, ignore_errors=True)
