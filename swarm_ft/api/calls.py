"""The calls `serve` and `coordinate`, each in a blocking and in an awaitable form."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from swarm_ft.api.connections import DHT_PREFIX, check_local_nodes, parse_swarm_address
from swarm_ft.api.coordinator_process import (
    Coordinator,
    CoordinatorConfig,
    num_keepers,
    start_coordinator,
)
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.loop import awaitable, blocking, run_awaitable, run_blocking
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.peer_process import Peer, ServeOptions, serve_until_cancelled
from swarm_ft.api.swarm_keys import JOURNAL, keys_folder, open_keys
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.coordinator.recording.files import RECORDING_BYTES
from swarm_ft.errors import BadOption
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.roles import Role
from swarm_ft.page.server import HttpOptions
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.priority import DEFAULT_WEIGHT, MAX_WEIGHT
from swarm_ft.snapshots.store import SnapshotStore

# ---- peers and coordinators, which run until they are stopped

STOP_TIMEOUT_S = 30.0
Up = TypeVar("Up")


class Running(Generic[Up]):
    """A running peer or coordinator; leaving its `with` or `async with` stops it."""

    def __init__(self, task: asyncio.Task[None], up: Up) -> None:
        self._task = task
        self._up = up

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop_async()

    def wait(self) -> None:
        """Wait until it ends by itself; Ctrl-C stops it.

        Raises:
            SwarmError: It failed; the error is the cause.
        """
        try:
            run_blocking(self._ended())
        except KeyboardInterrupt:
            self.stop()
            raise

    async def wait_async(self) -> None:
        """Wait like `wait`; cancelling this call leaves the peer or coordinator running."""
        await run_awaitable(self._ended())

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop it, unless it has ended.

        Args:
            timeout_s: Seconds in which a peer may hand over its state, and wait for a client that
                fetches a result. After that its data is dropped.
        """
        run_blocking(self._stop(timeout_s))

    async def stop_async(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop it like `stop`."""
        await run_awaitable(self._stop(timeout_s))

    async def _ended(self) -> None:
        await asyncio.shield(self._task)

    async def _stop(self, timeout_s: float) -> None:
        for patience_s in (timeout_s, None):
            self._task.cancel()
            await asyncio.wait([self._task], timeout=patience_s)


async def _up(work: Coroutine[Any, Any, None], ready: asyncio.Future[Up]) -> asyncio.Task[None]:
    """Start the work, and return its task once `ready` has a result.

    Raises:
        SwarmError: The work failed before.
    """
    task = asyncio.create_task(work)
    try:
        parts: set[asyncio.Future[Any]] = {task, ready}
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    if not ready.done():
        task.result()
    return task


# ---- serve


class RunningPeer(Running[Peer]):
    """A running peer on this machine."""

    @property
    def name(self) -> str:
        """The peer's name, as `swarm-ft status` shows it."""
        return self._up.name

    @property
    def peer_id(self) -> str:
        """The peer's id, which follows from its key; `--json` has it as `peer`."""
        return self._up.peer_id

    @property
    def endpoint(self) -> str:
        """The address at which others reach it, `host:port`."""
        return self._up.endpoint


async def _serve(
    invite: str | None = None,
    *,
    layers: str = "auto",
    device: str = "auto",
    dtype: str = "float32",
    model: str | None = None,
    models: Sequence[str | Path] = (),
    allow_models: Sequence[str] = (),
    model_disk_bytes: int | None = None,
    memory_gib: float | None = None,
    max_stages: int = MAX_HOSTED,
    threads: int | None = None,
    watts: float = 0.0,
    snapshots: str | None = None,
    keep_disk_bytes: int | None = None,
    encrypt_at_rest: bool = False,
    buffers: BufferOptions = BufferOptions(),  # noqa: B008 - a value
    listening: ListenOptions = ListenOptions(),  # noqa: B008 - a value
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    peer_id: str | None = None,
    name: str | None = None,
) -> RunningPeer:
    """Lend this machine to a swarm until the returned peer is stopped.

        with swarm_ft.serve("swarm1KNiD7aJ4ghup2Y...") as peer:
            peer.wait()

    Args:
        invite: Invitation from `swarm-ft invite`; `@FILE` reads it from a file.
        layers: Blocks to host, such as "12-24"; "auto" lets the coordinator choose.
        device: Device to compute on: auto, cpu, cuda, cuda:N or mps.
        dtype: Data type of computations, float32 or bfloat16; weights stay float32.
        model: Directory or hub id of a model that replaces every run's model.
        models: Directories below which jobs may name models; empty: jobs open no directory.
        model_disk_bytes: Disk for hub models, in bytes; None: a quarter of the free disk.
        allow_models: Hub ids that jobs may name, as ORG/NAME or ORG/*; empty: all public models.
        memory_gib: Memory for stages, in GiB; None: 80 % of the memory free beside buffers.
        max_stages: Maximum number of stages at a time, 1 to 4, each of another run.
        threads: CPU threads of this process to compute with; None: torch's default.
        watts: Power that this machine draws under load, in watts, for forecasts.
        snapshots: Directory or URL for snapshots, the same for all; None: the peers' disks.
        keep_disk_bytes: Disk for others' snapshots, in bytes; None: a tenth of the free disk.
        encrypt_at_rest: Whether to encrypt this peer's files.
        buffers: Memory and disk for sample buffers.
        listening: Address at which others reach this machine.
        initial_peers: DHT addresses of a swarm without keys on this machine, without `invite`.
        dht_prefix: Name of such a swarm in the DHT.
        peer_id: Id and name of this peer in such a swarm.
        name: Name by which people know this peer, such as "ada-3090"; None: its earlier name, or
            two words and a number from its key.

    Returns:
        The peer, which others can reach.

    Raises:
        BadInput: An argument is not usable.
        SwarmError: This machine cannot join; the error is the cause.
    """
    options = ServeOptions(
        layers=parse_layers(layers),
        device=device,
        dtype=dtype,
        model=model,
        models=tuple(map(str, models)),
        allow_models=tuple(allow_models),
        model_disk_bytes=model_disk_bytes,
        lent_memory_bytes=None if memory_gib is None else int(memory_gib * (1 << 30)),
        max_stages=max_stages,
        threads=threads,
        watts=watts,
        snapshots=snapshots,
        keep_disk_bytes=keep_disk_bytes,
        peer_id=peer_id,
        name=name,
        encrypt_at_rest=encrypt_at_rest,
        buffers=buffers,
        listening=listening,
    )
    way = parse_swarm_address(invite, tuple(initial_peers), dht_prefix)
    ready: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
    task = await _up(serve_until_cancelled(way, options, ready.set_result), ready)
    return RunningPeer(task, ready.result())


serve = blocking("serve", _serve)
serve_async = awaitable("serve_async", _serve)


# ---- coordinate


class RunningCoordinator(Running[Coordinator]):
    """A running coordinator."""

    def __init__(self, task: asyncio.Task[None], up: Coordinator, journal: str) -> None:
        super().__init__(task, up)
        self._journal = journal

    @property
    def endpoint(self) -> str:
        """The address at which others reach it, `host:port`."""
        return self._up.endpoint

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of its DHT node, with which members join a swarm without keys."""
        return self._up.addresses

    def invite(
        self,
        role: str = "peer",
        *,
        uses: int = 1,
        expires: timedelta = timedelta(days=7),
        sees_tokens: bool = True,
        replica_only: bool = False,
        layers: str = "auto",
        weight: int = 1,
        note: str = "",
    ) -> str:
        """Create an invitation, whose bearer may join.

        Args:
            role: Role of the new member: peer, client or relay.
            uses: Number of members that may join.
            expires: Lifetime of the invitation.
            sees_tokens: Whether a peer may host the first and the last stage.
            replica_only: Whether a peer may only host stages that another peer hosts too.
            layers: Layers that a peer may host; "auto" for all.
            weight: Weight of a client's jobs when peers are shared out, 1 to 100. All clients of
                one invitation share its weight.
            note: The name by which people know its bearer, such as "Anna", unless a peer chooses
                one. Peers' names are visible to the whole swarm.

        Raises:
            BadOption: The swarm has no keys, or an argument or the note is out of its bounds.
        """
        if role not in {"peer", "client", "relay"}:
            raise BadOption(f"role {role!a:.80}: expected peer, client or relay")
        if not 1 <= weight <= MAX_WEIGHT or (role != "client" and weight != DEFAULT_WEIGHT):
            raise BadOption(f"weight {weight}: expected 1 to {MAX_WEIGHT}, for role client only")
        grant = Grant(
            replica_only=replica_only,
            sees_tokens=sees_tokens,
            layers=parse_layers(layers),
            weight=weight,
        )
        with open_keys(self._journal) as (authority, registry):
            until = datetime.now(UTC) + expires
            made = registry.invite(
                authority.fingerprint, (self.endpoint,), Role(role), uses, until, grant, note
            )
        return str(made)


async def _coordinate(
    journal: str | Path = JOURNAL,
    *,
    listening: ListenOptions = ListenOptions(),  # noqa: B008 - a value
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    snapshots: str | None = None,
    keepers: int | None = None,
    moves_layers: bool = True,
    queue_hours: float = 24.0,
    result_hours: float = 168.0,
    quotas: Quotas = Quotas(),  # noqa: B008 - a value
    sealing_key: bytes | None = None,
    insecure: bool = False,
    is_public: bool = False,
    has_relay: bool = True,
    recording_bytes: int = RECORDING_BYTES,
    http: HttpOptions = HttpOptions(),  # noqa: B008 - a value
) -> RunningCoordinator:
    """Run a swarm's coordinator until the returned object is stopped.

    The swarm's keys lie beside the journal; the call creates them if there are none.

    Args:
        journal: Path of the database of all runs, created if absent.
        listening: Address at which others reach the coordinator.
        initial_peers: Addresses of DHT nodes; empty: the coordinator starts a DHT.
        dht_prefix: Name of the swarm in the DHT.
        snapshots: Directory or URL for snapshots, the same for all; None: the peers' disks.
        keepers: Number of peers that store each stage's snapshots, without `snapshots`; 0: none.
        moves_layers: Whether to repartition running pipelines if that makes steps much faster.
        queue_hours: Hours that a job waits for peers that can host it.
        result_hours: Hours that peers keep a finished run's result.
        quotas: Limits of the clients' jobs and data.
        sealing_key: Key that encrypts tokens and journal; None: no encryption.
        insecure: Whether the swarm has no keys, in plaintext and on this machine only.
        is_public: Whether anybody may join, as a replica on probation.
        has_relay: Whether to relay links between members that cannot reach each other.
        recording_bytes: Disk for the recording beside the journal, in bytes; 0: no recording.
        http: Addresses of the web page and the metrics. Without keys only this machine reaches
            the page.

    Returns:
        The coordinator, which others can reach.

    Raises:
        BadInput: An argument is not usable.
        SwarmError: The coordinator cannot start; the error is the cause.
    """
    config = CoordinatorConfig(
        journal=str(journal),
        initial_peers=tuple(initial_peers),
        dht_prefix=dht_prefix,
        listening=listening,
        queue_s=3600 * queue_hours,
        result_s=3600 * result_hours,
        quotas=quotas,
        snapshots=SnapshotStore(snapshots) if snapshots else None,
        num_keepers=num_keepers(keepers, snapshots),
        moves_layers=moves_layers,
        sealing_key=sealing_key,
        is_public=is_public,
        has_relay=has_relay,
        recording_bytes=recording_bytes,
        http=http,
    )
    _check_keys(config, insecure=insecure)
    ready: asyncio.Future[Coordinator] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with AsyncExitStack() as stack:
            running = await start_coordinator(config, stack)
            ready.set_result(running)
            await running.run()

    return RunningCoordinator(await _up(work(), ready), ready.result(), config.journal)


def _check_keys(config: CoordinatorConfig, *, insecure: bool) -> None:
    """Create the swarm's keys if there are none; check the addresses of a swarm without keys."""
    folder = keys_folder(config.journal)
    if not insecure:
        if not folder.exists():
            Authority.make(folder)
        return
    if folder.exists():
        raise BadOption(
            f"insecure: expected a swarm without keys, got keys in {folder}; leave it out"
        )
    config.listening.check_local()
    check_local_nodes(config.initial_peers)


coordinate = blocking("coordinate", _coordinate)
coordinate_async = awaitable("coordinate_async", _coordinate)
