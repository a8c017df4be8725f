"""A whole swarm on this machine, for notebooks, scripts and tests of one's own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from swarm_ft.api.keywords import JobKeywords
from swarm_ft.api.local_job import (
    all_joined,
    asked_for,
    layers_to_share,
    peer_names,
    shares,
    with_sample,
)
from swarm_ft.api.loop import awaited, waited
from swarm_ft.api.members_here import MembersHere
from swarm_ft.api.processes import MembersApart
from swarm_ft.api.training import OnEvent, run_job
from swarm_ft.client.job import check_outputs
from swarm_ft.client.options import JobOptions
from swarm_ft.client.report import RunReport
from swarm_ft.errors import BadOption, OutOfTurn
from swarm_ft.protocol.messages.client import SwarmStatus
from swarm_ft.protocol.spec.options import by_names
from swarm_ft.transport.base import until_one_ends

T = TypeVar("T")


class LocalSwarm:
    """A coordinator and peers here, and jobs for them; use it in a `with` or an `async with`.

        with swarm_ft.LocalSwarm(stages=3) as swarm:
            report = swarm.train(model="gpt2", dataset="notes.txt", out="tuned")

    Members are real: keys, journal, engines, gRPC over TLS on loopback. By default they share this
    process, which has torch and transformers already; as processes of their own they are there
    seconds later, and one may be killed by the system alone.

    Args:
        stages: parts that a model's layers are shared out in.
        replicas: peers that host each stage.
        folder: for keys, journal, snapshots and logs; a temporary one, if None.
        processes: whether members are processes of their own.
        device: that peers in this process compute on: auto, cpu, cuda, cuda:N or mps.
        threads: CPU threads of each peer; torch has one number for a process, so while this swarm
            is up its own is this one too. The digits of a result depend on it.

    Raises:
        BadOption: fewer than one stage or replica.
    """

    def __init__(
        self,
        stages: int = 2,
        replicas: int = 1,
        *,
        folder: str | Path | None = None,
        processes: bool = False,
        device: str = "auto",
        threads: int = 1,
    ) -> None:
        if min(stages, replicas, threads) < 1:
            counts = f"stages {stages}, replicas {replicas}, threads {threads}"
            raise BadOption(f"{counts}: expected 1 or more of each")
        self._stages, self._replicas = stages, replicas
        self._given_folder = Path(folder) if folder is not None else None
        self._processes, self._device, self._threads = processes, device, threads
        self._folder = Path()
        self._members: MembersHere | MembersApart | None = None
        self._has_peers = False

    # ---- its life

    def __enter__(self) -> Self:
        waited(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        waited(self._close())

    async def __aenter__(self) -> Self:
        await awaited(self._open())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await awaited(self._close())

    def start(self) -> Self:
        """Enter it; for a notebook, where it lives from one cell to another."""
        return self.__enter__()

    def stop(self) -> None:
        """End everybody; what was trained and fetched stays."""
        waited(self._close())

    # ---- what it does

    def train(
        self,
        *,
        progress: bool = True,
        on_event: OnEvent | None = None,
        **options: Unpack[JobKeywords],
    ) -> RunReport:
        """Train a model; without one, a small one on Python's own source text.

        Args:
            progress: whether it is shown on standard error.
            on_event: told every event of the run: a step, an evaluation, a status.
            options: those of `swarm-ft client train`, by their names with underscores.

        Raises:
            SwarmError: why nothing came of it.
        """
        return waited(self._train(options, shows=progress, on_event=on_event))

    async def train_async(
        self,
        *,
        progress: bool = True,
        on_event: OnEvent | None = None,
        **options: Unpack[JobKeywords],
    ) -> RunReport:
        """Do what `train` does; cancelling this leaves the run as it is."""
        return await awaited(self._train(options, shows=progress, on_event=on_event))

    def status(self) -> SwarmStatus:
        """Ask the coordinator for the swarm's peers and runs."""
        return waited(self._status())

    async def status_async(self) -> SwarmStatus:
        """Do what `status` does."""
        return await awaited(self._status())

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of its peers, as `kill` takes them.

        The first job starts the peers; before it these are the names that they will have.
        """
        members = self._there
        return tuple(members.peers) if self._has_peers else self._peer_names

    def kill(self, peer: str) -> None:
        """Stop a peer at once, without a goodbye, to see what the run does.

        Raises:
            NotFound: there is no such peer.
            OutOfTurn: no job has started the peers yet.
        """
        waited(self._kill(peer))

    async def kill_async(self, peer: str) -> None:
        """Do what `kill` does."""
        await awaited(self._kill(peer))

    # ---- in the loop

    @property
    def _there(self) -> MembersHere | MembersApart:
        if self._members is None:
            raise OutOfTurn("this swarm is not up; use it in a 'with', or start() it")
        return self._members

    async def _open(self) -> None:
        if self._members is not None:
            raise OutOfTurn("this swarm is up already")
        self._folder = self._given_folder or Path(tempfile.mkdtemp(prefix="swarm-ft-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        members: MembersHere | MembersApart
        if self._processes:
            members = MembersApart(self._folder, self._threads)
        else:
            members = MembersHere(self._folder, self._device, self._threads)
        try:
            await members.open()
        except BaseException:
            self._tidy()
            raise
        self._members = members

    async def _close(self) -> None:
        members, self._members, self._has_peers = self._members, None, False
        try:
            if members is not None:
                await members.close()
        finally:
            self._tidy()

    def _tidy(self) -> None:
        if self._given_folder is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _train(
        self, given: JobKeywords, *, shows: bool, on_event: OnEvent | None
    ) -> RunReport:
        members = self._there
        options = self._options(dict(given))
        layers = layers_to_share(options, self._stages)
        await members.host(shares(layers, self._stages, self._replicas), options.model)
        self._has_peers = True
        await all_joined(members.client, len(members.peers))
        reports: list[RunReport] = []

        async def see_through() -> None:
            done = run_job(members.client, options, shows=shows, on_event=on_event, is_local=True)
            reports.append(await done)

        await until_one_ends(see_through(), members.first_loss())
        return reports[0]

    def _options(self, given: dict[str, Any]) -> JobOptions:
        """Build the job's options, with a model and text of our own where none is named."""
        asked = asked_for(by_names(JobOptions, given))
        check_outputs(asked.outputs)
        return with_sample(asked, self._folder / "input")

    @property
    def _peer_names(self) -> tuple[str, ...]:
        return peer_names(self._stages, self._replicas)

    async def _kill(self, peer: str) -> None:
        members = self._there
        if not self._has_peers and peer in self._peer_names:
            raise OutOfTurn(f"peer {peer}: the first job starts the peers, and none has begun")
        await members.kill(peer)

    async def _status(self) -> SwarmStatus:
        return await self._there.client.status()
