"""The calls `serve` and `coordinate`, each in a blocking and in an awaitable form."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from swarm_ft.api.connections import DHT_PREFIX, parse_swarm_address
from swarm_ft.api.coordinator_options import CoordinatorOptions, check_swarm
from swarm_ft.api.coordinator_process import Coordinator, start_coordinator
from swarm_ft.api.keywords import CoordinateKeywords, ServeKeywords
from swarm_ft.api.loop import awaitable, blocking, run_awaitable, run_blocking
from swarm_ft.api.peer_process import Peer, serve_until_cancelled
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.api.swarm_keys import JOURNAL, open_keys
from swarm_ft.errors import BadOption
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.options import from_keywords
from swarm_ft.protocol.spec.priority import DEFAULT_WEIGHT, MAX_WEIGHT

# ---- peers and coordinators, which run until they are stopped

STOP_TIMEOUT_S = 30.0
Up = TypeVar("Up")


class Running(Generic[Up]):
    """A running peer or coordinator; leaving its `with` or `async with` stops it."""

    def __init__(
        self, task: asyncio.Task[None], up: Up, stop_timeout_s: float = STOP_TIMEOUT_S
    ) -> None:
        self._task = task
        self._up = up
        self._stop_timeout_s = stop_timeout_s

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

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop it, unless it has ended.

        Args:
            timeout_s: Seconds in which a peer may hand over its state, and wait for a client that
                fetches a result. After that its data is dropped. None: `leave_timeout_s`.
        """
        run_blocking(self._stop(timeout_s))

    async def stop_async(self, timeout_s: float | None = None) -> None:
        """Stop it like `stop`."""
        await run_awaitable(self._stop(timeout_s))

    async def _ended(self) -> None:
        await asyncio.shield(self._task)

    async def _stop(self, timeout_s: float | None) -> None:
        for patience_s in (self._stop_timeout_s if timeout_s is None else timeout_s, None):
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
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    **options: Unpack[ServeKeywords],
) -> RunningPeer:
    """Lend this machine to a swarm until the returned peer is stopped.

        with swarm_ft.serve("swarm1KNiD7aJ4ghup2Y...") as peer:
            peer.wait()

    Args:
        invite: Invitation from `swarm-ft invite`; `@FILE` reads it from a file.
        initial_peers: DHT addresses of a swarm without keys on this machine, without `invite`.
        dht_prefix: Name of such a swarm in the DHT.
        options: Options of `swarm-ft serve-stage`, see docs/reference/member-options.md.

    Returns:
        The peer, which others can reach.

    Raises:
        BadInput: An argument is not usable.
        SwarmError: This machine cannot join; the error is the cause.
    """
    serve_options = from_keywords(ServeOptions, dict(options))
    way = parse_swarm_address(invite, tuple(initial_peers), dht_prefix)
    ready: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
    task = await _up(serve_until_cancelled(way, serve_options, ready.set_result), ready)
    return RunningPeer(task, ready.result(), serve_options.leave_timeout_s)


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
    journal: str | Path = JOURNAL, **options: Unpack[CoordinateKeywords]
) -> RunningCoordinator:
    """Run a swarm's coordinator until the returned object is stopped.

    The swarm's keys lie beside the journal; the first start creates them.

    Args:
        journal: Path of the database of all runs, created if absent.
        options: Options of `swarm-ft coordinator`, see docs/reference/member-options.md.

    Returns:
        The coordinator, which others can reach.

    Raises:
        BadInput: An argument is not usable.
        SwarmError: The coordinator cannot start; the error is the cause.
    """
    wanted = from_keywords(CoordinatorOptions, {"journal": journal, **options})
    check_swarm(wanted)
    ready: asyncio.Future[Coordinator] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with AsyncExitStack() as stack:
            running = await start_coordinator(wanted, stack)
            ready.set_result(running)
            await running.run()

    return RunningCoordinator(await _up(work(), ready), ready.result(), str(wanted.journal))


coordinate = blocking("coordinate", _coordinate)
coordinate_async = awaitable("coordinate_async", _coordinate)
