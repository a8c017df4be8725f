"""The command `swarm-ft serve-stage`, which lends this machine to a swarm."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.connections import SwarmAddress, SwarmConnection, in_background, join
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.cli.doctor import print_reachability
from swarm_ft.cli.options import (
    ByteSize,
    examples,
    json_flag,
    log_format_option,
    log_option,
    snapshots_option,
    takes,
)
from swarm_ft.cli.peer_control import DRAIN, PAUSE, PeerControl
from swarm_ft.cli.peer_lines import LEAVE_TIMEOUT_S, PeerLine, print_contribution
from swarm_ft.cli.running import load, on_each_stop_signal, run_async, show_start
from swarm_ft.cli.status_line import StatusLine
from swarm_ft.cli.swarm_options import way_in
from swarm_ft.protocol.spec.bounds import MAX_HOSTED

if TYPE_CHECKING:
    from swarm_ft.api.availability_controller import AvailabilityController
    from swarm_ft.api.peer_process import Peer, PreparedPeer
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_transport import GrpcTransport

PAUSE_CASES = ("gpu-busy", "on-battery", "user-active")
MIN_MBPS = 0.1
LEFT_AT_ONCE = 130
"""Exit code after a second stop signal."""
PEER_MODULES = ("swarm_ft.peer.node", "swarm_ft.discovery.dht", "swarm_ft.stage.hub_cache")
"""Modules that a peer needs before its first run, which then imports transformers' models."""


