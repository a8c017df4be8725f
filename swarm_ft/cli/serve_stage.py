"""`swarm-ft serve-stage`: lend this machine to a swarm."""

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

from swarm_ft.api.joining import Joined, WayIn, beside, joined
from swarm_ft.api.listening import Listening
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.cli.at_work import AtWork
from swarm_ft.cli.doctor import tell_reached
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.leaving import LEAVE_TIMEOUT_S, PeerLine, say_farewell
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
from swarm_ft.cli.running import load, on_each_stop_signal, run_async, show_start
from swarm_ft.protocol.spec.bounds import MAX_HOSTED

if TYPE_CHECKING:
    from swarm_ft.api.manners import Keeper
    from swarm_ft.api.serving import Lent, Peer
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_transport import GrpcTransport

PAUSE_CASES = ("gpu-busy", "on-battery", "user-active")
MIN_MBPS = 0.1
PEER_MODULES = ("swarm_ft.peer.node", "swarm_ft.discovery.dht", "swarm_ft.stage.hub_cache")
"""All that a peer without a run imports. With its first run come transformers' models."""


def _link_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of what is lent of the link."""
    for option in (
        click.option(
            "--monthly-gb",
            metavar="GB",
            type=click.FloatRange(min=0, min_open=True),
            help="Send and receive so many GB a calendar month at most, then pause until the next. "
            "The count is kept with the peer's key.",
        ),
        click.option(
            "--download-mbps",
            metavar="MBPS",
            type=click.FloatRange(min=MIN_MBPS),
            help="Receive from other members at so many Mbps at most.",
        ),
        click.option(
            "--upload-mbps",
            metavar="MBPS",
            type=click.FloatRange(min=MIN_MBPS),
            help="Send to other members at so many Mbps at most; the coordinator plans with it.",
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
    help="Use this model for every run, in the place of the one that a job names. "
    "Its weights must be the run's; digests are checked.",
)
@click.option(
    "--models",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Directory below which jobs may name models; may be given several times. Without it a job "
    "opens no directory of this machine.",
)
@click.option(
    "--model-disk",
    "model_disk_bytes",
    metavar="SIZE",
    type=ByteSize(),
    help="Disk for models of the hub that jobs name; those used least recently go first, 0 fetches "
    "none.  [default: a quarter of what is free]",
)
@click.option(
    "--allow-models",
    multiple=True,
    metavar="ORG/NAME|ORG/*",
    help="Model or organisation of the hub that jobs may name; may be given several times.  "
    "[default: all public models]",
)
@click.option(
    "--memory",
    "lent_memory_bytes",
    metavar="SIZE",
    type=ByteSize(minimum=1),
    help="Limit for stages and their microbatches, such as 5GiB; bounds --layers auto. On a GPU it "
    "is the total; on a CPU buffers are extra.  "
    "[default: 80 % of what is free beside buffers]",
)
@click.option(
    "--max-stages",
    metavar="N",
    type=click.IntRange(1, MAX_HOSTED),
    default=MAX_HOSTED,
    show_default=True,
    help="Host so many stages at most, each of another run, where --memory has room for them; 1 "
    "works for one run at a time.",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads to compute with.")
@click.option(
    "--watts",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="W",
    help="Power that this machine draws under load, for forecasts of energy ('swarm-ft plan').",
)
@takes("buffers", BufferOptions)
@snapshots_option
@click.option(
    "--keep-disk",
    "keep_disk_bytes",
    metavar="SIZE",
    type=ByteSize(),
    help="Disk for encrypted snapshots of others' stages; 0 keeps none.  [default: a tenth of what "
    "is free]",
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
    help="Id and name of this peer, with --insecure alone.  [default: the one that it had here "
    "before, or a random one]",
)
@click.option(
    "--hours",
    metavar="START-STOP",
    help="Work only at these hours of the day, by this machine's clock: 22-7, 22:30-6:45.",
)
@click.option(
    "--pause-when",
    multiple=True,
    type=click.Choice(PAUSE_CASES),
    help="Pause while another program uses the GPU, the machine runs on its battery, or somebody "
    "sits at it; may be given several times.",
)
@_link_options
@click.option(
    "--leave-timeout",
    metavar="S",
    type=click.FloatRange(min=0),
    default=LEAVE_TIMEOUT_S,
    show_default=True,
    help="Seconds that it may take to hand over what nobody else has, when a service manager or a "
    "script stops this peer. Ctrl-C at a terminal waits as long as it takes; once more does not.",
)
@click.option(
    "--encrypt-at-rest",
    is_flag=True,
    help="Encrypt what this peer writes to disks: buffers, snapshots, results. The coordinator "
    "keeps a key for each run, which ends with the run.",
)
@json_flag
@log_option
@log_format_option
def serve_stage(
    layers: str,
    way: WayIn,
    listening: Listening,
    buffers: BufferOptions,
    encrypt_at_rest: bool,
    leave_timeout: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Host one stage of whatever run the swarm trains, until Ctrl-C.

    INVITE is @FILE, a file with what its owner gave you (`swarm-ft invite`). Without it the command
    asks, or reads standard input.
    """
    from swarm_ft.api.serving import ServeOptions, check_options, lending
    from swarm_ft.protocol.spec.layers import parse_layers

    options = ServeOptions(
        layers=parse_layers(layers),
        listening=listening,
        buffers=buffers,
        encrypt_at_rest=encrypt_at_rest,
        **given,
    )

    check_options(way, options)
    show_start("starting this peer; its libraries take some seconds", as_json=as_json)
    load(*PEER_MODULES)

    async def work(lent: Lent) -> None:
        async with joined(way, lent.key_file, options.name or "") as swarm:
            await _serve(swarm, lent, leave_timeout, as_json=as_json)

    with lending(way, options) as lent:
        if not as_json:
            click.echo(lent.resources.in_words())
        run_async(lambda: work(lent))


