"""A peer's process from its first to its last word. Knows no options of the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.options import Listening
from swarm_ft.cli.running import on_stop_signal
from swarm_ft.log import get_logger

if TYPE_CHECKING:
    from swarm_ft.discovery import Directory
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.peer.stage_state import EngineMaker


async def serve_peer(
    offer: PeerOptions,
    swarm: tuple[tuple[str, ...], str],
    listening: Listening,
    make_engine: EngineMaker,
    *,
    as_json: bool,
) -> None:
    """Be a peer until a stop signal; says where it listens once it does.

    Args:
        offer: what the volunteer decided.
        swarm: nodes of its DHT, and the prefix of its records.
        listening: where others reach this peer.
        make_engine: what computes.
        as_json: speak in JSON.

    Raises:
        DirectoryUnreachable: none of the nodes answers.
        PortInUse: the port is taken.
    """
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions

    initial_peers, prefix = swarm
    options = DhtOptions(initial_peers=initial_peers, prefix=prefix, client_mode=True)
    directory = await DhtDirectory.open(options)
    try:
        await _serve(directory, listening, offer, make_engine, as_json=as_json)
    finally:
        await directory.close()


async def _serve(
    directory: Directory,
    listening: Listening,
    offer: PeerOptions,
    make_engine: EngineMaker,
    *,
    as_json: bool,
) -> None:
    from swarm_ft.clock import SystemClock
    from swarm_ft.discovery import Role
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.transport.grpc_options import WARM_IDLE_S, GrpcOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport
    from swarm_ft.transport.tcp_idle import ADVICE, restarts_after_idle

    if restarts_after_idle():
        get_logger(__name__).info("tcp-idle-restart %s", ADVICE)
    transport = GrpcTransport(GrpcOptions(warm_idle_s=WARM_IDLE_S))
    node = PeerNode(
        offer,
        directory=directory,
        transport=transport,
        clock=SystemClock(),
        make_engine=make_engine,
    )
    server = await transport.serve(listening.host, listening.port, node.handlers())
    endpoint = listening.endpoint(int(server.endpoint.rpartition(":")[2]))
    on_stop_signal(_politely_first(node))
    try:
        await directory.announce(Role.PEER, offer.peer_id, endpoint)
        _show(offer, endpoint, as_json=as_json)
        await node.run()
    finally:
        await server.stop()
        await directory.withdraw(Role.PEER, offer.peer_id)


def _politely_first(node: PeerNode) -> Callable[[], object]:
    """Say goodbye at the first stop signal; at the next one, let go of whatever is here."""
    task = asyncio.current_task()
    if task is None:
        return node.leave
    steps = iter((node.leave,))
    return lambda: next(steps, task.cancel)()


def _show(offer: PeerOptions, endpoint: str, *, as_json: bool) -> None:
    layers = str(offer.layers or "auto")
    if as_json:
        click.echo(json.dumps({"peer": offer.peer_id, "layers": layers, "endpoint": endpoint}))
    else:
        click.echo(f"peer {offer.peer_id} at {endpoint} offers layers {layers}; Ctrl-C leaves")
