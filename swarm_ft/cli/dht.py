"""`swarm-ft dht`: a DHT node that others start from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from swarm_ft.cli.options import examples, initial_peers_option, json_flag, log_option
from swarm_ft.cli.running import run_until_stopped
from swarm_ft.errors import BadOption


@click.command(
    short_help="Run a DHT node for others to start from.",
    epilog=examples(
        "swarm-ft dht",
        "swarm-ft dht --host-maddrs /ip4/0.0.0.0/tcp/31337 --identity-path dht.key",
    ),
)
@initial_peers_option
@click.option(
    "--host-maddrs",
    multiple=True,
    default=("/ip4/127.0.0.1/tcp/0",),
    show_default=True,
    metavar="MADDR",
    help="Where to listen; /ip4/0.0.0.0/tcp/31337 for all interfaces.",
)
@click.option("--announce-maddrs", multiple=True, metavar="MADDR", help="What others should use.")
@click.option(
    "--identity-path",
    metavar="FILE",
    help="Private key file; made if absent, keeps the address stable.",
)
@click.option("--write-addresses", metavar="FILE", help="Also write the addresses to a file.")
@json_flag
@log_option
def dht(
    initial_peers: tuple[str, ...],
    host_maddrs: tuple[str, ...],
    announce_maddrs: tuple[str, ...],
    identity_path: str | None,
    write_addresses: str | None,
    as_json: bool,
) -> None:
    """Run a DHT node for others to start from, until Ctrl-C."""
    if write_addresses and not Path(write_addresses).absolute().parent.is_dir():
        raise BadOption(f"--write-addresses {write_addresses}: its directory does not exist")

    async def work() -> None:
        from swarm_ft.discovery.dht import DhtDirectory, DhtOptions

        options = DhtOptions(
            initial_peers=initial_peers,
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            identity_path=Path(identity_path) if identity_path else None,
        )
        directory = await DhtDirectory.open(options)
        try:
            _show(directory.addresses, write_addresses, as_json=as_json)
            await asyncio.Event().wait()
        finally:
            await directory.close()

    run_until_stopped(work)


def _show(addresses: tuple[str, ...], write_addresses: str | None, *, as_json: bool) -> None:
    if write_addresses:
        # Renamed into place, so that whoever waits for the file never reads half of it.
        partial = Path(write_addresses + ".partial")
        partial.write_text("\n".join(addresses) + "\n", encoding="utf-8")
        partial.replace(write_addresses)
    if as_json:
        click.echo(json.dumps({"addresses": list(addresses)}))
    else:
        click.echo("this DHT node is up; others join it with one of")
        for address in addresses:
            click.echo(f"  --initial-peers {address}")
