"""A machine that is lent: from what its owner decided to a peer that serves."""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft import systems
from swarm_ft.api.joining import Joined, WayIn, announced, beside, joined
from swarm_ft.api.listening import Listening
from swarm_ft.api.manners import USE_FILE, Keeper, MonthlyCount, manners_of, shape_of
from swarm_ft.api.peer_home import (
    KEY_FILE,
    BufferOptions,
    PeerHome,
    claim_home,
    homes,
    work_folder,
)
from swarm_ft.api.resources import (
    LentResources,
    check_buffer_memory,
    check_cores,
    check_disk,
    check_memory,
)
from swarm_ft.clock import SystemClock
from swarm_ft.errors import BadOption
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId
from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.member_name import ChosenName
from swarm_ft.stage.names import check_allowed_models, check_device_name

if TYPE_CHECKING:
    import torch

    from swarm_ft.peer.keeping import KeepingPlace
    from swarm_ft.peer.kept_buffers import BufferPlace
    from swarm_ft.peer.node import PeerNode, PeerOptions
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
"""Of the disk that is free, for models from the hub."""
MODELS_FOLDER = "models"
"""Of models from the hub, in a peer's home."""
KEEP_SHARE = 0.1
"""Of the disk that is free, for snapshots of others' stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What a volunteer decides; `swarm-ft serve-stage` has the same by these names.

    Attributes:
        layers: blocks to host; None lets the coordinator choose.
        device: auto, cpu, cuda, cuda:N or mps.
        dtype: what to compute in, float32 or bfloat16; weights stay float32.
        model: directory or hub id that stands in for every run's model.
        models: directories below which jobs may name models.
        model_disk_bytes: for models that jobs name and the hub has; None: MODEL_SHARE of what is
            free.
        allow_models: hub ids that jobs may name, as ORG/NAME or ORG/*; none: all public ones.
        lent_memory_bytes: lent at most; None: 80 % of what is free beside buffers.
        max_stages: that it hosts at a time, each of another run, as far as memory allows.
        threads: CPU threads to compute with; None: as many as torch takes.
        watts: what the machine takes at work, for forecasts.
        snapshots: where they lie, the same for all; None: with the peers, if at all.
        keep_disk_bytes: of disk for snapshots of others' stages; None: KEEP_SHARE of what is free.
        peer_id: this peer's name, where it has no key.
        encrypt_at_rest: whether what it writes to disks is encrypted.
        hours: of the day at which it works, `22-7`; None: at all.
        pause_when: gpu-busy, on-battery, user-active.
        upload_mbps: that it sends to other members at most; None: as fast as it goes.
        download_mbps: so too of what it receives.
        monthly_gb: that it sends and receives in a calendar month at most.
        name: The peer's name for people; None: the one that it had, or one from its key.
    """

    layers: LayerRange | None = None
    device: str = "auto"
    dtype: str = "float32"
    model: str | None = None
    models: tuple[str, ...] = ()
    allow_models: tuple[str, ...] = ()
    model_disk_bytes: int | None = None
    lent_memory_bytes: int | None = None
    max_stages: int = MAX_HOSTED
    threads: int | None = None
    watts: float = 0.0
    snapshots: str | None = None
    keep_disk_bytes: int | None = None
    peer_id: str | None = None
    encrypt_at_rest: bool = False
    hours: str | None = None
    pause_when: tuple[str, ...] = ()
    upload_mbps: float | None = None
    download_mbps: float | None = None
    monthly_gb: float | None = None
    name: str | None = None
    buffers: BufferOptions = field(default_factory=BufferOptions)
    listening: Listening = field(default_factory=Listening)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lent:
    """What a machine lends, before it is in a swarm.

    Attributes:
        device_memory_bytes: of the device that computes, in all; 0: unknown.
        resources: limits of all that is lent.
        home: where it keeps its key and its buffers; None if it keeps neither.
        folder: for states and results on their way.
        shape: of its link to other members.
        keeper: of its volunteer's manners.
    """

    options: ServeOptions
    make_engine: EngineMaker
    memory_bytes: int
    device_memory_bytes: int
    resources: LentResources
    home: PeerHome | None
    folder: Path
    shape: Shape
    keeper: Keeper

    @property
    def key_file(self) -> Path | None:
        """Of this peer's key."""
        return self.home.path / KEY_FILE if self.home else None

    async def offer(self, swarm: Joined) -> PeerOptions:
        """What the swarm is told; measures how fast this machine computes."""
        from swarm_ft.peer.node import PeerOptions

        asked = self.options
        own_name = PeerId(swarm.name) if swarm.name else _peer_id(asked.peer_id, self.home)
        return PeerOptions(
            peer_id=own_name,
            layers=asked.layers,
            memory_bytes=self.memory_bytes,
            device_memory_bytes=self.device_memory_bytes,
            shard_dir=self.folder,
            buffers=_buffer_place(self.home, asked.buffers),
            snapshots_url=asked.snapshots or "",
            keeping=_keeping_place(self.home.path if self.home else self.folder, asked),
            encrypts=asked.encrypt_at_rest,
            max_beside=asked.max_stages - 1,
            max_up_bytes_per_s=self.shape.up.bytes_per_s,
            max_down_bytes_per_s=self.shape.down.bytes_per_s,
            machine=await _measured(asked.device, asked.dtype, asked.watts),
            device=_device_words(asked.device),
            codes_on=_coding_device(asked.device),
        )


