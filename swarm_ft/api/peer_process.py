"""The start of a peer: from a volunteer's options to a node that hosts stages."""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.api.availability_controller import (
    USE_FILE,
    AvailabilityController,
    MonthlyTraffic,
    parse_availability,
    shape_of,
)
from swarm_ft.api.connections import SwarmAddress, SwarmConnection, announce, in_background, join
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.peer_home import (
    KEY_FILE,
    BufferOptions,
    PeerHome,
    claim_home,
    homes,
    work_folder,
)
from swarm_ft.api.resources import (
    PeerResources,
    check_buffer_memory,
    check_cores,
    check_disk,
    check_memory,
)
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.base import systems
from swarm_ft.base.clock import SystemClock
from swarm_ft.base.log import get_logger
from swarm_ft.errors import BadOption
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.member_name import ChosenName
from swarm_ft.stage.names import check_allowed_models, check_device_name, check_model_folders

if TYPE_CHECKING:
    import torch

    from swarm_ft.peer.buffer_storage import BufferStorage
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.peer.snapshot_keeper import KeeperStorage
    from swarm_ft.peer.state.stage_state import EngineMaker
    from swarm_ft.protocol.messages.capacity import Machine
    from swarm_ft.protocol.messages.control import LeaveProgress
    from swarm_ft.protocol.spec.run_spec import RunSpec
    from swarm_ft.reach.shaping import Shape
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.stage.base import Engine
    from swarm_ft.stage.hub_cache import HubCache
    from swarm_ft.stage.model_access import ModelAccess
    from swarm_ft.transport.grpc_transport import GrpcTransport


MODEL_SHARE = 0.25
"""Default share of the free disk for hub models."""
MODELS_FOLDER = "models"
"""Folder of hub models in a peer's home."""
KEEP_SHARE = 0.1
"""Default share of the free disk for snapshots of others' stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPeer:
    """A machine that is ready to be lent, before it joins a swarm.

    Attributes:
        options: The volunteer's options.
        make_engine: Function that creates the engine of a stage.
        memory_bytes: Memory for stages, in bytes.
        device_memory_bytes: Total memory of the computing device, in bytes; 0: unknown.
        resources: Limits of the machine's resources.
        home: Directory of the peer's key and buffers; None if it has neither.
        folder: Temporary folder for states and results.
        shape: Rate limiter of the link to other members.
        availability: Controller that pauses and resumes the peer.
    """

    options: ServeOptions
    make_engine: EngineMaker
    memory_bytes: int
    device_memory_bytes: int
    resources: PeerResources
    home: PeerHome | None
    folder: Path
    shape: Shape
    availability: AvailabilityController

    @property
    def key_file(self) -> Path | None:
        """The path of this peer's key; None without a home."""
        return self.home.path / KEY_FILE if self.home else None

    async def node_options(self, swarm: SwarmConnection) -> PeerOptions:
        """Build the options of the peer's node, and measure this machine's computing speed."""
        from swarm_ft.peer.node import PeerOptions
        from swarm_ft.stage.device import machine_memory_bytes, pick_device
        from swarm_ft.stage.speed import machine_key

        options = self.options
        device = pick_device(options.device)
        own_name = PeerId(swarm.name) if swarm.name else _peer_id(options.peer_id, self.home)
        return PeerOptions(
            peer_id=own_name,
            layers=parse_layers(options.layers),
            memory_bytes=self.memory_bytes,
            device_memory_bytes=self.device_memory_bytes,
            shard_dir=self.folder,
            buffers=_buffer_place(self.home, options.buffers),
            snapshots_url=options.snapshots or "",
            keeper_storage=_keeping_place(self.home.path if self.home else self.folder, options),
            encrypts=options.encrypt_at_rest,
            max_extra_stages=options.max_stages - 1,
            max_up_bytes_per_s=self.shape.up.bytes_per_s,
            max_down_bytes_per_s=self.shape.down.bytes_per_s,
            machine=await _measured(options.device, options.dtype, options.watts or 0.0),
            device=_device_words(options.device),
            codec_device=_coding_device(options.device),
            machine_key=machine_key(device),
            machine_memory_bytes=machine_memory_bytes(device) or 0,
        )


def check_options(way: SwarmAddress, options: ServeOptions) -> None:
    """Check a volunteer's options as far as possible without torch and without connections.

    Raises:
        BadOption: A value is out of its bounds, or contradicts the way in.
    """
    parse_layers(options.layers)
    parse_availability(options.hours, options.pause_when)
    check_device_name(options.device)
    check_model_folders(options.models)
    check_allowed_models(options.allow_models)
    refused = ChosenName().refusal(options.name or "")
    if refused is not None or options.name == "":
        raise BadOption(f"--name: {refused or 'expected a name, got an empty text'}")
    if way.invite is None:
        _check_has_keys(options)
        options.listening.check_local()
    elif options.peer_id is not None:
        raise BadOption(
            "--peer-id: expected it with --insecure alone; with an invitation a peer's id follows "
            "from its key, and --name chooses what people read"
        )


