"""`swarm-ft coordinator`: the process that plans and commits."""

from __future__ import annotations

import json

import click

from swarm_ft.cli.options import (
    announced_endpoint,
    check_announce,
    dht_prefix_option,
    initial_peers_option,
    json_flag,
    listen_options,
    log_option,
)
from swarm_ft.cli.running import run_until_stopped


@click.command()
@initial_peers_option
@dht_prefix_option
@listen_options
@click.option(
    "--journal",
    default="swarm-ft-coordinator.db",
    show_default=True,
    help="SQLite file that holds all runs; start again with the same one to go on with them.",
)
@json_flag
@log_option
def coordinator(
    initial_peers: tuple[str, ...],
    dht_prefix: str,
    host: str,
    port: int,
    announce: str | None,
    journal: str,
    as_json: bool,
) -> None:
    r"""Run the coordinator of a swarm, until Ctrl-C.

    Without --initial-peers it starts a DHT of its own and prints its address.

    \b
    Examples:
      swarm-ft coordinator --initial-peers /ip4/127.0.0.1/tcp/31337/p2p/...
      swarm-ft coordinator --host 0.0.0.0 --port 7000 --announce coordinator.example.org
    """
    check_announce(host, announce)

    async def work() -> None:
        from swarm_ft.clock import SystemClock
        from swarm_ft.coordinator.journal import Journal
        from swarm_ft.coordinator.service import CoordinatorService
        from swarm_ft.discovery import Role, expand_initial_peers
        from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
        from swarm_ft.transport.grpc_transport import GrpcTransport

        book = Journal(journal)
        service = CoordinatorService(book, SystemClock())
        # With a DHT to join it only asks there; others could not reach a node behind a home link.
        options = DhtOptions(
            initial_peers=expand_initial_peers(initial_peers),
            host_maddrs=(f"/ip4/{host}/tcp/0",),
            client_mode=bool(initial_peers),
            prefix=dht_prefix,
        )
        directory = await DhtDirectory.open(options)
        try:
            server = await GrpcTransport().serve(host, port, service.handlers())
            bound_port = int(server.endpoint.rpartition(":")[2])
            endpoint = announced_endpoint(host, bound_port, announce)
            try:
                await directory.announce(Role.COORDINATOR, "coordinator", endpoint)
                shown = {"endpoint": endpoint, "addresses": list(directory.addresses)}
                click.echo(json.dumps(shown) if as_json else f"coordinator at {endpoint}")
                if not initial_peers and not as_json:
                    click.echo(f"others join with --initial-peers {directory.addresses[0]}")
                await service.run()
            finally:
                await server.stop()
                await directory.withdraw(Role.COORDINATOR, "coordinator")
        finally:
            await directory.close()
            book.close()

    run_until_stopped(work)
