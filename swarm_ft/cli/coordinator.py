"""`swarm-ft coordinator`: the process that plans and commits."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.declared import takes
from swarm_ft.cli.options import (
    Listening,
    dht_prefix_option,
    examples,
    initial_peers_option,
    json_flag,
    log_option,
    snapshots_option,
)
from swarm_ft.cli.running import run_until_stopped
from swarm_ft.errors import BadOption, JournalError

if TYPE_CHECKING:
    from swarm_ft.coordinator.journal.journal import Journal
    from swarm_ft.discovery import Directory
    from swarm_ft.snapshots.store import SnapshotStore

NAME = "coordinator"
"""Of its record in the DHT; a swarm has one."""


@click.command(
    epilog=examples(
        "swarm-ft coordinator --initial-peers /ip4/127.0.0.1/tcp/31337/p2p/...",
        "swarm-ft coordinator --host 0.0.0.0 --port 7000 --announce coordinator.example.org",
    )
)
@initial_peers_option
@dht_prefix_option
@takes("listening", Listening)
@click.option(
    "--journal",
    default="swarm-ft-coordinator.db",
    show_default=True,
    metavar="FILE",
    help="SQLite file that holds all runs, with their data beside it in FILE.tokens; start again "
    "with the same one to go on with them.",
)
@click.option(
    "--queue-hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="How long a job that no peers can host waits for some; others pass it by meanwhile.",
)
@snapshots_option
@json_flag
@log_option
def coordinator(
    initial_peers: tuple[str, ...],
    dht_prefix: str,
    listening: Listening,
    journal: str,
    queue_hours: float,
    snapshots: str | None,
    as_json: bool,
) -> None:
    """Run the coordinator of a swarm, until Ctrl-C.

    Without --initial-peers it starts a DHT of its own and prints its address.
    """
    store = _open_snapshots(snapshots)

    async def work() -> None:
        from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
        from swarm_ft.transport.grpc_options import check_address

        await check_address(listening.host, listening.port)  # before a journal is made
        # With a DHT to join it only asks there; others could not reach a node behind a home link.
        options = DhtOptions(
            initial_peers=initial_peers,
            host_maddrs=() if initial_peers else (await _listening_maddr(listening.host),),
            client_mode=bool(initial_peers),
            prefix=dht_prefix,
        )
        directory = await DhtDirectory.open(options)
        addresses = _announced(directory.addresses, listening.announced_host)
        try:
            words = _Words(addresses, as_json)
            kept = journal, store, 3600 * queue_hours
            await _coordinate(directory, listening, kept, words)
        finally:
            await directory.close()

    run_until_stopped(work)


@dataclass(frozen=True, slots=True)
class _Words:
    """What to tell once the coordinator is up."""

    addresses: tuple[str, ...]
    as_json: bool

    def say(self, endpoint: str) -> None:
        if self.as_json:
            click.echo(json.dumps({"endpoint": endpoint, "addresses": list(self.addresses)}))
            return
        click.echo(f"coordinator at {endpoint}")
        for address in self.addresses:
            click.echo(f"others join with --initial-peers {address}")


async def _coordinate(
    directory: Directory,
    listening: Listening,
    kept: tuple[str, SnapshotStore | None, float],
    words: _Words,
) -> None:
    from swarm_ft.clock import SystemClock
    from swarm_ft.coordinator.service import CoordinatorService
    from swarm_ft.coordinator.submission import MAX_REQUEST_BYTES
    from swarm_ft.discovery import Role
    from swarm_ft.transport.grpc_options import GrpcOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    journal_file, snapshots, queue_s = kept
    journal = _open_journal(journal_file)
    try:
        service = CoordinatorService(journal, SystemClock(), snapshots, queue_s=queue_s)
        transport = GrpcTransport(GrpcOptions(max_request_bytes=MAX_REQUEST_BYTES))
        server = await transport.serve(listening.host, listening.port, service.handlers())
        endpoint = listening.endpoint(int(server.endpoint.rpartition(":")[2]))
        try:
            await directory.announce(Role.COORDINATOR, NAME, endpoint)
            words.say(endpoint)
            await service.run()
        finally:
            await server.stop()
            await directory.withdraw(Role.COORDINATOR, NAME)
    finally:
        journal.close()


def _open_journal(path: str) -> Journal:
    from swarm_ft.coordinator.journal.journal import Journal

    try:
        return Journal(path)
    except JournalError as error:
        raise BadOption(f"--{error.message}") from error  # it begins with "journal PATH:"


def _open_snapshots(url: str | None) -> SnapshotStore | None:
    from swarm_ft.snapshots.store import SnapshotStore

    return SnapshotStore(url) if url else None


async def _listening_maddr(host: str) -> str:
    """`host`, which `check_address` passed, as a multiaddr; libp2p listens on no names."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    address = ipaddress.ip_address(found[0][4][0])
    return f"/ip{address.version}/{address}/tcp/0"


def _announced(addresses: Sequence[str], host: str | None) -> tuple[str, ...]:
    """The DHT's addresses, by the host that others were told to use, if they were."""
    if host is None:
        return tuple(addresses)
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    rests = (address.split("/", 3)[3] for address in addresses)
    return tuple(dict.fromkeys(f"/{kind}/{host}/{rest}" for rest in rests))
