"""A whole swarm on this machine, for notebooks, scripts and tests."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from swarm_ft.api.in_process import InProcessMembers
from swarm_ft.api.keywords import JobKeywords
from swarm_ft.api.local_job import (
    check_stages,
    layers_by_peer,
    local_job_options,
    peer_names,
    wait_for_peers,
    with_sample,
)
from swarm_ft.api.loop import run_awaitable, run_blocking
from swarm_ft.api.processes import ProcessMembers
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
    """A coordinator and peers on this machine; use it in a `with` or an `async with`.

        with swarm_ft.LocalSwarm(stages=3) as swarm:
            report = swarm.train(model="gpt2", dataset="notes.txt", out="tuned")

    The members are real: keys, journal, engines, gRPC over TLS on loopback. By default they share
    this process, which has imported torch and transformers already. Own processes start seconds
    later, and the system can kill one alone.

    Args:
        stages: Number of stages of the pipeline.
        replicas: Number of peers per stage.
        folder: Directory for keys, journal, snapshots and logs; None: a temporary one.
        processes: Whether each member is an own process.
        device: Device of peers in this process: auto, cpu, cuda, cuda:N or mps.
        threads: CPU threads of each peer. torch has one number per process, so this process uses
            it too while the swarm is running. The last digits of a result depend on it.

    Raises:
        BadOption: A number is below 1.
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
        self._members: InProcessMembers | ProcessMembers | None = None
        self._has_peers = False

    # ---- start and stop

    def __enter__(self) -> Self:
        run_blocking(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run_blocking(self._close())

    async def __aenter__(self) -> Self:
        await run_awaitable(self._open())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_awaitable(self._close())

    def start(self) -> Self:
        """Start the swarm without a `with`, for example in a notebook's cell."""
        return self.__enter__()

    def stop(self) -> None:
        """Stop all members; fetched results stay."""
        run_blocking(self._close())

    # ---- jobs and peers

    def train(
        self,
        *,
        progress: bool = True,
        on_event: OnEvent | None = None,
        **options: Unpack[JobKeywords],
    ) -> RunReport:
        """Train a model; without one, a small one on Python's own source text.

        Args:
            progress: Whether to show the progress on standard error.
            on_event: Callback for every event of the run: a step, an evaluation, a status.
            options: Options of `swarm-ft client train`, by their names with underscores.

        Returns:
            A report with the run's losses, evaluations and bytes, and the place of its result.

        Raises:
            SwarmError: The run has no result; the error is the cause.
        """
        return run_blocking(self._train(options, shows=progress, on_event=on_event))

    async def train_async(
        self,
        *,
        progress: bool = True,
        on_event: OnEvent | None = None,
        **options: Unpack[JobKeywords],
    ) -> RunReport:
        """Train like `train`; cancelling this call does not end the run."""
        return await run_awaitable(self._train(options, shows=progress, on_event=on_event))

    def status(self) -> SwarmStatus:
        """Fetch the swarm's peers and runs from the coordinator."""
        return run_blocking(self._status())

    async def status_async(self) -> SwarmStatus:
        """Fetch the status like `status`."""
        return await run_awaitable(self._status())

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the peers, for `kill`.

        The first job starts the peers. Before it these are their future names.
        """
        members = self._there
        return tuple(members.peers) if self._has_peers else self._peer_names

    def kill(self, peer: str) -> None:
        """Kill a peer without a handover, to test what the run does.

        Raises:
            NotFound: There is no such peer.
            OutOfTurn: No job has started the peers yet.
        """
        run_blocking(self._kill(peer))

    async def kill_async(self, peer: str) -> None:
        """Kill a peer like `kill`."""
        await run_awaitable(self._kill(peer))

    # ---- work in the event loop

    @property
    def _there(self) -> InProcessMembers | ProcessMembers:
        if self._members is None:
            raise OutOfTurn("this swarm is not running; use it in a 'with', or call start()")
        return self._members

    async def _open(self) -> None:
        if self._members is not None:
            raise OutOfTurn("this swarm is running already")
        self._folder = self._given_folder or Path(tempfile.mkdtemp(prefix="swarm-ft-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        members: InProcessMembers | ProcessMembers
        if self._processes:
            members = ProcessMembers(self._folder, self._threads)
        else:
            members = InProcessMembers(self._folder, self._device, self._threads)
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
        layers = check_stages(options, self._stages)
        await members.host(layers_by_peer(layers, self._stages, self._replicas), options.model)
        self._has_peers = True
        await wait_for_peers(members.client, len(members.peers))
        reports: list[RunReport] = []

        async def run_to_end() -> None:
            done = run_job(members.client, options, shows=shows, on_event=on_event, is_local=True)
            reports.append(await done)

        await until_one_ends(run_to_end(), members.wait_for_failure())
        return reports[0]

    def _options(self, given: dict[str, Any]) -> JobOptions:
        """Build the job's options, with the default model and data if none are named."""
        requested = local_job_options(by_names(JobOptions, given))
        check_outputs(requested.outputs)
        return with_sample(requested, self._folder / "input")

    @property
    def _peer_names(self) -> tuple[str, ...]:
        return peer_names(self._stages, self._replicas)

    async def _kill(self, peer: str) -> None:
        members = self._there
        if not self._has_peers and peer in self._peer_names:
            raise OutOfTurn(f"peer {peer}: no job has started the peers yet; call train() first")
        await members.kill(peer)

    async def _status(self) -> SwarmStatus:
        return await self._there.client.status()