# ---- a peer from its first to its last word


async def _serve(swarm: Joined, lent: Lent, leave_timeout_s: float, *, as_json: bool) -> None:
    """Be a peer until a stop signal; says where it listens once it does."""
    from swarm_ft.api.serving import kept, peer_up

    line = PeerLine()
    lent.keeper.say = line.say
    offer = await lent.offer(swarm)

    def leaves_politely(node: PeerNode) -> None:
        on_each_stop_signal(_politely_first(node, line, leave_timeout_s))

    up = peer_up(
        swarm,
        lent.options.listening,
        offer,
        lent.make_engine,
        lent.shape,
        on_made=leaves_politely,
        on_leave=line.show,
    )
    async with up as peer:
        is_encrypted = bool(swarm.credentials)
        _show(offer, lent, peer, is_encrypted=is_encrypted, as_json=as_json)
        ask = partial(_asked, peer.node, line, lent.keeper)
        speaking = PeerControl(offer.peer_id, peer.node, ask, peer.name)
        home = lent.home.path if lent.home else None

        async def tell() -> None:
            await _tell_reached(peer.transport, swarm.coordinator, as_json=as_json)
            if not as_json:
                line.start(AtWork(peer.node, lent.shape))

        async with (
            beside(tell()),
            speaking.listening(home),
            kept(peer.node, lent.keeper),
        ):
            try:
                await peer.run()
            finally:
                line.end()
                say_farewell(peer.name, peer.node.last_contribution, as_json=as_json)


def _asked(node: PeerNode, line: PeerLine, keeper: Keeper, verb: str) -> None:
    """By `swarm-ft peer`."""
    if verb == DRAIN:
        line.begin(hosts=node.hosts, timeout_s=math.inf)
        node.leave(reason="its volunteer asked for it")
    else:
        keeper.ask(to_pause=verb == PAUSE)


def _politely_first(
    node: PeerNode, line: PeerLine, timeout_s: float
) -> Callable[[signal.Signals], object]:
    """Ask to leave at the first stop signal; at the next one, let go of whatever is here.

    Who presses Ctrl-C can press it again, so that waits as long as it takes.
    """
    task, asked = asyncio.current_task(), False

    def stop(number: signal.Signals) -> None:
        nonlocal asked
        asked |= number is signal.SIGINT and node.leaves  # it was drained
        if asked and task is not None:
            task.cancel()
            return
        asked = True
        is_by_hand = number is signal.SIGINT and sys.stdin.isatty()
        line.begin(hosts=node.hosts, timeout_s=math.inf if is_by_hand else timeout_s)
        node.leave(math.inf if is_by_hand else timeout_s, "Ctrl-C" if is_by_hand else number.name)

    return stop


async def _tell_reached(
    transport: GrpcTransport | HomeTransport, coordinator: str | None, *, as_json: bool
) -> None:
    from swarm_ft.reach.transport import HomeTransport

    if isinstance(transport, HomeTransport) and coordinator is not None:
        await tell_reached(transport.reach, coordinator, as_json=as_json)


def _show(offer: PeerOptions, lent: Lent, peer: Peer, *, is_encrypted: bool, as_json: bool) -> None:
    from swarm_ft.protocol.spec.bounds import host_of, is_loopback
    from swarm_ft.transport.grpc_options import ADVICE, restarts_after_idle

    endpoint = peer.endpoint
    layers, only_here = str(offer.layers or "auto"), is_loopback(host_of(endpoint))
    if as_json:
        told = {"peer": offer.peer_id, "name": peer.name, "layers": layers, "endpoint": endpoint}
        privacy = {"encrypted": is_encrypted, "encrypted_at_rest": offer.encrypts}
        privacy["only_here"] = only_here
        lends = {"lends": lent.resources.fields()}
        click.echo(json.dumps({**told, **privacy, **lends}))
        return
    chosen = f"it offers layers {layers}" if offer.layers else "the coordinator chooses its layers"
    click.echo(f"This machine is {peer.name} at {endpoint}; {chosen}. Ctrl-C leaves.")
    if only_here:
        click.echo(
            f"{host_of(endpoint)} is this machine's own address: peers on other machines cannot "
            "use it; --announce HOST names another"
        )
    for line in who_sees(offer, is_encrypted=is_encrypted):
        click.echo(line)
    if restarts_after_idle():
        click.echo(f"optional: {ADVICE}")


def who_sees(offer: PeerOptions, *, is_encrypted: bool) -> tuple[str, ...]:
    """What passes this machine of others' data, and what becomes of it, in words."""
    from swarm_ft.protocol.spec.sizes import size_words

    others = "" if is_encrypted else "; so does whoever sees its network: links are not encrypted"
    where = offer.buffers.directory.parent if offer.buffers.directory else offer.shard_dir
    form = "encrypted" if offer.encrypts else "unencrypted (see --encrypt-at-rest)"
    return (
        "Of the runs that it serves this machine sees activations, gradients, its layers' weights "
        f"and, with the first or the last stage, text{others}.",
        f"Files of a run lie {form} in {where} until the run ends.",
        "It also stores backups of other machines' stages, which it cannot read: up to "
        f"{size_words(offer.keeping.max_bytes)} (--keep-disk).",
    )