def check_options(way: WayIn, options: ServeOptions) -> None:
    """Check what a volunteer typed, as far as that needs neither torch nor anybody's answer.

    Raises:
        BadOption: a value is out of its bounds, or contradicts the way in.
    """
    manners_of(options.hours, options.pause_when)
    check_device_name(options.device)
    check_allowed_models(options.allow_models)
    refused = ChosenName().refusal(options.name or "")
    if refused is not None or options.name == "":
        raise BadOption(f"--name: {refused or 'expected a name, got an empty text'}")
    if way.invite is None:
        _check_has_keys(options)
        options.listening.check_only_here()
    elif options.peer_id is not None:
        raise BadOption(
            "--peer-id: expected it with --insecure alone; with an invitation a peer's id follows "
            "from its key, and --name chooses what people read"
        )


@contextmanager
def lending(way: WayIn, options: ServeOptions) -> Iterator[Lent]:
    """What is lent, as long as the context lasts; everything is checked first.

    Raises:
        BadOption: this machine does not have it, or it contradicts the way in.
        BadModel: `options.model` is none.
    """
    check_options(way, options)
    _check_machine(options)
    access = _model_access(options)
    memory_bytes, device_memory_bytes = _lent_bytes(options)
    keeper = Keeper(manners_of(options.hours, options.pause_when))
    home = _home(options.peer_id, options.buffers, has_key=way.invite is not None)
    shape = shape_of(options.upload_mbps, options.download_mbps)
    left_bytes: Callable[[], float] = _unbounded
    if home is not None and options.monthly_gb is not None:
        count = MonthlyCount(home.path / USE_FILE, options.monthly_gb, shape)
        keeper.used_up, left_bytes = count.used_up, count.left_bytes
    with closing(home) if home else nullcontext(), work_folder(home) as folder:
        place = home.path if home else Path(folder)
        cache = _hub_cache(place, options, shape, left_bytes)
        yield Lent(
            options=options,
            make_engine=_engine_maker(options, replace(access, hub=cache)),
            memory_bytes=memory_bytes,
            device_memory_bytes=device_memory_bytes,
            resources=_resources(options, memory_bytes, place, cache.max_bytes),
            home=home,
            folder=Path(folder),
            shape=shape,
            keeper=keeper,
        )


