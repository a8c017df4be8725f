"""The commands `swarm-ft dht` and `swarm-ft coordinator`."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import open_dht
from swarm_ft.api.coordinator_options import CoordinatorOptions, check_swarm
from swarm_ft.api.shared_options import AddressOptions
from swarm_ft.cli.options import (
    declared_options,
    examples,
    json_flag,
    log_format_option,
    log_option,
    takes,
)
from swarm_ft.cli.running import run_until_stopped, show_start
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.api.coordinator_process import Coordinator
    from swarm_ft.page.server import HttpAddresses


@click.command(
    short_help="Run a DHT node.",
    epilog=examples(
        "swarm-ft dht",
        "swarm-ft dht --host-maddrs /ip4/0.0.0.0/tcp/31337 --identity-path dht.key",
    ),
)
@declared_options(AddressOptions, without=("dht_prefix", "insecure"))
@click.option(
    "--host-maddrs",
    multiple=True,
    default=("/ip4/127.0.0.1/tcp/0",),
    show_default=True,
    metavar="MADDR",
    help="Address to listen on; /ip4/0.0.0.0/tcp/31337 for all interfaces. May be repeated.",
)
@click.option(
    "--announce-maddrs",
    multiple=True,
    metavar="MADDR",
    help="Address that others use, if it differs. May be repeated.",
)
@click.option(
    "--identity-path",
    metavar="FILE",
    help="File of the node's private key, created if absent. With it the node's address stays.",
)
@click.option("--write-addresses", metavar="FILE", help="Write the addresses to this file, too.")
@json_flag
@log_option
@log_format_option
def dht(
    initial_peers: tuple[str, ...],
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    identity_path: str | None,
    write_addresses: str | None,
    as_json: bool,
) -> None:
    """Run a DHT node, through which a swarm without keys finds its members."""
    from swarm_ft.discovery import expand_initial_peers

    if write_addresses and not Path(write_addresses).absolute().parent.is_dir():
        raise BadOption(f"--write-addresses {write_addresses}: its directory does not exist")

    nodes = expand_initial_peers(initial_peers)
    show_start("starting a DHT node", as_json=as_json)

    async def work() -> None:
        identity = Path(identity_path) if identity_path else None
        async with open_dht(
            nodes,
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            identity_path=identity,
        ) as directory:
            _show_dht(directory.addresses, write_addresses, as_json=as_json)
            await asyncio.Event().wait()

    run_until_stopped(work)


def _show_dht(addresses: tuple[str, ...], write_addresses: str | None, *, as_json: bool) -> None:
    if write_addresses:
        # Rename the file into place, so that a reader never sees half of it.
        partial = Path(write_addresses + ".partial")
        partial.write_text("\n".join(addresses) + "\n", encoding="utf-8")
        partial.replace(write_addresses)
    if as_json:
        click.echo(json.dumps({"addresses": list(addresses)}))
    else:
        click.echo("the DHT node is running; others join it with one of")
        for address in addresses:
            click.echo(f"  --initial-peers {address}")


@click.command(
    short_help="Run a swarm's coordinator.",
    epilog=examples(
        "swarm-ft init && swarm-ft coordinator",
        "swarm-ft coordinator --host 0.0.0.0 --port 7000 --announce coordinator.example.org",
        "swarm-ft coordinator --insecure",
    ),
)
@takes(
    "options",
    CoordinatorOptions,
    instead={"host": "127.0.0.1, this machine only", "port": "the last one, or any free one"},
)
@json_flag
@log_option
@log_format_option
def coordinator(options: CoordinatorOptions, as_json: bool) -> None:
    """Run the coordinator of a swarm, until Ctrl-C.

    It uses the swarm's keys beside the journal, which its first start creates, as `swarm-ft init`
    does. With keys all links are encrypted, and members need an invitation.

    Without --initial-peers it starts its own DHT and prints the address.
    """
    check_swarm(options)
    show_start("starting the coordinator", as_json=as_json)

    from swarm_ft.api.coordinator_process import start_coordinator

    async def work() -> None:
        async with AsyncExitStack() as stack:
            running = await start_coordinator(options, stack)
            _show_coordinator(running, options, as_json=as_json)
            await running.run()

    run_until_stopped(work)


def _show_coordinator(running: Coordinator, options: CoordinatorOptions, *, as_json: bool) -> None:
    public, is_encrypted = running.public, running.enrolment is not None
    if as_json:
        document = {
            "endpoint": running.endpoint,
            "addresses": list(running.addresses),
            "encrypted": is_encrypted,
            "encrypted_at_rest": options.encrypt_at_rest is not None,
            "open": public and str(public),
            "page": running.http_addresses.address,
            "page_fingerprint": running.http_addresses.fingerprint,
            "metrics": running.http_addresses.metrics,
        }
        click.echo(json.dumps(document))
        return
    click.echo(f"The coordinator is running at {running.endpoint}. Ctrl-C stops it.")
    if running.disk_words:
        click.echo(running.disk_words)
    if public is not None:
        click.echo(f"Anybody can join as a replica on probation: swarm-ft serve-stage {public}")
    _show_watched(running.http_addresses)
    if is_encrypted:
        click.echo("Let others in: run swarm-ft invite")
        return
    for address in running.addresses:
        click.echo(f"On this machine others join with --insecure --initial-peers {address}")


def _show_watched(watched: HttpAddresses) -> None:
    if watched.address:
        click.echo(f"Web page (its address opens once, in one browser): {watched.address}")
    if watched.fingerprint:
        click.echo("First compare the SHA-256 fingerprint of its certificate in the browser:")
        click.echo(f"  {watched.fingerprint}")
    if watched.metrics:
        click.echo(f"Metrics: http://{watched.metrics}/metrics")
