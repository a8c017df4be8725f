"""`swarm-ft dht` and `swarm-ft coordinator`: where a swarm meets, and who plans and commits."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.api.joining import check_only_here, in_dht
from swarm_ft.api.listening import Listening
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
    from swarm_ft.api.coordinating import Charge, Coordinator
    from swarm_ft.page.server import Watched


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
@log_format_option
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

    show_start("starting a DHT node", as_json=as_json)

    async def work() -> None:
        identity = Path(identity_path) if identity_path else None
        async with in_dht(
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


@click.command(
    epilog=examples(
        "swarm-ft init && swarm-ft coordinator",
        "swarm-ft coordinator --host 0.0.0.0 --port 7000 --announce coordinator.example.org",
        "swarm-ft coordinator --insecure",
    )
)
@initial_peers_option
@dht_prefix_option
@takes("listening", Listening)
@click.option(
    "--journal",
    default=JOURNAL,
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
@click.option(
    "--result-hours",
    default=168.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="How long peers keep a finished run's result for its client.",
)
@click.option(
    "--max-queued-per-client",
    default=4,
    show_default=True,
    type=click.IntRange(min=1),
    help="Jobs of one client that may wait for their turn.",
)
@click.option(
    "--max-job-size",
    default="1GiB",
    show_default=True,
    type=ByteSize(),
    help="Token ids of one job, 4 bytes each.",
)
@click.option(
    "--max-data-per-client",
    default="4GiB",
    show_default=True,
    type=ByteSize(),
    help="Token ids of all jobs of one client that are not collected or cancelled.",
)
@click.option(
    "--max-data",
    default="32GiB",
    show_default=True,
    type=ByteSize(),
    help="Token ids of all clients' jobs.",
)
@click.option(
    "--recording-size",
    default="256MiB",
    show_default=True,
    type=ByteSize(),
    help="What went into decisions, for 'swarm-ft replay', beside the journal in FILE.recording; "
    "the oldest goes first. 0 keeps none.",
)
@snapshots_option
@click.option(
    "--keepers",
    metavar="N",
    type=click.IntRange(0, 16),
    help="How many peers keep each stage's snapshots, encrypted, beside those that host it; 0: "
    "none are kept.  [default: 2 without --snapshots]",
)
@click.option(
    "--moves/--no-moves",
    "moves_layers",
    default=True,
    show_default=True,
    help="Move layers from peer to peer while a run trains, by a snapshot, where its steps are "
    "faster then by far.",
)
@insecure_option
@click.option(
    "--open",
    "is_public",
    is_flag=True,
    help="Let anybody in, as a replica on probation: it hosts only what other peers host too, and "
    "neither the first nor the last stage. Prints the invitation for all.",
)
@click.option(
    "--relay/--no-relay",
    "has_relay",
    default=True,
    show_default=True,
    help="Join, at this coordinator's port, members that no other way brings together.",
)
@click.option(
    "--encrypt-at-rest",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Encrypt tokens, and what the journal says of jobs, with the key in this file, made at "
    "the first start. Keep it elsewhere than the journal: who has both has all.",
)
@click.option(
    "--page",
    metavar="HOST:PORT",
    help="Address of the web page, which shows and steers all runs. Off this machine, as at "
    "0.0.0.0:7770, it uses TLS with the swarm's own certificate.  "
    "[default: 127.0.0.1:7770, or any port]",
)
@click.option("--no-page", is_flag=True, help="Have no page.")
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Also answer /metrics, /healthz and /readyz here, to whoever asks, in plaintext.",
)
@json_flag
@log_option
@log_format_option
def coordinator(
    initial_peers: tuple[str, ...],
    dht_prefix: str,
    listening: Listening,
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

    It takes the swarm's keys from beside its journal (`swarm-ft init` makes them): all links are
    encrypted, and nobody takes part who was not invited.

    Without --initial-peers it starts a DHT of its own and prints its address.
    """
    _check_security(journal, insecure=insecure)
    if insecure:
        listening.check_only_here()
        check_only_here(initial_peers)
    if is_public and not keys_folder(journal).exists():
        raise BadOption("--open: without keys nobody is kept out; make some with 'swarm-ft init'")
    if page and no_page:
        raise BadOption("--page, --no-page: give one of the two")
    show_start("starting the coordinator", as_json=as_json)

    from swarm_ft.api.coordinating import Charge, composed, keepers_of
    from swarm_ft.coordinator.facts.quotas import Quotas
    from swarm_ft.page.server import http_places
    from swarm_ft.sealing import sealing_key_at
    from swarm_ft.snapshots.store import SnapshotStore

    store = SnapshotStore(snapshots) if snapshots else None
    key = sealing_key_at(encrypt_at_rest) if encrypt_at_rest else None
    http = http_places(page, metrics, has_page=not no_page)

    told = Charge(
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
        num_keepers=keepers_of(keepers, snapshots),
        moves_layers=moves_layers,
        sealing_key=key,
        is_public=is_public,
        has_relay=has_relay,
        recording_bytes=recording_size,
        http=http,
    )

    async def work() -> None:
        async with AsyncExitStack() as stack:
            running = await composed(told, stack)
            _show_coordinator(running, told, as_json=as_json)
            await running.run()

    run_until_stopped(work)


def _check_security(journal: str, *, insecure: bool) -> None:
    """Nothing is plaintext unless it was asked for, and what has keys uses them."""
    folder = keys_folder(journal)
    if insecure and folder.exists():
        raise BadOption(f"--insecure: this swarm has keys, in {folder}; start it without")
    if not insecure and not folder.exists():
        named = "" if journal == JOURNAL else f" --journal {journal}"
        raise BadOption(
            f"{folder}: this swarm has no keys yet; make them with 'swarm-ft init{named}', or "
            "start with --insecure, in plaintext and for this machine alone"
        )


def _show_coordinator(running: Coordinator, told: Charge, *, as_json: bool) -> None:
    public, is_encrypted = running.public, running.enrolment is not None
    if as_json:
        at_rest = told.sealing_key is not None
        encrypted = {"encrypted": is_encrypted, "encrypted_at_rest": at_rest}
        where = {"endpoint": running.endpoint, "addresses": list(running.addresses)}
        watched = running.watched
        seen = {
            "page": watched.address,
            "page_fingerprint": watched.fingerprint,
            "metrics": watched.metrics,
        }
        told_all = {**where, **encrypted, "open": public and str(public), **seen}
        click.echo(json.dumps(told_all))
        return
    click.echo(f"coordinator at {running.endpoint}")
    if running.disk_words:
        click.echo(running.disk_words)
    if public is not None:
        click.echo(f"anybody becomes a replica on probation with 'swarm-ft serve-stage {public}'")
    _show_watched(running.watched)
    if is_encrypted:
        click.echo("Let others in: run swarm-ft invite")
        return
    for address in running.addresses:
        click.echo(f"others on this machine join with --insecure --initial-peers {address}")


def _show_watched(watched: Watched) -> None:
    if watched.address:
        click.echo(f"Web page (its address opens once, in one browser): {watched.address}")
    if watched.fingerprint:
        click.echo("before that compare its certificate's SHA-256 fingerprint in the browser:")
        click.echo(f"  {watched.fingerprint}")
    if watched.metrics:
        click.echo(f"metrics at http://{watched.metrics}/metrics")