def _unbounded() -> float:
    return math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One that listens.

    Attributes:
        name: The peer's name for people.
        peer_id: The peer's id.
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
async def peer_up(
    swarm: Joined,
    listening: Listening,
    offer: PeerOptions,
    make_engine: EngineMaker,
    shape: Shape | None = None,
    *,
    on_made: Callable[[PeerNode], object] = lambda _node: None,
    on_leave: Callable[[LeaveProgress], None] = lambda _progress: None,
) -> AsyncIterator[Peer]:
    """A peer that others reach as long as the context lasts.

    Args:
        swarm: where it is announced, and finds the coordinator; who it is there.
        listening: where others reach this peer.
        offer: what the volunteer decided.
        make_engine: what computes.
        shape: of the link to other members; None: as it is.
        on_made: given the peer before anybody hears of it.
        on_leave: told what it waits for before it may leave, or pause.

    Raises:
        PortInUse: the port is taken.
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
        listening = listening.towards(swarm.coordinator)
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
        at_rest=home.at_rest if home else lambda: None,
        sent_bytes=lambda: shape.up.passed_bytes,
    )
    server = await transport.serve(listening.address, listening.port, node.handlers())
    on_made(node)
    async with announced(server, listening, directory, Role.PEER, offer.peer_id) as endpoint:
        if home:
            home.start((endpoint,))
        name = swarm.shown_name or offer.peer_id
        yield Peer(
            name=name, peer_id=offer.peer_id, node=node, endpoint=endpoint, transport=transport
        )


async def serve_until_over(
    way: WayIn,
    options: ServeOptions,
    on_up: Callable[[Peer], object] = lambda _peer: None,
) -> None:
    """Lend this machine until this is cancelled, and then say goodbye.

    Args:
        way: into the swarm.
        options: what is lent.
        on_up: given the peer once others reach it.

    Raises:
        SwarmError: what keeps it from being a peer, or made it stop.
    """
    with lending(way, options) as lent:
        async with joined(way, lent.key_file, options.name or "") as swarm:
            offer = await lent.offer(swarm)
            up = peer_up(swarm, options.listening, offer, lent.make_engine, lent.shape)
            async with up as peer, kept(peer.node, lent.keeper):
                get_logger(__name__).info(lent.resources.in_words())
                on_up(peer)
                await _run_politely(peer)


@asynccontextmanager
async def kept(node: PeerNode, keeper: Keeper) -> AsyncIterator[None]:
    """A peer that works when its volunteer's manners say so."""
    keeper.node = node
    try:
        async with beside(keeper.look()):
            yield
    finally:
        keeper.used_up()  # counts the last bytes


async def _run_politely(peer: Peer) -> None:
    """Serve; a first cancellation has it leave, a second one ends it."""
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


# ---- what this machine has


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


def _keeping_place(folder: Path, asked: ServeOptions) -> KeepingPlace:
    from swarm_ft.peer.keeping import KeepingPlace

    keep_s = 86400.0 * asked.buffers.keep_days
    max_bytes = _keep_bytes(folder, asked)
    return KeepingPlace(directory=folder / "kept", max_bytes=max_bytes, keep_s=keep_s)


def _keep_bytes(folder: Path, options: ServeOptions) -> int:
    """Disk for snapshots of others' stages."""
    if options.keep_disk_bytes is not None:
        return options.keep_disk_bytes
    return int(shutil.disk_usage(folder).free * KEEP_SHARE)


def _check_machine(options: ServeOptions) -> None:
    """Refuse what this machine does not have, before anything heavy is imported."""
    buffers, folder = options.buffers, options.buffers.directory or homes()
    check_cores(options.threads)
    check_buffer_memory(buffers, BufferOptions().memory_bytes)
    if buffers.disk_bytes != BufferOptions().disk_bytes:
        check_disk("--buffer-disk", buffers.disk_bytes, folder)
    check_disk("--keep-disk", options.keep_disk_bytes, folder)
    check_disk("--model-disk", options.model_disk_bytes, folder)


