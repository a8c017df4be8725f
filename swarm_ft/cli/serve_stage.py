"""`swarm-ft serve-stage`: lend this machine to a swarm."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.doctor import tell_reached
from swarm_ft.cli.joining import Joined, WayIn, joined, way_in
from swarm_ft.cli.leaving import LEAVE_TIMEOUT_S, LeaveLine, tell_gift
from swarm_ft.cli.manners import (
    CASES,
    USE_FILE,
    Keeper,
    MonthlyCount,
    check_has_keys,
    link_options,
    manners_of,
    shape_of,
)
from swarm_ft.cli.options import (
    BufferOptions,
    Listening,
    examples,
    json_flag,
    log_option,
    snapshots_option,
    takes,
)
from swarm_ft.cli.peer_control import DRAIN, PAUSE, PeerControl
from swarm_ft.cli.peer_home import KEY_FILE, PeerHome, claim_home, work_folder
from swarm_ft.cli.running import announced, beside, on_each_stop_signal, run_async
from swarm_ft.errors import BadOption
from swarm_ft.log import get_logger

if TYPE_CHECKING:
    from swarm_ft.ids import PeerId
    from swarm_ft.peer.kept_buffers import BufferPlace
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.peer.state.stage_state import EngineMaker
    from swarm_ft.protocol.messages.capacity import Machine
    from swarm_ft.reach.shaping import Shape
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
    "--hours",
    metavar="START-STOP",
    help="Work only at these hours of the day, by this machine's clock: 22-7, 22:30-6:45.",
)
@click.option(
    "--pause-when",
    multiple=True,
    type=click.Choice(CASES),
    help="Pause while another program uses the GPU, the machine runs on its battery, or somebody "
    "sits at it; may be given several times.",
)
@link_options
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
    from swarm_ft.protocol.spec.layers import parse_layers

    layer_range = parse_layers(layers)
    make_engine = _engine_maker(given["device"], given["dtype"], given["model"], given["threads"])
    memory_bytes = _memory_bytes(given["memory_gib"], given["device"], buffers.memory_bytes)
    manners = manners_of(given["hours"], given["pause_when"])
    if way.invite is None:
        check_has_keys(given)
        listening.check_only_here()
    if way.invite is not None and given["peer_id"] is not None:
        raise BadOption("--peer-id: with an invitation a peer's name is its key's")
    home = _home(given["peer_id"], buffers, has_key=way.invite is not None)
    folder, shape = work_folder(home), shape_of(given["upload_mbps"], given["download_mbps"])
    keeper = Keeper(manners)
    if home is not None and given["monthly_gb"] is not None:
        count = MonthlyCount(home.path / USE_FILE, given["monthly_gb"], shape)
        keeper.used_up = count.used_up

    async def work() -> None:
        from swarm_ft.ids import PeerId
        from swarm_ft.peer.node import PeerOptions

        async with joined(way, home.path / KEY_FILE if home else None) as swarm:
            offer = PeerOptions(
                peer_id=PeerId(swarm.name) if swarm.name else _peer_id(given["peer_id"], home),
                layers=layer_range,
                memory_bytes=memory_bytes,
                shard_dir=Path(folder.name),
                buffers=_buffer_place(home, buffers),
                snapshots_url=given["snapshots"] or "",
                encrypts=encrypt_at_rest,
                max_up_bytes_per_s=shape.up.bytes_per_s,
                max_down_bytes_per_s=shape.down.bytes_per_s,
                machine=await _measured(given["device"], given["dtype"], given["watts"]),
            )
            await serve_peer(
                swarm,
                listening,
                offer,
                make_engine,
                leave_timeout_s=given["leave_timeout"],
                keeper=keeper,
                shape=shape,
                home_path=home.path if home else None,
                as_json=as_json,
            )

    with closing(home) if home else nullcontext(), folder:
        run_async(work)


def _home(name: str | None, buffers: BufferOptions, *, has_key: bool) -> PeerHome | None:
    """Where on disk this peer keeps its key and its buffers; None if it is to keep neither."""
    if not buffers.disk_bytes and not has_key:
        return None
    if name is not None:
        _checked_name(name)  # it may become a directory's
    return claim_home(name, buffers.directory)


def _buffer_place(home: PeerHome | None, buffers: BufferOptions) -> BufferPlace:
    from swarm_ft.buffers import BufferLimits
    from swarm_ft.peer.kept_buffers import BufferPlace

    limits = BufferLimits(memory_bytes=buffers.memory_bytes, disk_bytes=buffers.disk_bytes)
    directory = home.path / "buffers" if home and buffers.disk_bytes else None
    keep_s = 86400.0 * buffers.keep_days
    return BufferPlace(limits=limits, directory=directory, keep_s=keep_s)


def _peer_id(given: str | None, home: PeerHome | None) -> PeerId:
    drawn = given or f"peer-{secrets.token_hex(4)}"
    return _checked_name(drawn if given or home is None else home.name(drawn))


def _checked_name(name: str) -> PeerId:
    from swarm_ft.discovery.directory import checked_record
    from swarm_ft.ids import PeerId
    from swarm_ft.protocol.spec.bounds import MAX_ID_CHARS

    checked_record(name, "localhost:1")
    if len(name) > MAX_ID_CHARS:
        raise BadOption(f"--peer-id: expected at most {MAX_ID_CHARS} characters, got {len(name)}")
    return PeerId(name)


def _engine_maker(device: str, dtype: str, model: str | None, threads: int | None) -> EngineMaker:
    import torch

    from swarm_ft.protocol.spec.layers import LayerRange
    from swarm_ft.protocol.spec.run_spec import RunSpec
    from swarm_ft.stage.base import Engine
    from swarm_ft.stage.checkpoint import check_checkpoint, open_checkpoint
    from swarm_ft.stage.device import DTYPES, pick_device
    from swarm_ft.stage.engine import StageEngine

    torch_dtype = DTYPES[dtype]
    torch_device = pick_device(device, torch_dtype)
    # Said at all, it holds: libraries would take fewer threads as the machine is loaded, and sum in
    # another order than a replica, or than they did before.
    torch.set_num_threads(threads or torch.get_num_threads())
    if model:
        check_checkpoint(model)  # a wrong --model is told now, not when a run comes

    def make_engine(spec: RunSpec, layers: LayerRange) -> Engine:
        checkpoint = open_checkpoint(model or spec.model.reference, spec.train)
        return StageEngine(checkpoint, spec, layers, device=torch_device, dtype=torch_dtype)

    return make_engine


def _memory_bytes(memory_gib: float | None, device: str, buffer_memory_bytes: int) -> int:
    from swarm_ft.stage.device import free_memory_bytes, pick_device, shares_memory

    if memory_gib is not None:
        return int(memory_gib * (1 << 30))
    torch_device = pick_device(device)
    free_bytes = free_memory_bytes(torch_device)
    if shares_memory(torch_device):  # buffers lie in the same memory, if there are any
        free_bytes -= min(buffer_memory_bytes, free_bytes // 2)
    return int(0.8 * free_bytes)


async def _measured(device: str, dtype: str, watts: float) -> Machine:
    """What this machine can do; the node measures its link."""
    from swarm_ft.protocol.messages.capacity import Machine
    from swarm_ft.stage.device import DTYPES, pick_device
    from swarm_ft.stage.speed import training_flops_per_s

    torch_dtype = DTYPES[dtype]
    torch_device = pick_device(device, torch_dtype)
    flops = await asyncio.to_thread(training_flops_per_s, torch_device, torch_dtype)
    return Machine(flops_per_s=flops, watts=watts)


# ---- a peer from its first to its last word


async def serve_peer(
    swarm: Joined,
    listening: Listening,
    offer: PeerOptions,
    make_engine: EngineMaker,
    *,
    leave_timeout_s: float = LEAVE_TIMEOUT_S,
    keeper: Keeper | None = None,
    shape: Shape | None = None,
    home_path: Path | None = None,
    as_json: bool,
) -> None:
    """Be a peer until a stop signal; says where it listens once it does.

    Args:
        swarm: where it is announced, and finds the coordinator; who it is there.
        listening: where others reach this peer.
        offer: what the volunteer decided.
        make_engine: what computes.
        keeper: of the volunteer's manners, if there are any.
        shape: of the link to other members.
        home_path: where the peer keeps what is its own; there it can be spoken to.
        leave_timeout_s: how long it may take to leave, where nobody is there to insist.
        as_json: speak in JSON.

    Raises:
        PortInUse: the port is taken.
    """
    from swarm_ft.clock import SystemClock
    from swarm_ft.identity.certificates import Role
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_options import (
        ADVICE,
        CONTROL_ANSWER_S,
        WARM_IDLE_S,
        GrpcOptions,
        restarts_after_idle,
    )
    from swarm_ft.transport.grpc_transport import GrpcTransport

    if restarts_after_idle():
        get_logger(__name__).info("tcp-idle-restart %s", ADVICE)
    own, directory = swarm.credentials, swarm.directory
    if swarm.coordinator is not None:
        listening = listening.towards(swarm.coordinator)
    grpc = GrpcTransport(GrpcOptions(warm_idle_s=WARM_IDLE_S, credentials=own))
    shape = shape or shape_of(None, None)
    transport = swarm.transport(grpc, shape)
    control = GrpcOptions(answer_timeout_s=CONTROL_ANSWER_S, credentials=own)
    home = transport if isinstance(transport, HomeTransport) else None
    line, keeper = LeaveLine(), keeper or Keeper(manners_of(None, ()))
    node = PeerNode(
        offer,
        directory=directory,
        transport=transport,
        control_transport=GrpcTransport(control),
        clock=SystemClock(),
        make_engine=make_engine,
        on_revoked=own.revoke if own else None,
        on_leave=line.show,
        is_relayed=home.is_relayed if home else lambda _: False,
        at_rest=home.at_rest if home else lambda: None,
        sent_bytes=lambda: shape.up.passed_bytes,
    )
    server = await transport.serve(listening.address, listening.port, node.handlers())
    on_each_stop_signal(_politely_first(node, line, leave_timeout_s))

    def ask(verb: str) -> None:
        if verb == DRAIN:
            line.begin(hosts=node.hosts, timeout_s=math.inf)
            node.leave(reason="its volunteer asked for it")
        else:
            keeper.ask(to_pause=verb == PAUSE)

    speaking = PeerControl(offer.peer_id, node, ask)
    async with announced(server, listening, directory, Role.PEER, offer.peer_id) as endpoint:
        if home:
            home.start((endpoint,))
        _show(offer, endpoint, is_encrypted=own is not None, as_json=as_json)
        async with beside(_tell_reached(transport, swarm.coordinator, as_json=as_json)):
            keeper.node = node
            try:
                async with speaking.listening(home_path), beside(keeper.look()):
                    await node.run(endpoint)
            finally:
                line.end()
                keeper.used_up()  # counts the last bytes
                tell_gift(node.gift(), as_json=as_json)


def _politely_first(
    node: PeerNode, line: LeaveLine, timeout_s: float
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


def _show(offer: PeerOptions, endpoint: str, *, is_encrypted: bool, as_json: bool) -> None:
    from swarm_ft.protocol.spec.bounds import host_of, is_loopback

    layers, only_here = str(offer.layers or "auto"), is_loopback(host_of(endpoint))
    if as_json:
        told = {"peer": offer.peer_id, "layers": layers, "endpoint": endpoint}
        privacy = {"encrypted": is_encrypted, "encrypted_at_rest": offer.encrypts}
        privacy["only_here"] = only_here
        click.echo(json.dumps({**told, **privacy}))
        return
    click.echo(f"peer {offer.peer_id} at {endpoint} offers layers {layers}; Ctrl-C leaves")
    if only_here:
        click.echo(
            f"{host_of(endpoint)} is this machine's own address: peers on other machines cannot "
            "use it; --announce HOST names another"
        )
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