def _link_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that limit the use of the link."""
    for option in (
        click.option(
            "--monthly-gb",
            metavar="GB",
            type=click.FloatRange(min=0, min_open=True),
            help="Maximum traffic in GB per calendar month, sent and received. Then the peer "
            "pauses until the next month. The count lies beside the peer's key.",
        ),
        click.option(
            "--download-mbps",
            metavar="MBPS",
            type=click.FloatRange(min=MIN_MBPS),
            help="Maximum rate of receiving from others, in Mbps.",
        ),
        click.option(
            "--upload-mbps",
            metavar="MBPS",
            type=click.FloatRange(min=MIN_MBPS),
            help="Maximum rate of sending to others, in Mbps; the coordinator plans with it.",
        ),
    ):
        command = option(command)
    return command


@click.command(
    short_help="Lend this machine to a swarm.",
    epilog=examples(
        "swarm-ft serve-stage @invitation.txt",
        "swarm-ft serve-stage @invitation.txt --layers 12-24 --device cuda:0",
        "swarm-ft serve-stage --insecure --initial-peers /ip4/127.0.0.1/tcp/31337/p2p/...",
    ),
)
@click.option(
    "--layers",
    default="auto",
    show_default=True,
    metavar="START-STOP|auto",
    help="Blocks to host: 12-24 means blocks 12 to 23; auto lets the coordinator choose.",
)
@way_in(by_argument=True)
@takes("listening", ListenOptions, instead={"host": "all interfaces; 127.0.0.1 with --insecure"})
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="Device to compute on: auto, cpu, cuda, cuda:N or mps.",
)
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Data type of computations; weights stay float32.",
)
@click.option(
    "--model",
    metavar="DIR|HUB_ID",
    help="Model to use for every run, in place of the one that a job names. The peer checks that "
    "the weights are the run's.",
)
@click.option(
    "--models",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Directory below which jobs may name models. May be repeated. Without it jobs open no "
    "directories of this machine.",
)
@click.option(
    "--model-disk",
    "model_disk_bytes",
    metavar="SIZE",
    type=ByteSize(),
    help="Disk for hub models that jobs name; the peer deletes the least recently used first. "
    "With 0 it downloads none.  [default: a quarter of the free disk]",
)
@click.option(
    "--allow-models",
    multiple=True,
    metavar="ORG/NAME|ORG/*",
    help="Hub model or organization that jobs may name. May be repeated.  "
    "[default: all public models]",
)
@click.option(
    "--memory",
    "lent_memory_bytes",
    metavar="SIZE",
    type=ByteSize(minimum=1),
    help="Memory for stages and their microbatches, such as 5GiB; limits --layers auto. On a GPU "
    "it is the total; on a CPU buffers are extra.  "
    "[default: 80 % of the memory that is free beside buffers]",
)
@click.option(
    "--max-stages",
    metavar="N",
    type=click.IntRange(1, MAX_HOSTED),
    default=MAX_HOSTED,
    show_default=True,
    help="Maximum number of stages at a time, each of another run, as far as --memory has room.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Number of CPU threads to compute with.  [default: torch's own choice]",
)
@click.option(
    "--watts",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="W",
    help="Power that this machine draws under load, for energy forecasts ('swarm-ft plan').",
)
@takes("buffers", BufferOptions)
@snapshots_option
@click.option(
    "--keep-disk",
    "keep_disk_bytes",
    metavar="SIZE",
    type=ByteSize(),
    help="Disk for encrypted snapshots of other peers' stages; 0 for none.  "
    "[default: a tenth of the free disk]",
)
@click.option(
    "--name",
    metavar="NAME",
    help="The name by which people know this peer, such as ada-3090: up to 24 letters, digits, "
    "'-', '_' and '.'. Everybody in the swarm sees it.  [default: the one that it had, or two "
    "words and a number from its key]",
)
@click.option(
    "--peer-id",
    metavar="NAME",
    help="Id and name of this peer, only with --insecure.  [default: its last one here, or a "
    "random one]",
)
@click.option(
    "--hours",
    metavar="START-STOP",
    help="Hours of the day in which the peer works, in local time: 22-7, 22:30-6:45.  "
    "[default: all]",
)
@click.option(
    "--pause-when",
    multiple=True,
    type=click.Choice(PAUSE_CASES),
    help="Pause while another program uses the GPU, the machine runs on battery, or somebody uses "
    "it. May be repeated.",
)
@_link_options
@click.option(
    "--leave-timeout",
    metavar="S",
    type=click.FloatRange(min=0),
    default=LEAVE_TIMEOUT_S,
    show_default=True,
    help="Seconds that the peer may take to hand over its state when a service manager or a script "
    "stops it. Ctrl-C at a terminal has no limit; a second Ctrl-C leaves at once.",
)
@click.option(
    "--encrypt-at-rest",
    is_flag=True,
    help="Encrypt this peer's files: buffers, snapshots, results. The coordinator has a key for "
    "each run, and deletes it when the run is over.",
)
@json_flag
@log_option
@log_format_option
def serve_stage(
    layers: str,
    way: SwarmAddress,
    listening: ListenOptions,
    buffers: BufferOptions,
    encrypt_at_rest: bool,
    leave_timeout: float,
    as_json: bool,
    **values: Any,
) -> None:
    """Lend this machine to a swarm, as a peer that hosts stages of runs, until Ctrl-C.

    INVITE is @FILE, a file with an invitation (`swarm-ft invite`). Without it the command prompts
    for the invitation, or reads standard input.
    """
    from swarm_ft.api.peer_process import ServeOptions, check_options, prepare_peer
    from swarm_ft.protocol.spec.layers import parse_layers

    options = ServeOptions(
        layers=parse_layers(layers),
        listening=listening,
        buffers=buffers,
        encrypt_at_rest=encrypt_at_rest,
        **values,
    )

    check_options(way, options)
    show_start("starting the peer; libraries take some seconds to load", as_json=as_json)
    load(*PEER_MODULES)

    async def work(lent: PreparedPeer) -> None:
        async with join(way, lent.key_file, options.name or "") as swarm:
            await _serve(swarm, lent, leave_timeout, as_json=as_json)

    with prepare_peer(way, options) as lent:
        if not as_json:
            click.echo(lent.resources.in_words())
        run_async(lambda: work(lent))


# ---- a peer from its first to its last line


async def _serve(
    swarm: SwarmConnection, lent: PreparedPeer, leave_timeout_s: float, *, as_json: bool
) -> None:
    """Run the peer until a stop signal, and print its address once it listens.

    Raises:
        Exit: A second stop signal ended the peer; its contribution is the last line.
    """
    from swarm_ft.api.peer_process import enforce_availability, start_peer

    line = PeerLine()
    lent.availability.on_change = line.print_above
    offer = await lent.node_options(swarm)

    def drain_on_signal(node: PeerNode) -> None:
        on_each_stop_signal(_drain_first(node, line, leave_timeout_s))

    up = start_peer(
        swarm,
        lent.options.listening,
        offer,
        lent.make_engine,
        lent.shape,
        on_made=drain_on_signal,
        on_leave=line.show,
    )
    async with up as peer:
        is_encrypted = bool(swarm.credentials)
        _show(offer, lent, peer, is_encrypted=is_encrypted, as_json=as_json)
        carry_out = partial(_carry_out, peer.node, line, lent.availability)
        control = PeerControl(offer.peer_id, peer.node, carry_out, peer.name)
        home = lent.home.path if lent.home else None

        async def show_reachability() -> None:
            await _tell_reached(peer.transport, swarm.coordinator, as_json=as_json)
            if not as_json:
                line.start(StatusLine(peer.node, lent.shape))

        async with (
            in_background(show_reachability()),
            control.listening(home),
            enforce_availability(peer.node, lent.availability),
        ):
            try:
                await peer.run()
            except asyncio.CancelledError:
                line.print_above("leaving at once")
                raise click.exceptions.Exit(LEFT_AT_ONCE) from None
            finally:
                line.end()
                print_contribution(peer.name, peer.node.last_contribution, as_json=as_json)


def _carry_out(node: PeerNode, line: PeerLine, keeper: AvailabilityController, verb: str) -> None:
    """Carry out a request of `swarm-ft peer`."""
    if verb == DRAIN:
        line.begin(hosts=node.has_stages, timeout_s=math.inf)
        node.leave(reason="its volunteer asked for it")
    else:
        keeper.request_pause(to_pause=verb == PAUSE)


def _drain_first(
    node: PeerNode, line: PeerLine, timeout_s: float
) -> Callable[[signal.Signals], object]:
    """Return a handler that drains the peer at the first stop signal and ends it at the second.

    The first Ctrl-C at a terminal sets no time limit, since the user can press it again.
    """
    task, is_draining = asyncio.current_task(), False

    def stop(number: signal.Signals) -> None:
        nonlocal is_draining
        # `swarm-ft peer drain` may have started it.
        is_draining |= number is signal.SIGINT and node.is_draining
        if is_draining and task is not None:
            task.cancel()
            return
        is_draining = True
        is_by_hand = number is signal.SIGINT and sys.stdin.isatty()
        line.begin(hosts=node.has_stages, timeout_s=math.inf if is_by_hand else timeout_s)
        node.leave(math.inf if is_by_hand else timeout_s, "Ctrl-C" if is_by_hand else number.name)

    return stop


async def _tell_reached(
    transport: GrpcTransport | HomeTransport, coordinator: str | None, *, as_json: bool
) -> None:
    from swarm_ft.reach.transport import HomeTransport

    if isinstance(transport, HomeTransport) and coordinator is not None:
        await print_reachability(transport.reach, coordinator, as_json=as_json)


def _show(
    offer: PeerOptions, lent: PreparedPeer, peer: Peer, *, is_encrypted: bool, as_json: bool
) -> None:
    from swarm_ft.protocol.spec.bounds import host_of, is_loopback
    from swarm_ft.transport.grpc_options import ADVICE, restarts_after_idle

    endpoint = peer.endpoint
    layers, only_here = str(offer.layers or "auto"), is_loopback(host_of(endpoint))
    if as_json:
        document = {
            "peer": offer.peer_id,
            "name": peer.name,
            "layers": layers,
            "endpoint": endpoint,
            "encrypted": is_encrypted,
            "encrypted_at_rest": offer.encrypts,
            "only_here": only_here,
            "lends": lent.resources.fields(),
        }
        click.echo(json.dumps(document))
        return
    chosen = f"it offers layers {layers}" if offer.layers else "the coordinator chooses its layers"
    click.echo(f"This machine is {peer.name} at {endpoint}; {chosen}. Ctrl-C leaves.")
    if only_here:
        click.echo(
            f"Only this machine can reach {host_of(endpoint)}; --announce HOST sets an address "
            "for peers on other machines."
        )
    for line in who_sees(offer, is_encrypted=is_encrypted):
        click.echo(line)
    if restarts_after_idle():
        click.echo(f"Optional: {ADVICE}")


def who_sees(offer: PeerOptions, *, is_encrypted: bool) -> tuple[str, ...]:
    """Describe which data of others this machine sees and stores."""
    from swarm_ft.protocol.spec.sizes import format_size

    links = "" if is_encrypted else " Links are not encrypted: the network can read them, too."
    where = offer.buffers.directory.parent if offer.buffers.directory else offer.shard_dir
    form = "encrypted" if offer.encrypts else "unencrypted (see --encrypt-at-rest)"
    return (
        "This machine sees activations, gradients and its layers' weights of the runs that it "
        f"serves; with the first or the last stage it also sees text.{links}",
        f"Files of a run lie {form} in {where} until the run ends.",
        "It also stores encrypted backups of other peers' stages, which it cannot read: up to "
        f"{format_size(offer.keeper_storage.max_bytes)} (--keep-disk).",
    )
