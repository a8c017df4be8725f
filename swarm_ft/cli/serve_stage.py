"""The command `swarm-ft serve-stage`, which lends this machine to a swarm."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from swarm_ft.api.connections import SwarmAddress, SwarmConnection, in_background, join
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.cli.doctor import print_reachability
from swarm_ft.cli.options import (
    examples,
    json_flag,
    log_format_option,
    log_option,
    shows_first,
    takes,
)
from swarm_ft.cli.peer_control import DRAIN, PAUSE, PeerControl
from swarm_ft.cli.peer_lines import PeerLine, print_contribution
from swarm_ft.cli.running import load, on_each_stop_signal, run_async, show_start
from swarm_ft.cli.status_line import StatusLine
from swarm_ft.cli.swarm_options import way_in

if TYPE_CHECKING:
    from swarm_ft.api.availability_controller import AvailabilityController
    from swarm_ft.api.peer_process import Peer, PreparedPeer
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_transport import GrpcTransport

LEFT_AT_ONCE = 130
"""Exit code after a second stop signal."""
PEER_MODULES = ("swarm_ft.peer.node", "swarm_ft.discovery.dht", "swarm_ft.stage.hub_cache")
"""Modules that a peer needs before its first run, which then imports transformers' models."""


@click.command(
    short_help="Lend this machine to a swarm.",
    epilog=examples(
        "swarm-ft serve-stage @invitation.txt",
        "swarm-ft serve-stage @invitation.txt --layers 12-24 --device cuda:0",
        "swarm-ft serve-stage --insecure --initial-peers /ip4/127.0.0.1/tcp/31337/p2p/...",
    ),
)
@shows_first("layers")
@way_in(by_argument=True)
@takes("options", ServeOptions, instead={"host": "all interfaces; 127.0.0.1 with --insecure"})
@json_flag
@log_option
@log_format_option
def serve_stage(way: SwarmAddress, options: ServeOptions, as_json: bool) -> None:
    """Lend this machine to a swarm, as a peer that hosts stages of runs, until Ctrl-C.

    INVITE is @FILE, a file with an invitation (`swarm-ft invite`). Without it the command prompts
    for the invitation, or reads standard input.
    """
    from swarm_ft.api.peer_process import check_options, prepare_peer

    check_options(way, options)
    show_start("starting the peer; libraries take some seconds to load", as_json=as_json)
    load(*PEER_MODULES)

    async def work(prepared: PreparedPeer) -> None:
        async with join(way, prepared.key_file, options.name or "") as swarm:
            await _serve(swarm, prepared, as_json=as_json)

    with prepare_peer(way, options) as prepared:
        if not as_json:
            click.echo(prepared.resources.in_words())
        run_async(lambda: work(prepared))


# ---- a peer from its first to its last line


async def _serve(swarm: SwarmConnection, prepared: PreparedPeer, *, as_json: bool) -> None:
    """Run the peer until a stop signal, and print its address once it listens.

    Raises:
        Exit: A second stop signal ended the peer; its contribution is the last line.
    """
    from swarm_ft.api.peer_process import enforce_availability, start_peer

    line = PeerLine()
    prepared.availability.on_change = line.print_above
    offer = await prepared.node_options(swarm)

    def drain_on_signal(node: PeerNode) -> None:
        on_each_stop_signal(_drain_first(node, line, prepared.options.leave_timeout_s))

    up = start_peer(
        swarm,
        prepared.options.listening,
        offer,
        prepared.make_engine,
        prepared.shape,
        on_made=drain_on_signal,
        on_leave=line.show,
    )
    async with up as peer:
        is_encrypted = bool(swarm.credentials)
        _show(offer, prepared, peer, is_encrypted=is_encrypted, as_json=as_json)
        carry_out = partial(_carry_out, peer.node, line, prepared.availability)
        control = PeerControl(offer.peer_id, peer.node, carry_out, peer.name)
        home = prepared.home.path if prepared.home else None

        async def show_reachability() -> None:
            await _report_reachability(peer.transport, swarm.coordinator, as_json=as_json)
            if not as_json:
                line.start(StatusLine(peer.node, prepared.shape))

        async with (
            in_background(show_reachability()),
            control.listening(home),
            enforce_availability(peer.node, prepared.availability),
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


async def _report_reachability(
    transport: GrpcTransport | HomeTransport, coordinator: str | None, *, as_json: bool
) -> None:
    from swarm_ft.reach.transport import HomeTransport

    if isinstance(transport, HomeTransport) and coordinator is not None:
        await print_reachability(transport.reach, coordinator, as_json=as_json)


def _show(
    offer: PeerOptions, prepared: PreparedPeer, peer: Peer, *, is_encrypted: bool, as_json: bool
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
            "lends": prepared.resources.fields(),
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