@contextmanager
def prepare_peer(way: SwarmAddress, options: ServeOptions) -> Iterator[PreparedPeer]:
    """Check the options, and prepare this machine as long as the context lasts.

    Raises:
        BadOption: This machine lacks a resource, or an option contradicts the way in.
        BadModel: `options.model` is no model.
    """
    check_options(way, options)
    _check_machine(options)
    access = _model_access(options)
    memory_bytes, device_memory_bytes = _lent_bytes(options)
    keeper = AvailabilityController(parse_availability(options.hours, options.pause_when))
    home = _home(options.peer_id, options.buffers, has_key=way.invite is not None)
    shape = shape_of(options.upload_mbps, options.download_mbps)
    left_bytes: Callable[[], float] = _unbounded
    if home is not None and options.monthly_gb is not None:
        count = MonthlyTraffic(home.path / USE_FILE, options.monthly_gb, shape)
        keeper.used_up, left_bytes = count.used_up, count.left_bytes
    with closing(home) if home else nullcontext(), work_folder(home) as folder:
        place = home.path if home else Path(folder)
        cache = _hub_cache(place, options, shape, left_bytes)
        yield PreparedPeer(
            options=options,
            make_engine=_engine_maker(options, replace(access, hub=cache)),
            memory_bytes=memory_bytes,
            device_memory_bytes=device_memory_bytes,
            resources=_resources(options, memory_bytes, place, cache.max_bytes),
            home=home,
            folder=Path(folder),
            shape=shape,
            availability=keeper,
        )


def _unbounded() -> float:
    return math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A peer that listens.

    Attributes:
        name: Name of the peer for people.
        peer_id: Id of the peer.
        node: The peer itself.
        endpoint: Address at which others reach it.
        transport: Transport to other members.
    """

    name: str
    peer_id: str
    node: PeerNode
    endpoint: str
    transport: GrpcTransport | HomeTransport

    async def run(self) -> None:
        """Serve runs, until it leaves or is cancelled."""
        await self.node.run(self.endpoint)


@asynccontextmanager
async def start_peer(
    swarm: SwarmConnection,
    listening: ListenOptions,
    offer: PeerOptions,
    make_engine: EngineMaker,
    shape: Shape | None = None,
    *,
    on_made: Callable[[PeerNode], object] = lambda _node: None,
    on_leave: Callable[[LeaveProgress], None] = lambda _progress: None,
) -> AsyncIterator[Peer]:
    """Run a peer that others reach as long as the context lasts.

    Args:
        swarm: Membership of this process in the swarm.
        listening: Address to listen on, and the one to announce.
        offer: Options of the peer's node.
        make_engine: Function that creates the engine of a stage.
        shape: Rate limiter of the link to other members; None: no limit.
        on_made: Callback that gets the node before the directory announces it.
        on_leave: Callback for the progress of leaving or pausing.

    Raises:
        PortInUse: The port is taken.
    """
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_options import (
        CONTROL_ANSWER_S,
        WARM_IDLE_S,
        GrpcOptions,
    )
    from swarm_ft.transport.grpc_transport import GrpcTransport

    own, directory = swarm.credentials, swarm.directory
    if swarm.coordinator is not None:
        listening = listening.reachable_from(swarm.coordinator)
    grpc = GrpcTransport(GrpcOptions(warm_idle_s=WARM_IDLE_S, credentials=own))
    shape = shape or shape_of(None, None)
    transport = swarm.transport(grpc, shape)
    control = GrpcOptions(answer_timeout_s=CONTROL_ANSWER_S, credentials=own)
    home = transport if isinstance(transport, HomeTransport) else None
    node = PeerNode(
        offer,
        directory=directory,
        transport=transport,
        control_transport=GrpcTransport(control),
        clock=SystemClock(),
        make_engine=make_engine,
        validity=own.validity if own else None,
        on_leave=on_leave,
        is_relayed=home.is_relayed if home else lambda _: False,
        on_idle=home.upgrade_links if home else lambda: None,
        sent_bytes=lambda: shape.up.passed_bytes,
    )
    server = await transport.serve(listening.address, listening.port, node.handlers())
    on_made(node)
    async with announce(server, listening, directory, Role.PEER, offer.peer_id) as endpoint:
        if home:
            home.start((endpoint,))
        name = swarm.shown_name or offer.peer_id
        yield Peer(
            name=name, peer_id=offer.peer_id, node=node, endpoint=endpoint, transport=transport
        )


async def serve_until_cancelled(
    way: SwarmAddress,
    options: ServeOptions,
    on_up: Callable[[Peer], object] = lambda _peer: None,
) -> None:
    """Lend this machine until this is cancelled, and then drain the peer.

    Args:
        way: Address of the swarm.
        options: The volunteer's options.
        on_up: Callback that gets the peer once others reach it.

    Raises:
        SwarmError: The peer cannot start, or failed.
    """
    with prepare_peer(way, options) as lent:
        async with join(way, lent.key_file, options.name or "") as swarm:
            offer = await lent.node_options(swarm)
            up = start_peer(swarm, options.listening, offer, lent.make_engine, lent.shape)
            async with up as peer, enforce_availability(peer.node, lent.availability):
                get_logger(__name__).info(lent.resources.in_words())
                on_up(peer)
                await _run_until_drained(peer)


@asynccontextmanager
async def enforce_availability(
    node: PeerNode, keeper: AvailabilityController
) -> AsyncIterator[None]:
    """Let the controller pause and resume a peer as long as the context lasts."""
    keeper.node = node
    try:
        async with in_background(keeper.run()):
            yield
    finally:
        keeper.used_up()  # The call stores the count of the last bytes.


async def _run_until_drained(peer: Peer) -> None:
    """Run the peer; a first cancellation drains it, and a second one ends it."""
    running = asyncio.ensure_future(peer.run())
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        peer.node.leave()
        await asyncio.wait([running])
        raise
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# ---- this machine's files and resources


def _home(name: str | None, buffers: BufferOptions, *, has_key: bool) -> PeerHome | None:
    """Lock the home of this peer's key and buffers; None if it has neither."""
    if not buffers.disk_bytes and not has_key:
        return None
    if name is not None:
        _checked_name(name)  # The name may become a directory's.
    return claim_home(name, buffers.directory)


