"""`serve` and `coordinate`, each in a form that waits and in one that is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from swarm_ft.api.coordinating import Charge, Coordinator, composed, keepers_of
from swarm_ft.api.joining import DHT_PREFIX, check_only_here, way_to
from swarm_ft.api.listening import Listening
from swarm_ft.api.loop import awaited, awaits, waited, waits
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.serving import Peer, ServeOptions, serve_until_over
from swarm_ft.api.swarm_keys import JOURNAL, keys_folder, opened
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.coordinator.recording.files import RECORDING_BYTES
from swarm_ft.errors import BadOption
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.roles import Role
from swarm_ft.page.server import HttpPlaces
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.priority import DEFAULT_WEIGHT, MAX_WEIGHT
from swarm_ft.snapshots.store import SnapshotStore

# ---- what goes on until it is stopped

STOP_TIMEOUT_S = 30.0
Up = TypeVar("Up")


class Running(Generic[Up]):
    """A peer or a coordinator that is up; leaving its `with` or `async with` stops it."""

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
            SwarmError: why it ended.
        """
        try:
            waited(self._ended())
        except KeyboardInterrupt:
            self.stop()
            raise

    async def wait_async(self) -> None:
        """Do what `wait` does; cancelling this leaves it running."""
        await awaited(self._ended())

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop it, unless it has ended.

        Args:
            timeout_s: how long a peer may say goodbye, and wait for the client that its part of a
                result is for; then it lets go of whatever is here.
        """
        waited(self._stop(timeout_s))

    async def stop_async(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Do what `stop` does."""
        await awaited(self._stop(timeout_s))

    async def _ended(self) -> None:
        await asyncio.shield(self._task)

    async def _stop(self, timeout_s: float) -> None:
        for patience_s in (timeout_s, None):
            self._task.cancel()
            await asyncio.wait([self._task], timeout=patience_s)


async def _up(work: Coroutine[Any, Any, None], told: asyncio.Future[Up]) -> asyncio.Task[None]:
    """Start the work, and return its task once it is up.

    Raises:
        SwarmError: why it is not.
    """
    task = asyncio.create_task(work)
    try:
        parts: set[asyncio.Future[Any]] = {task, told}
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    if not told.done():
        task.result()
    return task


# ---- serve


class RunningPeer(Running[Peer]):
    """A peer of a swarm, on this machine."""

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
        """Where others reach it, `host:port`."""
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
    listening: Listening = Listening(),  # noqa: B008 - a value
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    peer_id: str | None = None,
    name: str | None = None,
) -> RunningPeer:
    """Lend this machine to a swarm until the returned peer is stopped.

        with swarm_ft.serve("swarm1KNiD7aJ4ghup2Y...") as peer:
            peer.wait()

    Args:
        invite: an invitation, as `swarm-ft invite` prints it; `@FILE` reads it from a file.
        layers: blocks to host, as "12-24"; auto lets the coordinator choose.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: what to compute in, float32 or bfloat16; weights stay float32.
        model: directory or hub id that stands in for every run's model.
        models: directories below which jobs may name models; none: jobs open no directory.
        model_disk_bytes: for models of the hub that jobs name; None: a quarter of what is free.
        allow_models: hub ids that jobs may name, as ORG/NAME or ORG/*; none: all public ones.
        memory_gib: lent at most; None: 80 % of what is free beside buffers.
        max_stages: that it hosts at a time, 1 to 4, each of another run, as far as memory allows.
        threads: CPU threads to compute with, of this process; None: as many as torch takes.
        watts: that this machine takes at work, for forecasts.
        snapshots: where they lie: a directory or a URL, the same for all; None: with the peers.
        keep_disk_bytes: of disk for snapshots of others' stages; None: a tenth of what is free.
        encrypt_at_rest: whether what this peer writes to disks is encrypted.
        buffers: what is lent to samples' buffers, and where.
        listening: where others reach this machine.
        initial_peers: without an invitation, DHT addresses of a swarm without keys, here.
        dht_prefix: of such a swarm.
        peer_id: this peer's id and name there.
        name: The name by which people know this peer, such as "ada-3090"; None: the one that it
            had, or two words and a number from its key.

    Returns:
        The peer, which others reach by now.

    Raises:
        BadInput: something is not usable.
        SwarmError: why this machine cannot join.
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
    way = way_to(invite, tuple(initial_peers), dht_prefix)
    told: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
    task = await _up(serve_until_over(way, options, told.set_result), told)
    return RunningPeer(task, told.result())


serve = waits("serve", _serve)
serve_async = awaits("serve_async", _serve)


# ---- coordinate


class RunningCoordinator(Running[Coordinator]):
    """A swarm's coordinator."""

    def __init__(self, task: asyncio.Task[None], up: Coordinator, journal: str) -> None:
        super().__init__(task, up)
        self._journal = journal

    @property
    def endpoint(self) -> str:
        """Where others reach it, `host:port`."""
        return self._up.endpoint

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of its DHT node, by which members of a swarm without keys join."""
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
        """Make an invitation; whoever has it may join.

        Args:
            role: what it makes of its bearer: peer, client or relay.
            uses: how many may join with it.
            expires: how long it lets anybody in.
            sees_tokens: whether a peer may host the first and the last stage.
            replica_only: whether it hosts only what another peer hosts too.
            layers: the only ones that it may host; auto for any.
            weight: 1 to 100, of the peers that a client's jobs get, to those of other invitations'
                jobs; all clients that come with this one share it.
            note: The name by which people know its bearer, such as "Anna", unless a peer chooses
                one. Peers' names are visible to the whole swarm.

        Raises:
            BadOption: the swarm has no keys, a role is unknown, or the note can be no name.
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
        with opened(self._journal) as (authority, registry):
            until = datetime.now(UTC) + expires
            made = registry.invite(
                authority.fingerprint, (self.endpoint,), Role(role), uses, until, grant, note
            )
        return str(made)


