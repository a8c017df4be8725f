"""Calls that only need the coordinator. They import no torch, so they start at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swarm_ft.api.connections import DHT_PREFIX, connect, parse_swarm_address
from swarm_ft.api.loop import awaitable, blocking
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunStatus, SwarmStatus


@asynccontextmanager
async def connection(
    invite: str | None,
    initial_peers: Sequence[str],
    dht_prefix: str,
    key_file: str | Path | None,
) -> AsyncIterator[SwarmClient]:
    """Connect a client to a swarm, with the arguments of `train`; raises as `connected` does."""
    way = parse_swarm_address(invite, tuple(initial_peers), dht_prefix)
    async with connect(way, Path(key_file) if key_file is not None else None) as swarm:
        yield swarm


async def _cancel(
    run_id: str | None = None,
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
) -> RunStatus:
    """Cancel a run; its training so far is lost.

    Args:
        run_id: Id of the run; None for this client's only run.
        invite: Invitation, see `train`.
        initial_peers: DHT addresses, see `train`.
        dht_prefix: Name of the swarm in the DHT, see `train`.
        key_file: Path of the key that submitted the run, see `train`.

    Returns:
        The run's last status.

    Raises:
        BadOption: `run_id` is None, and this client has several runs.
        NotFound: This client has no such run.
    """
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        return await swarm.cancel(RunId(run_id) if run_id else None)


async def _status(
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
) -> SwarmStatus:
    """Fetch the swarm's peers and runs from the coordinator.

    Args:
        invite: Invitation, see `train`.
        initial_peers: DHT addresses, see `train`.
        dht_prefix: Name of the swarm in the DHT, see `train`.
        key_file: Path of this client's key, see `train`.

    Returns:
        The present status of all members and all runs.

    Raises:
        Unavailable: The coordinator does not answer.
    """
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        return await swarm.status()


cancel, cancel_async = blocking("cancel", _cancel), awaitable("cancel_async", _cancel)
status, status_async = blocking("status", _status), awaitable("status_async", _status)
