"""Calls that only ask a swarm's coordinator. They import no torch, so they begin at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from swarm_ft.api.joining import DHT_PREFIX, connected, way_to
from swarm_ft.api.loop import awaits, waits
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
    """Connect a client to a swarm, by arguments as of `train`; raises as `connected` does."""
    way = way_to(invite, tuple(initial_peers), dht_prefix)
    async with connected(way, Path(key_file) if key_file is not None else None) as swarm:
        yield swarm


async def _cancel(
    run_id: str | None = None,
    *,
    invite: str | None = None,
    initial_peers: Sequence[str] = (),
    dht_prefix: str = DHT_PREFIX,
    key_file: str | Path | None = None,
) -> RunStatus:
    """End a run; what it trained is lost.

    Args:
        run_id: the run; None for this client's only one.
        invite: as of `train`.
        initial_peers: as of `train`.
        dht_prefix: as of `train`.
        key_file: as of `train`; the same as then.

    Returns:
        The run's last status.

    Raises:
        BadOption: no run is named, and this client has several.
        NotFound: there is no such run.
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
    """Ask the coordinator for the swarm's peers and runs.

    Args:
        invite: as of `train`.
        initial_peers: as of `train`.
        dht_prefix: as of `train`.
        key_file: as of `train`.

    Returns:
        All members and all runs as they are now.

    Raises:
        Unavailable: the coordinator does not answer.
    """
    async with connection(invite, initial_peers, dht_prefix, key_file) as swarm:
        return await swarm.status()


cancel, cancel_async = waits("cancel", _cancel), awaits("cancel_async", _cancel)
status, status_async = waits("status", _status), awaits("status_async", _status)