def _resources(
    options: ServeOptions, memory_bytes: int, folder: Path, model_bytes: int
) -> LentResources:
    import torch

    buffer_bytes = options.buffers.memory_bytes
    disk_bytes = options.buffers.disk_bytes + _keep_bytes(folder, options) + model_bytes
    return LentResources(
        memory_bytes=memory_bytes,
        buffer_memory_bytes=min(buffer_bytes, systems.total_memory_bytes() or buffer_bytes),
        cores=torch.get_num_threads(),
        disk_bytes=min(disk_bytes, systems.disk_bytes(folder)),
        up_mbps=options.upload_mbps,
        down_mbps=options.download_mbps,
    )


def _peer_id(given: str | None, home: PeerHome | None) -> PeerId:
    drawn = given or f"peer-{secrets.token_hex(4)}"
    return _checked_name(drawn if given or home is None else home.name(drawn))


def _checked_name(name: str) -> PeerId:
    from swarm_ft.discovery.directory import checked_record
    from swarm_ft.protocol.spec.bounds import MAX_ID_BYTES

    checked_record(name, "localhost:1")
    if len(name) > MAX_ID_BYTES:  # it is ASCII by now
        raise BadOption(f"--peer-id: expected at most {MAX_ID_BYTES} bytes, got {len(name)}")
    return PeerId(name)


def _check_has_keys(options: ServeOptions) -> None:
    """Caps are of links to other machines, which only members with keys have."""
    if options.name is not None:
        raise BadOption("--name: expected an invitation; without one --peer-id names this peer")
    for name in ("upload_mbps", "download_mbps", "monthly_gb"):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise BadOption(f"{option}: expected an invitation; without one no link leaves here")


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
    # Said at all, it holds: libraries would take fewer threads as the machine is loaded, and sum in
    # another order than a replica, or than they did before.
    torch.set_num_threads(options.threads or torch.get_num_threads())

    def make_engine(spec: RunSpec, layers: LayerRange) -> Engine:
        from swarm_ft.stage.engine import StageEngine  # with transformers' models: takes seconds

        checkpoint = access.open(spec)
        return StageEngine(checkpoint, spec, layers, device=torch_device, dtype=torch_dtype)

    return make_engine


def _hub_cache(
    home: Path, options: ServeOptions, shape: Shape, left_bytes: Callable[[], float]
) -> HubCache:
    """Models of the hub below a peer's home; their bytes pass the link's gate as others do."""
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

        check_checkpoint(options.model)  # a wrong --model is refused now, not when a run comes
    return ModelAccess(
        directories=named_directories(options.models),
        own=options.model,
        allowed=options.allow_models,
    )


def _lent_bytes(options: ServeOptions) -> tuple[int, int]:
    """Return the memory that stages may take, and what the device has (0: unknown).

    From now on torch takes no more of a GPU than `--memory`.

    Raises:
        BadOption: the device has less than `--memory`.
    """
    from swarm_ft.stage.device import (
        free_memory_bytes,
        keep_within,
        pick_device,
        shares_memory,
        total_memory_bytes,
    )

    torch_device = pick_device(options.device)
    has_bytes = total_memory_bytes(torch_device)
    if options.lent_memory_bytes is not None:
        where = "this machine" if torch_device.type == "cpu" else str(torch_device)
        check_memory("--memory", options.lent_memory_bytes, has_bytes, where)
        keep_within(torch_device, options.lent_memory_bytes)
        return options.lent_memory_bytes, has_bytes or 0
    free_bytes = free_memory_bytes(torch_device)
    if shares_memory(torch_device):  # buffers lie in the same memory, if there are any
        free_bytes -= min(options.buffers.memory_bytes, free_bytes // 2)
    return int(0.8 * free_bytes), has_bytes or 0


async def _measured(device: str, dtype: str, watts: float) -> Machine:
    """What this machine can do; the node measures its link."""
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