def _buffer_place(home: PeerHome | None, buffers: BufferOptions) -> BufferStorage:
    from swarm_ft.buffers import BufferLimits
    from swarm_ft.peer.buffer_storage import BufferStorage

    limits = BufferLimits(memory_bytes=buffers.memory_bytes, disk_bytes=buffers.disk_bytes)
    directory = home.path / "buffers" if home and buffers.disk_bytes else None
    keep_s = 86400.0 * buffers.keep_days
    return BufferStorage(limits=limits, directory=directory, keep_s=keep_s)


def _keeping_place(folder: Path, options: ServeOptions) -> KeeperStorage:
    from swarm_ft.peer.snapshot_keeper import KeeperStorage

    keep_s = 86400.0 * options.buffers.keep_days
    max_bytes = _keep_bytes(folder, options)
    return KeeperStorage(directory=folder / "kept", max_bytes=max_bytes, keep_s=keep_s)


def _keep_bytes(folder: Path, options: ServeOptions) -> int:
    """Return the disk for snapshots of others' stages."""
    if options.keep_disk_bytes is not None:
        return options.keep_disk_bytes
    return int(shutil.disk_usage(folder).free * KEEP_SHARE)


def _check_machine(options: ServeOptions) -> None:
    """Refuse resources that this machine lacks, before slow imports."""
    buffers, folder = options.buffers, options.buffers.directory or homes()
    check_cores(options.threads)
    check_buffer_memory(buffers, BufferOptions().memory_bytes)
    if buffers.disk_bytes != BufferOptions().disk_bytes:
        check_disk("--buffer-disk", buffers.disk_bytes, folder)
    check_disk("--keep-disk", options.keep_disk_bytes, folder)
    check_disk("--model-disk", options.model_disk_bytes, folder)


def _resources(
    options: ServeOptions, memory_bytes: int, folder: Path, model_bytes: int
) -> PeerResources:
    import torch

    buffer_bytes = options.buffers.memory_bytes
    disk_bytes = options.buffers.disk_bytes + _keep_bytes(folder, options) + model_bytes
    return PeerResources(
        memory_bytes=memory_bytes,
        buffer_memory_bytes=min(buffer_bytes, systems.total_memory_bytes() or buffer_bytes),
        cores=torch.get_num_threads(),
        disk_bytes=min(disk_bytes, systems.disk_bytes(folder)),
        up_mbps=options.upload_mbps,
        down_mbps=options.download_mbps,
    )


def _peer_id(chosen: str | None, home: PeerHome | None) -> PeerId:
    drawn = chosen or f"peer-{secrets.token_hex(4)}"
    return _checked_name(drawn if chosen or home is None else home.name(drawn))