async def _coordinate(
    journal: str | Path = JOURNAL,
    *,
    listening: Listening = Listening(),  # noqa: B008 - a value
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
    http: HttpPlaces = HttpPlaces(),  # noqa: B008 - a value
) -> RunningCoordinator:
    """Run a swarm's coordinator until the returned one is stopped.

    The swarm's keys are beside the journal; they are made if there are none.

    Args:
        journal: a file that holds all runs, made if absent.
        listening: where others reach it.
        initial_peers: of the DHT; without any it starts one.
        dht_prefix: of the swarm's records.
        snapshots: where snapshots of runs lie, the same for all peers; None: with the peers.
        keepers: how many peers keep each stage's snapshots, where these lie with them; 0: none.
        moves_layers: whether layers move from peer to peer while a run trains, where that is
            faster.
        queue_hours: how long a job that no peers can host waits for some.
        result_hours: how long peers keep a finished run's result.
        quotas: how much clients may hand in.
        sealing_key: with which tokens and journal are encrypted; None does not.
        insecure: without keys, in plaintext, for this machine alone.
        is_public: whether anybody is let in, as a replica on probation.
        has_relay: whether it joins members that no other way brings together.
        recording_bytes: of what went into its decisions, kept beside the journal; 0 keeps none.
        http: where its page and metrics are; without keys none but this machine sees the page.

    Returns:
        The coordinator, which others reach by now.

    Raises:
        BadInput: something is not usable.
        SwarmError: why it does not come up.
    """
    charge = Charge(
        journal=str(journal),
        initial_peers=tuple(initial_peers),
        dht_prefix=dht_prefix,
        listening=listening,
        queue_s=3600 * queue_hours,
        result_s=3600 * result_hours,
        quotas=quotas,
        snapshots=SnapshotStore(snapshots) if snapshots else None,
        num_keepers=keepers_of(keepers, snapshots),
        moves_layers=moves_layers,
        sealing_key=sealing_key,
        is_public=is_public,
        has_relay=has_relay,
        recording_bytes=recording_bytes,
        http=http,
    )
    _check_keys(charge, insecure=insecure)
    told: asyncio.Future[Coordinator] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with AsyncExitStack() as stack:
            running = await composed(charge, stack)
            told.set_result(running)
            await running.run()

    return RunningCoordinator(await _up(work(), told), told.result(), charge.journal)


def _check_keys(charge: Charge, *, insecure: bool) -> None:
    """Make the swarm's keys if there are none, unless plaintext was asked for."""
    folder = keys_folder(charge.journal)
    if not insecure:
        if not folder.exists():
            Authority.make(folder)
        return
    if folder.exists():
        raise BadOption(f"insecure: this swarm has keys, in {folder}; start it without")
    charge.listening.check_only_here()
    check_only_here(charge.initial_peers)


coordinate = waits("coordinate", _coordinate)
coordinate_async = awaits("coordinate_async", _coordinate)
