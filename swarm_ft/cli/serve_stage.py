"""`swarm-ft serve-stage`: lend this machine to a swarm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.joining import Joined, WayIn, beside, joined
from swarm_ft.api.listening import Listening
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.cli.doctor import tell_reached
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.options import examples, json_flag, log_option, snapshots_option, takes
from swarm_ft.cli.running import on_stop_signal, run_async

if TYPE_CHECKING:
    from swarm_ft.api.serving import Lent
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.peer.state.stage_state import EngineMaker
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_transport import GrpcTransport


@click.command(
    short_help="Lend this machine to a swarm.",
    epilog=examples(
        "swarm-ft serve-stage swarm1QXL4a1e1UG4CS6...",
        "swarm-ft serve-stage swarm1QXL4a1e1UG4CS6... --layers 12-24 --device cuda:0",
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
@takes("listening", Listening)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="What to compute in; weights stay float32.",
)
@click.option(
    "--model",
    metavar="DIR|HUB_ID",
    help="Where this machine has the run's model, if not where the run says. "
    "Its weights must be the same; digests are checked.",
)
@click.option(
    "--memory",
    "memory_gib",
    metavar="GIB",
    type=click.FloatRange(min=0, min_open=True),
    help="GiB lent at most, to a stage and the microbatches in flight there; bounds --layers auto. "
    "On a CPU buffers come on top.  [default: 80 % of what is free beside buffers]",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads to compute with.")
@click.option(
    "--watts",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="W",
    help="That this machine takes at work, for forecasts of kWh ('swarm-ft plan').",
)
@takes("buffers", BufferOptions)
@snapshots_option
@click.option(
    "--peer-id",
    metavar="NAME",
    help="Name of this peer.  [default: the one that it had here before, or a random one]",
)
@click.option(
    "--encrypt-at-rest",
    is_flag=True,
    help="Encrypt what this peer writes to disks: buffers, snapshots, results. The coordinator "
    "keeps a key for each run, which ends with the run.",
)
@json_flag
@log_option
def serve_stage(
    layers: str,
    way: WayIn,
    listening: Listening,
    buffers: BufferOptions,
    encrypt_at_rest: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Host one stage of whatever run the swarm trains, until Ctrl-C.

    INVITE is what its owner gave you (`swarm-ft invite`); @FILE reads it from a file.
    """
    from swarm_ft.api.serving import ServeOptions, lending
    from swarm_ft.protocol.spec.layers import parse_layers

    options = ServeOptions(
        layers=parse_layers(layers),
        listening=listening,
        buffers=buffers,
        encrypt_at_rest=encrypt_at_rest,
        **given,
    )

    async def work(lent: Lent) -> None:
        async with joined(way, lent.key_file) as swarm:
            offer = await lent.offer(swarm)
            await serve_peer(swarm, listening, offer, lent.make_engine, as_json=as_json)

    with lending(way, options) as lent:
        run_async(lambda: work(lent))


# ---- a peer from its first to its last word


async def serve_peer(
    swarm: Joined,
    listening: Listening,
    offer: PeerOptions,
    make_engine: EngineMaker,
    *,
    as_json: bool,
) -> None:
    """Be a peer until a stop signal; says where it listens once it does.

    Args:
        as_json: speak in JSON; the others are those of `peer_up`.

    Raises:
        PortInUse: the port is taken.
    """

    def leaves_politely(node: PeerNode) -> None:
        on_stop_signal(_politely_first(node))

    from swarm_ft.api.serving import peer_up

    up = peer_up(swarm, listening, offer, make_engine, on_made=leaves_politely)
    async with up as peer:
        _show(offer, peer.endpoint, is_encrypted=swarm.credentials is not None, as_json=as_json)
        async with beside(_tell_reached(peer.transport, swarm.coordinator, as_json=as_json)):
            await peer.run()


def _politely_first(node: PeerNode) -> Callable[[], object]:
    """Say goodbye at the first stop signal; at the next one, let go of whatever is here."""
    task = asyncio.current_task()
    if task is None:
        return node.leave
    steps = iter((node.leave,))
    return lambda: next(steps, task.cancel)()


async def _tell_reached(
    transport: GrpcTransport | HomeTransport, coordinator: str | None, *, as_json: bool
) -> None:
    from swarm_ft.reach.transport import HomeTransport

    if isinstance(transport, HomeTransport) and coordinator is not None:
        await tell_reached(transport.reach, coordinator, as_json=as_json)


def _show(offer: PeerOptions, endpoint: str, *, is_encrypted: bool, as_json: bool) -> None:
    layers = str(offer.layers or "auto")
    if as_json:
        told = {"peer": offer.peer_id, "layers": layers, "endpoint": endpoint}
        privacy = {"encrypted": is_encrypted, "encrypted_at_rest": offer.encrypts}
        click.echo(json.dumps({**told, **privacy}))
        return
    click.echo(f"peer {offer.peer_id} at {endpoint} offers layers {layers}; Ctrl-C leaves")
    for line in who_sees(offer, is_encrypted=is_encrypted):
        click.echo(line)


def who_sees(offer: PeerOptions, *, is_encrypted: bool) -> tuple[str, ...]:
    """What passes this machine of others' data, and what becomes of it, in words."""
    others = "" if is_encrypted else "; so does whoever sees its network: links are not encrypted"
    where = offer.buffers.directory.parent if offer.buffers.directory else offer.shard_dir
    form = "encrypted" if offer.encrypts else "not encrypted (--encrypt-at-rest)"
    return (
        "of the runs that it serves this machine sees activations, gradients, its layers' weights "
        f"and, with the first or the last stage, text{others}",
        f"of these it keeps buffers, states and results in {where}, {form}, until the run is over",
    )