def _checked_name(name: str) -> PeerId:
    from swarm_ft.discovery.directory import checked_record
    from swarm_ft.protocol.spec.bounds import MAX_ID_BYTES

    checked_record(name, "localhost:1")
    if len(name) > MAX_ID_BYTES:  # `checked_record` accepts ASCII only.
        raise BadOption(f"--peer-id: expected at most {MAX_ID_BYTES} bytes, got {len(name)}")
    return PeerId(name)


def _check_has_keys(options: ServeOptions) -> None:
    """Refuse limits of the link in a swarm without keys, whose links stay on this machine."""
    if options.name is not None:
        raise BadOption("--name: expected an invitation; without one --peer-id names this peer")
    for name in ("upload_mbps", "download_mbps", "monthly_gb"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise BadOption(
                f"{option}: expected an invitation, since without one links stay on this machine"
            )


def _device_words(device: str) -> str:
    from swarm_ft.stage.device import describe, pick_device

    return describe(pick_device(device))


def _coding_device(device: str) -> torch.device:
    from swarm_ft.codec.kernels import coding_device
    from swarm_ft.stage.device import pick_device

    return coding_device(pick_device(device))


def _engine_maker(options: ServeOptions, access: ModelAccess) -> EngineMaker:
    import torch

    from swarm_ft.stage.device import DTYPES, pick_device

    torch_dtype = DTYPES[options.dtype]
    torch_device = pick_device(options.device, torch_dtype)
    # Setting the number pins it. Otherwise libraries use fewer threads on a loaded machine, and
    # sum in another order than a replica, or than before.
    torch.set_num_threads(options.threads or torch.get_num_threads())

    def make_engine(spec: RunSpec, layers: LayerRange) -> Engine:
        from swarm_ft.stage.engine import StageEngine  # Imports transformers' models: seconds.

        checkpoint = access.open(spec)
        return StageEngine(checkpoint, spec, layers, device=torch_device, dtype=torch_dtype)

    return make_engine


def _hub_cache(
    home: Path, options: ServeOptions, shape: Shape, left_bytes: Callable[[], float]
) -> HubCache:
    """Return the cache of hub models in a peer's home, whose downloads the link's gate limits."""
    from swarm_ft.stage.hub_cache import HubCache, bytes_in

    folder, max_bytes = home / MODELS_FOLDER, options.model_disk_bytes
    if max_bytes is None:
        max_bytes = int(MODEL_SHARE * (shutil.disk_usage(home).free + bytes_in(folder)))
    return HubCache(folder, max_bytes, on_bytes=shape.down.wait, left_bytes=left_bytes)


def _model_access(options: ServeOptions) -> ModelAccess:
    from swarm_ft.stage.device import DTYPES, pick_device
    from swarm_ft.stage.model_access import ModelAccess, named_directories

    pick_device(options.device, DTYPES[options.dtype])
    if options.model:
        from swarm_ft.stage.checkpoint import check_checkpoint

        check_checkpoint(options.model)  # Refuse a wrong --model now, not at the first run.
    return ModelAccess(
        directories=named_directories(options.models),
        own=options.model,
        allowed=options.allow_models,
    )


def _lent_bytes(options: ServeOptions) -> tuple[int, int]:
    """Return the memory for stages and the device's total memory, in bytes (0: unknown).

    The function limits torch's use of a GPU to `--memory`.

    Raises:
        BadOption: The device has less memory than `--memory`.
    """
    from swarm_ft.stage.device import (
        free_memory_bytes,
        limit_memory,
        pick_device,
        shares_memory,
        total_memory_bytes,
    )

    torch_device = pick_device(options.device)
    has_bytes = total_memory_bytes(torch_device)
    if options.stage_memory_bytes is not None:
        where = "this machine" if torch_device.type == "cpu" else str(torch_device)
        check_memory("--memory", options.stage_memory_bytes, has_bytes, where)
        limit_memory(torch_device, options.stage_memory_bytes)
        return options.stage_memory_bytes, has_bytes or 0
    free_bytes = free_memory_bytes(torch_device)
    if shares_memory(torch_device):  # Buffers use the same memory.
        free_bytes -= min(options.buffers.memory_bytes, free_bytes // 2)
    return int(0.8 * free_bytes), has_bytes or 0


async def _measured(device: str, dtype: str, watts: float) -> Machine:
    """Measure this machine's computing speed; the node measures its link."""
    from swarm_ft.protocol.messages.capacity import Machine
    from swarm_ft.stage.device import DTYPES, pick_device
    from swarm_ft.stage.speed import host_digest, peers_at_once, training_flops_per_s

    torch_dtype = DTYPES[dtype]
    torch_device = pick_device(device, torch_dtype)
    flops = await asyncio.to_thread(training_flops_per_s, torch_device, torch_dtype)
    return Machine(
        flops_per_s=flops,
        watts=watts,
        cores=peers_at_once(torch_device),
        host=host_digest(torch_device),
    )
