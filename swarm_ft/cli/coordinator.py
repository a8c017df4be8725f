"""The commands `swarm-ft dht` and `swarm-ft coordinator`."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import check_local_nodes, open_dht
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.swarm_keys import JOURNAL, keys_folder
from swarm_ft.cli.options import (
    ByteSize,
    dht_prefix_option,
    examples,
    initial_peers_option,
    insecure_option,
    json_flag,
    log_format_option,
    log_option,
    snapshots_option,
    takes,
)
from swarm_ft.cli.running import run_until_stopped, show_start
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.api.coordinator_process import Coordinator, CoordinatorConfig
    from swarm_ft.page.server import HttpAddresses


@click.command(
    short_help="Run a DHT node.",
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
    if write_addresses and not Path(write_addresses).absolute().parent.is_dir():
        raise BadOption(f"--write-addresses {write_addresses}: its directory does not exist")

    show_start("starting a DHT node", as_json=as_json)

    async def work() -> None:
        identity = Path(identity_path) if identity_path else None
        async with open_dht(
            initial_peers,
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
@initial_peers_option
@dht_prefix_option
@takes(
    "listening",
    ListenOptions,
    instead={"host": "127.0.0.1, this machine only", "port": "the last one, or any free one"},
)
@click.option(
    "--journal",
    default=JOURNAL,
    show_default=True,
    metavar="FILE",
    help="SQLite database of all runs; their data lies beside it in FILE.tokens. A coordinator "
    "that starts with the same journal continues its runs.",
)
@click.option(
    "--queue-hours",
    default=24.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Hours that a job waits for peers that can host it. Other jobs may start meanwhile.",
)
@click.option(
    "--result-hours",
    default=168.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Hours that peers keep a finished run's result for its client.",
)
@click.option(
    "--max-queued-per-client",
    default=4,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum number of queued jobs per client.",
)
@click.option(
    "--max-job-size",
    default="1GiB",
    show_default=True,
    type=ByteSize(),
    help="Maximum size of one job's token ids, 4 bytes each.",
)
@click.option(
    "--max-data-per-client",
    default="4GiB",
    show_default=True,
    type=ByteSize(),
    help="Maximum size of the token ids of one client's jobs, until their results are fetched or "
    "the jobs are cancelled.",
)
@click.option(
    "--max-data",
    default="32GiB",
    show_default=True,
    type=ByteSize(),
    help="Maximum size of the token ids of all jobs.",
)
@click.option(
    "--recording-size",
    default="256MiB",
    show_default=True,
    type=ByteSize(),
    help="Disk for the recording that 'swarm-ft replay' reads, beside the journal in "
    "FILE.recording. The oldest part is deleted first; 0 records nothing.",
)
@snapshots_option
@click.option(
    "--keepers",
    metavar="N",
    type=click.IntRange(0, 16),
    help="Number of peers that store encrypted snapshots of each stage, beside the stage's own "
    "peers; 0 for none.  [default: 2 without --snapshots]",
)
@click.option(
    "--moves/--no-moves",
    "moves_layers",
    default=True,
    show_default=True,
    help="Repartition a running pipeline over a snapshot, if that makes steps much faster.",
)
@insecure_option
@click.option(
    "--open",
    "is_public",
    is_flag=True,
    help="Let anybody join, as a replica on probation: such a peer hosts only stages that another "
    "peer hosts too, and never the first or the last one. Prints the public invitation.",
)
@click.option(
    "--relay/--no-relay",
    "has_relay",
    default=True,
    show_default=True,
    help="Relay links between members that cannot reach each other, on the coordinator's port.",
)
@click.option(
    "--encrypt-at-rest",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Encrypt tokens and the journal's job data with the key in this file, created at the "
    "first start. Keep it away from the journal: both together reveal everything.",
)
@click.option(
    "--page",
    metavar="HOST:PORT",
    help="Address of the web page, which shows and steers all runs. On addresses of other "
    "machines, such as 0.0.0.0:7770, it uses TLS with the swarm's own certificate.  "
    "[default: 127.0.0.1:7770, or any free port]",
)
@click.option("--no-page", is_flag=True, help="Serve no web page.")
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Address that serves /metrics, /healthz and /readyz to anybody, in plaintext.",
)
@json_flag
@log_option
@log_format_option
def coordinator(
    initial_peers: tuple[str, ...],
    dht_prefix: str,
    listening: ListenOptions,
    journal: str,
    queue_hours: float,
    result_hours: float,
    max_queued_per_client: int,
    max_job_size: int,
    max_data_per_client: int,
    max_data: int,
    recording_size: int,
    snapshots: str | None,
    keepers: int | None,
    moves_layers: bool,
    insecure: bool,
    is_public: bool,
    has_relay: bool,
    encrypt_at_rest: Path | None,
    page: str | None,
    no_page: bool,
    metrics: str | None,
    as_json: bool,
) -> None:
    """Run the coordinator of a swarm, until Ctrl-C.

    It uses the swarm's keys, which `swarm-ft init` creates beside the journal. With keys all links
    are encrypted, and members need an invitation.

    Without --initial-peers it starts its own DHT and prints the address.
    """
    _check_security(journal, insecure=insecure)
    if insecure:
        listening.check_local()
        check_local_nodes(initial_peers)
    if is_public and not keys_folder(journal).exists():
        raise BadOption(
            "--open: expected a swarm with keys, since anybody may join one without; create keys "
            "with 'swarm-ft init'"
        )
    if page and no_page:
        raise BadOption("--page, --no-page: expected one of the two, got both")
    show_start("starting the coordinator", as_json=as_json)

    from swarm_ft.api.coordinator_process import CoordinatorConfig, num_keepers, start_coordinator
    from swarm_ft.coordinator.facts.quotas import Quotas
    from swarm_ft.page.server import http_places
    from swarm_ft.sealing import sealing_key_at
    from swarm_ft.snapshots.store import SnapshotStore

    store = SnapshotStore(snapshots) if snapshots else None
    key = sealing_key_at(encrypt_at_rest) if encrypt_at_rest else None
    http = http_places(page, metrics, has_page=not no_page)

    config = CoordinatorConfig(
        journal=journal,
        initial_peers=initial_peers,
        dht_prefix=dht_prefix,
        listening=listening,
        queue_s=3600 * queue_hours,
        result_s=3600 * result_hours,
        quotas=Quotas(
            queued=max_queued_per_client,
            job_bytes=max_job_size,
            client_bytes=max_data_per_client,
            total_bytes=max_data,
        ),
        snapshots=store,
        num_keepers=num_keepers(keepers, snapshots),
        moves_layers=moves_layers,
        sealing_key=key,
        is_public=is_public,
        has_relay=has_relay,
        recording_bytes=recording_size,
        http=http,
    )

    async def work() -> None:
        async with AsyncExitStack() as stack:
            running = await start_coordinator(config, stack)
            _show_coordinator(running, config, as_json=as_json)
            await running.run()

    run_until_stopped(work)


def _check_security(journal: str, *, insecure: bool) -> None:
    """Refuse plaintext in a swarm with keys, and a swarm without keys unless --insecure is set.

    Raises:
        BadOption: The keys and the option contradict each other.
    """
    folder = keys_folder(journal)
    if insecure and folder.exists():
        raise BadOption(
            f"--insecure: expected a swarm without keys, got keys in {folder}; leave the option out"
        )
    if not insecure and not folder.exists():
        named = "" if journal == JOURNAL else f" --journal {journal}"
        raise BadOption(
            f"{folder}: this swarm has no keys yet; create them with 'swarm-ft init{named}', or "
            "use --insecure for plaintext on this machine only"
        )


def _show_coordinator(running: Coordinator, config: CoordinatorConfig, *, as_json: bool) -> None:
    public, is_encrypted = running.public, running.enrolment is not None
    if as_json:
        document = {
            "endpoint": running.endpoint,
            "addresses": list(running.addresses),
            "encrypted": is_encrypted,
            "encrypted_at_rest": config.sealing_key is not None,
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
