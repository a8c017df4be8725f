"""The process of a peer: it joins the coordinator and hosts stages.

Connections come and go; a hosted stage stays until the coordinator releases it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from swarm_ft.base.clock import Clock
from swarm_ft.base.log import get_logger
from swarm_ft.base.sealing import Sealer
from swarm_ft.buffers import BufferStore
from swarm_ft.build import described_version
from swarm_ft.codec.base import CPU
from swarm_ft.digest import check_spec_digest
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import NotFound, OutOfTurn, RunMismatch, Unavailable
from swarm_ft.ids import NO_ATTEMPT, Attempt, PeerId, RunId
from swarm_ft.net.transfer import (
    Downloader,
    OfferedShard,
    offered_to,
    serve_chunk_list,
    serve_chunks,
)
from swarm_ft.peer.buffer_storage import BufferStorage
from swarm_ft.peer.capacity import measure_link
from swarm_ft.peer.compute import Compute
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.coordinator_link import CoordinatorLink
from swarm_ft.peer.current_work import CurrentWork, RunWork
from swarm_ft.peer.failures import failure_of, stage_failed
from swarm_ft.peer.generation import TextStream, receive_begin
from swarm_ft.peer.host import StageHost
from swarm_ft.peer.links import Links
from swarm_ft.peer.load import SAMPLE_S, LoadMeter
from swarm_ft.peer.presence import DrainState, log_progress
from swarm_ft.peer.snapshot_keeper import KeeperStorage, SnapshotKeeper
from swarm_ft.peer.state.stage_state import EngineMaker, StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.contribution import (
    Contribution,
    ContributionReport,
    ContributionRequest,
)
from swarm_ft.protocol.messages.control import (
    MAX_KEPT_RUNS,
    STORAGE_KEY_BYTES,
    Assign,
    CatchUp,
    ClockReply,
    CommitStep,
    DropShards,
    ExportStage,
    GiveShard,
    KeepShard,
    LeaveProgress,
    MemoryShare,
    PeerAlive,
    PeerHello,
    PeerLeaving,
    PlanStep,
    ReleaseStage,
    Renewed,
    Revoked,
    SaveStage,
    StayIdle,
    ToPeer,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import Claim
from swarm_ft.protocol.spec.sizes import format_size
from swarm_ft.snapshots.local_files import LocalFiles
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.stage.device import begin_codec_thread
from swarm_ft.transport.base import Channel, Handler, Method, Transport, until_one_ends
from swarm_ft.transport.methods import FETCH_CHUNKS, GENERATE, LINK, LIST_CHUNKS
from swarm_ft.transport.validity import Validity

logger = get_logger(__name__)

MAX_LEAVE_S = 10 * 365 * 86400.0
"""Largest timeout in seconds; timers take no more."""
ROOM_S = 60.0
"""Seconds that a new stage waits, before it loads, for steps of other runs to end."""
TIDY_EVERY_S = 3600.0
"""Seconds between two searches of an idle peer for old buffers."""
NUM_CODEC_THREADS = 2
"""One thread for each direction, so that encoding, decoding and compute overlap."""

RunMessage = (
    Assign
    | PlanStep
    | CatchUp
    | CommitStep
    | SaveStage
    | ExportStage
    | ReleaseStage
    | KeepShard
    | GiveShard
    | DropShards
)
"""Messages of the coordinator about one run."""


CONTRIBUTION_S = 2.0
"""Seconds to wait for this peer's entry of the ledger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerOptions:
    """Settings of a peer.

    Attributes:
        peer_id: Id of this peer.
        layers: Blocks to host; None: the coordinator chooses.
        memory_bytes: Bytes lent for stages and their microbatches.
        shard_dir: Directory for trained stages until they are fetched.
        buffers: Directory and limits of buffers.
        snapshots_url: URL of the swarm's snapshots; empty: this peer has no access to them.
        keeper_storage: Directory and limits of snapshots that it keeps for other stages.
        encrypts: Whether it encrypts files, with keys of the run from the coordinator.
        max_extra_stages: Stages of other runs beside its first one, if memory suffices.
        max_up_bytes_per_s: Bytes a second that it lends of its upload; infinite: no limit.
        max_down_bytes_per_s: Bytes a second that it lends of its download; infinite: no limit.
        machine: Speed of the machine, for forecasts; its link is measured too. None: not reported.
        device: Description of the compute device, for people.
        codec_device: Device that encodes and decodes frames, see `coding_device`.
        device_memory_bytes: Memory of the device in all; 0: unknown.
        machine_key: Secret of this machine's device, see `PeerHello`; empty: unknown.
        machine_memory_bytes: Memory of this device outside any container; 0: unknown.
    """

    peer_id: PeerId
    layers: LayerRange | None
    memory_bytes: int
    shard_dir: Path
    buffers: BufferStorage = field(default_factory=BufferStorage)
    snapshots_url: str = ""
    keeper_storage: KeeperStorage = field(default_factory=KeeperStorage)
    encrypts: bool = False
    max_extra_stages: int = 0
    max_up_bytes_per_s: float = math.inf
    max_down_bytes_per_s: float = math.inf
    machine: Machine | None = None
    device: str = ""
    codec_device: torch.device = CPU
    device_memory_bytes: int = 0
    machine_key: str = field(default="", repr=False)
    machine_memory_bytes: int = 0


class PeerNode:
    """A peer. Serve `handlers`, announce the endpoint, then `run`.

    Args:
        options: Settings of the peer.
        directory: Directory in which the coordinator is found.
        transport: Transport to other peers.
        control_transport: Transport to the coordinator; None: `transport`.
        clock: Clock of the peer.
        make_engine: Creates the engine of a stage.
        validity: Certificates that may call this peer; the coordinator's notices update it.
        on_leave: Callback for what this peer waits for while it leaves or pauses.
        is_relayed: Returns whether the stream to another peer passes a relay.
        on_idle: Callback between steps, when no messages between peers are under way.
        sent_bytes: Returns the bytes that this peer has sent to others.
        rng: Source of the waits between tries.
    """

    def __init__(  # noqa: PLR0913 - what a process has to give
        self,
        options: PeerOptions,
        *,
        directory: Directory,
        transport: Transport,
        control_transport: Transport | None = None,
        clock: Clock,
        make_engine: EngineMaker,
        validity: Validity | None = None,
        on_leave: Callable[[LeaveProgress], None] = log_progress,
        is_relayed: Callable[[PeerId], bool] = lambda _: False,
        on_idle: Callable[[], None] = lambda: None,
        sent_bytes: Callable[[], int] = lambda: 0,
        rng: Random | None = None,
    ) -> None:
        self._options = options
        self._validity = validity or Validity()
        self._at_rest = on_idle
        self._sent_bytes = sent_bytes
        self._make_engine = make_engine
        self._snapshots = SnapshotStore(options.snapshots_url) if options.snapshots_url else None
        self._compute = Compute(clock)
        start = partial(begin_codec_thread, options.codec_device)
        self._codecs = ThreadPoolExecutor(NUM_CODEC_THREADS, "codec", initializer=start)
        self._endpoint = ""
        self._hosts: dict[RunId, StageHost] = {}
        self._attempts: dict[RunId, Attempt] = {}
        """Attempt of the newest assignment of each run that was not released."""
        self._opening: tuple[RunId, asyncio.Task[StageState]] | None = None
        self._stored_runs: frozenset[RunId] = frozenset()
        self._leaving = asyncio.Event()
        self._released = asyncio.Event()
        self._leave_by_s = math.inf
        self._leave_requested = asyncio.Event()
        self._rng = rng = rng or Random()
        self._machine = options.machine
        self._clock = clock
        self._work = CurrentWork(options.peer_id)
        # The number always has 63 bits, so that all hellos have the same length.
        self._session = secrets.randbits(62) | 1 << 62
        self._memory_share: MemoryShare | None = None
        self._contribution: Contribution | None = None
        self._has_contribution = asyncio.Event()
        self._links = Links(
            options.peer_id, transport=transport, clock=clock, rng=rng, is_relayed=is_relayed
        )
        self._link = CoordinatorLink(
            directory,
            control_transport or transport,
            rng=rng,
            hello=self._hello,
            alive=self._alive,
            handle=self._handle,
            handle_immediately=self._handle_immediately,
            while_connected=self._report_machine,
        )
        self.presence = DrainState(self._link.send, on_leave)
        self._directory, self._transport = directory, transport
        self._offers: dict[ShardName, OfferedShard] = {}
        self._keeper = SnapshotKeeper(
            options.peer_id,
            options.keeper_storage,
            downloader=Downloader(directory, transport),
            say=self._link.send,
        )

    def handlers(self) -> Mapping[Method[Any, Any], Handler]:
        """Return the calls that a peer serves, for `Transport.serve`."""
        offers = ChainMap(self._offers, self._keeper.offers)
        return {
            LINK: self._links.answer,
            GENERATE: self._generate,
            FETCH_CHUNKS: partial(serve_chunks, offers=offers, quiet=self._links.wait_quiet),
            LIST_CHUNKS: partial(serve_chunk_list, offers=offers),
        }

    async def _generate(self, stream: TextStream) -> None:
        """Serve a text for a client that may read the result, while the result is here."""
        begin = await receive_begin(stream)
        offered_to(stream.caller, begin.name, self._offers)
        host = self._hosts.get(begin.name.run_id)
        texts = host.generation_sessions(begin.name) if host is not None else None
        if texts is None:
            raise NotFound(f"{begin.name}: this peer does not host it (any more)")
        await texts.serve(stream, begin)

    @property
    def buffers(self) -> Mapping[RunId, BufferStore]:
        """Buffers of each hosted run."""
        return {run_id: host.buffers for run_id, host in self._hosts.items()}

    def leave(self, timeout_s: float = math.inf, reason: str = "") -> None:
        """Request to leave; `run` returns once that loses nothing, see `LeaveProgress`.

        Args:
            timeout_s: Seconds after which the peer leaves in any case.
            reason: Reason of the leave, for people.
        """
        self._leave_by_s = min(self._leave_by_s, self._clock.now_s() + timeout_s)
        self.presence.request(self._leave_request(reason))
        self._leaving.set()
        self._leave_requested.set()

    def pause(self, reason: str) -> None:
        """Request to pause as soon as that loses nothing; the peer stays in the swarm."""
        if not self._leaving.is_set():
            self.presence.request(replace(self._leave_request(reason), stays=True))

    def resume(self) -> None:
        """Work again after a pause; no effect if this peer is leaving."""
        if not self._leaving.is_set():
            self.presence.request(None)

    def _leave_request(self, reason: str) -> PeerLeaving:
        up_bytes_per_s = self._machine.up_bytes_per_s if self._machine is not None else 0.0
        return PeerLeaving(reason=reason, up_bytes_per_s=up_bytes_per_s)

    @property
    def is_draining(self) -> bool:
        """Whether this peer was requested to leave."""
        return self._leaving.is_set()

    @property
    def has_stages(self) -> bool:
        """Whether this peer hosts a stage of a run."""
        return bool(self._hosts)

    @property
    def current_work(self) -> tuple[RunWork, ...]:
        """Present work for each run of which it hosts a stage."""
        return self._work.runs

    @property
    def memory_share(self) -> MemoryShare | None:
        """Memory that the coordinator counts, if it is less than this peer offers."""
        return self._memory_share

    @property
    def offered_bytes(self) -> int:
        """Memory that this peer offers for stages and their microbatches, in bytes."""
        return self._options.memory_bytes

    @property
    def last_contribution(self) -> Contribution | None:
        """Newest entry of the swarm's ledger; None before the first one."""
        return self._contribution

    async def contribution(self) -> Contribution | None:
        """Request this peer's entry of the swarm's ledger from the coordinator.

        Returns:
            The newest known entry if the coordinator does not answer; None if there is none.
        """
        self._has_contribution.clear()
        self._link.send(ContributionRequest(sent_bytes=self._sent_bytes()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTRIBUTION_S):
                await self._has_contribution.wait()
        return self._contribution

    async def run(self, endpoint: str) -> None:
        """Serve until `leave` or cancellation.

        Args:
            endpoint: Address of `handlers`, `host:port`; the coordinator sends it to other peers.

        Raises:
            VersionMismatch: This peer or the coordinator needs an update.
        """
        self._endpoint = endpoint
        try:
            await self._tidy()
            await asyncio.to_thread(self._keeper.load_existing, time.time())
            await until_one_ends(
                self._link.stay_joined(), self._leave_when_released(), self._stay_tidy()
            )
        finally:
            await self._close()
            await self._links.close()
            self._compute.close()
            self._codecs.shutdown(wait=True, cancel_futures=True)

    async def _tidy(self) -> None:
        """Delete old buffers.

        List the runs whose buffers are here, to learn which of them are over.
        """
        place = self._options.buffers
        if place.directory is not None:
            await asyncio.to_thread(place.delete_old, time.time())
            self._stored_runs = await asyncio.to_thread(place.runs)

    async def _stay_tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            if not self._hosts and self._opening is None:
                await self._tidy()

    async def _close(self) -> None:
        await self._keeper.close()
        for host in self._hosts.values():
            await host.close()
        if self._opening is not None:
            await asyncio.to_thread((await self._opening[1]).store.close)

    async def _leave_when_released(self) -> None:
        await self._leaving.wait()
        await until_one_ends(
            self.presence.wait_released(), self._wait_until_released(), self._wait_for_deadline()
        )
        await self.contribution()  # for the summary at the end
        await self._link.send_goodbye()

    async def _wait_for_deadline(self) -> None:
        """Wait until the deadline of the newest request to leave has passed."""
        while (left_s := self._leave_by_s - self._clock.now_s()) > 0:
            self._leave_requested.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, MAX_LEAVE_S)):
                    await self._leave_requested.wait()
        logger.warning("the handover took too long; leaving without it")

    async def _wait_until_released(self) -> None:
        while self._hosts:
            self._released.clear()  # it may be set since an earlier run
            await self._released.wait()

    # ---- the coordinator

    async def _report_machine(self, channel: Channel) -> None:
        """Report the machine, its link and its load.

        Forecasts made earlier lack the measurement.
        """
        if self._machine is None:
            return
        self._link.send(self._machine)
        if not self._machine.up_bytes_per_s:
            measured = await measure_link(channel, self._machine, self._rng)
            self._machine = replace(
                measured,
                up_bytes_per_s=min(measured.up_bytes_per_s, self._options.max_up_bytes_per_s),
                down_bytes_per_s=min(measured.down_bytes_per_s, self._options.max_down_bytes_per_s),
            )
            self._link.send(self._machine)
        await self._report_load()

    async def _report_load(self) -> None:
        """Report the load of the machine while connected to the coordinator."""
        meter = LoadMeter(torch.get_num_threads())
        while self._machine is not None:
            await asyncio.sleep(SAMPLE_S)
            meter.sample()
            news = meter.take_report(self._machine)
            if news is not None:
                self._link.send(news)

    def _hello(self) -> PeerHello:
        self._memory_share = None
        for host in self._hosts.values():
            host.timeline.on_joined()
        held = {run_id: host.reported_state for run_id, host in self._hosts.items()}
        unloaded = {run_id for run_id, stage in held.items() if stage is None}
        return PeerHello(
            peer_id=self._options.peer_id,
            endpoint=self._endpoint,
            layers=self._options.layers,
            memory_bytes=self._options.memory_bytes,
            held=tuple(stage for stage in held.values() if stage is not None),
            kept_runs=tuple(sorted(self._stored_runs | unloaded))[:MAX_KEPT_RUNS],
            device=self._options.device,
            version=described_version(),
            leaving=self.presence.leaving,
            max_up_bytes_per_s=_or_none(self._options.max_up_bytes_per_s),
            max_down_bytes_per_s=_or_none(self._options.max_down_bytes_per_s),
            keep_bytes=self._keeper.capacity_bytes,
            kept_shards=self._keeper.shards,
            max_beside=self._options.max_extra_stages,
            device_memory_bytes=self._options.device_memory_bytes,
            session=self._session,
            machine_key=self._options.machine_key,
            machine_memory_bytes=self._options.machine_memory_bytes,
        )

    def _alive(self) -> list[PeerAlive]:
        heartbeats = [host.alive() for host in self._hosts.values()] or [PeerAlive()]
        sent_bytes = self._sent_bytes()
        return [
            replace(alive, links=self._links.speeds, sent_bytes=sent_bytes) for alive in heartbeats
        ]

    async def _handle(self, message: ToPeer) -> None:
        """Handle a message; an error becomes a failure of its run."""
        if isinstance(message, Revoked | Renewed | ContributionReport):
            return  # handled by `_handle_immediately`
        if isinstance(message, StayIdle | LeaveProgress | MemoryShare | ClockReply):
            self._handle_notice(message)
            return
        try:
            await self._handle_for_run(message)
        except Exception as error:  # noqa: BLE001 - it is reported, and logged if it is a bug
            await self._fail_run(message, error)

    async def _fail_run(self, message: RunMessage, error: Exception) -> None:
        """End the run's present attempt and report the error. The connection stays open."""
        if isinstance(message, KeepShard | GiveShard | DropShards):
            failure = failure_of(error, _run_of(message))
            logger.warning("run %s: stored snapshots: %s", _run_of(message), failure.message)
            return
        run_id = message.run_id
        failure = failure_of(error, run_id)
        logger.error("run %s: %s", run_id, failure.message)
        if run_id in self._hosts:
            await self._hosts[run_id].stop()
        attempt = self._attempts.get(run_id, getattr(message, "attempt", NO_ATTEMPT))
        self._link.send(stage_failed(run_id, attempt, failure))

    async def _handle_for_run(self, message: RunMessage) -> None:
        match message:
            case Assign():
                await self._assign(message)
            case PlanStep():
                self._hosting(message.run_id).plan(message)
                self._work.on_plan(message)
            case CatchUp():
                self._hosting(message.run_id).start_catch_up(message)
            case CommitStep():
                await self._commit(message)
            case SaveStage():
                await self._hosting(message.run_id).save(message)
            case ExportStage():
                await self._hosting(message.run_id).export()
            case ReleaseStage():
                await self._release(message)
            case KeepShard() | GiveShard() | DropShards():
                await self._keep(message)

    async def _commit(self, commit: CommitStep) -> None:
        await self._hosting(commit.run_id).commit(commit)
        self._work.on_commit(commit)
        if len(self._hosts) == 1:  # with several runs a step is always under way
            self._at_rest()

    async def _keep(self, message: KeepShard | GiveShard | DropShards) -> None:
        match message:
            case KeepShard():
                self._keeper.start_fetch(message)
            case GiveShard():
                self._keeper.offer_to(message)
            case DropShards():
                await self._keeper.drop(message)

    def _handle_immediately(self, message: ToPeer) -> bool:
        """Handle notices that need not wait for earlier messages; return whether this is one."""
        match message:
            case Revoked(names=names):
                self._validity.revoke(names)
            case Renewed(name=name, until_unix_s=until_unix_s):
                self._validity.certified(name, until_unix_s)
            case ContributionReport(given=given):
                self._contribution = given
                self._has_contribution.set()
            case _:
                return False
        return True

    def _handle_notice(self, message: StayIdle | LeaveProgress | MemoryShare | ClockReply) -> None:
        match message:
            case MemoryShare():
                self._on_memory_share(message)
            case LeaveProgress():
                self.presence.on_progress(message)
            case StayIdle(reason=reason):
                logger.warning("nothing to do: %s; this peer waits for other runs", reason)
            case ClockReply():
                for host in self._hosts.values():
                    host.timeline.on_clock_reply(message)

    def _on_memory_share(self, share: MemoryShare) -> None:
        """Log the memory that the coordinator counts, and store it if it is less than offered."""
        counted, offered = format_size(share.memory_bytes), format_size(self.offered_bytes)
        if share.memory_bytes >= self.offered_bytes:
            self._memory_share = None
            logger.info("the coordinator counts all of the %s that this peer lends", offered)
            return
        self._memory_share = share
        logger.warning(
            "the coordinator counts %s of the %s that this peer lends: %d peers on this machine "
            "together lend more memory than it has; --memory sets a limit for each",
            *(counted, offered, share.num_peers),
        )

    async def _assign(self, assign: Assign) -> None:
        self._attempts[assign.run_id] = assign.attempt
        layers = assign.layers_of(self._options.peer_id)
        self._links.set_assigned_peers(
            assign.run_id, {stage.peer_id for stage in assign.assignments}
        )
        own_digest, their_digest = assign.spec.digest(), assign.spec_digest
        try:
            check_spec_digest(f"run {assign.run_id}", own_digest, their_digest, "the coordinator")
            self._check_keys(assign, layers)
        except RunMismatch as error:
            self._link.send(stage_failed(assign.run_id, assign.attempt, error))
            return
        claim = Claim(assign.claim, assign.weight)
        self._compute.set_weight(assign.run_id, assign.priority, claim)
        host = self._hosts.get(assign.run_id) or await self._new_host(assign)
        await host.assign(assign)
        self._work.on_assign(assign)

    async def _new_host(self, assign: Assign) -> StageHost:
        """Create a run's host.

        Without room the oldest run is released, which the coordinator allows.
        """
        while len(self._hosts) > self._options.max_extra_stages:
            await self._release_host(next(iter(self._hosts)))
        state = await self._new_stage(assign)
        self._opening = None
        host = self._hosts[assign.run_id] = StageHost(
            state.context,
            assign.run_id,
            assign.spec,
            state=state,
            shard_dir=self._options.shard_dir,
            snapshots=self._snapshots,
            kept=self._keeper,
        )
        return host

    async def _release_host(self, run_id: RunId) -> None:
        self._links.set_assigned_peers(run_id, ())
        try:
            await self._hosts[run_id].release()
        except Exception as error:  # noqa: BLE001 - what stays on the disk must not keep the place
            logger.warning("run %s: released: %s", run_id, failure_of(error, run_id).message)
        del self._hosts[run_id]
        self._compute.forget(run_id)
        self._work.on_release(run_id)

    def _check_keys(self, assign: Assign, layers: LayerRange) -> None:
        keys = (assign.storage_key, assign.stage_keys.get(layers, b""))
        if self._options.encrypts and any(len(key) != STORAGE_KEY_BYTES for key in keys):
            raise RunMismatch(
                f"run {assign.run_id}: this peer encrypts its files; expected a key from the "
                "coordinator, got none"
            )

    async def _new_stage(self, assign: Assign) -> StageState:
        """Return a stage without weights, with the buffers of an earlier start.

        Opening the buffers may take long and cannot be cancelled; a second caller waits for the
        first.
        """
        run_id = assign.run_id
        if self._opening is not None and self._opening[0] != run_id:
            await asyncio.to_thread((await self._opening[1]).store.close)
            self._opening = None
        if self._opening is None:
            self._opening = run_id, asyncio.create_task(self._open_stage(assign))
        return await asyncio.shield(self._opening[1])

    async def _open_stage(self, assign: Assign) -> StageState:
        run_id, spec, key = assign.run_id, assign.spec, assign.storage_key
        encrypts, name = self._options.encrypts, self._options.peer_id
        sealer = Sealer(key, f"buffers of {name}") if encrypts else None
        files = LocalFiles(Sealer(key, "files") if key else None, seals=encrypts)
        store = await run_in(self._codecs, self._options.buffers.open, run_id, spec, sealer)
        return StageState(self._context_of(run_id), run_id, spec, self._make_engine, store, files)

    def _context_of(self, run_id: RunId) -> PeerContext:
        return PeerContext(
            peer_id=self._options.peer_id,
            directory=self._directory,
            transport=self._transport,
            clock=self._clock,
            links=self._links,
            compute=self._compute.handle_for(run_id),
            codecs=self._codecs,
            codec_device=self._options.codec_device,
            send_to_coordinator=self._link.send,
            timeline=Timeline(self._clock, self._link.send),
            memory_bytes=self._options.memory_bytes,
            reserved_bytes=partial(self._reserved_bytes, run_id),
            wait_for_room=partial(self._wait_for_room, run_id),
            offers=self._offers,
        )

    def _reserved_bytes(self, run_id: RunId) -> int:
        """Return the memory of other runs' stages, with an equal share of the rest for each."""
        held = [host.state_bytes for host in self._hosts.values()]
        others = sum(host.state_bytes for run, host in self._hosts.items() if run != run_id)
        rest = max(0, self._options.memory_bytes - sum(held))
        return others + rest * (len(held) - 1) // len(held) if held else 0

    async def _wait_for_room(self, run_id: RunId) -> None:
        """Wait until other runs' steps have freed memory; they begin their next steps with less.

        The wait is bounded: a step that waits for an absent peer may take for ever, and holds
        little.
        """
        others = [host for run, host in self._hosts.items() if run != run_id]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_S):
                await asyncio.gather(*(host.wait_memory_free() for host in others))

    async def _release(self, release: ReleaseStage) -> None:
        run_id = release.run_id
        self._attempts.pop(run_id, None)
        if run_id in self._hosts:
            logger.info("run %s: released, %s", run_id, release.reason)
            await self._release_host(run_id)
            self._released.set()
            if release.is_over:
                await self._forget_snapshots(run_id)
        elif self._opening is not None and self._opening[0] == run_id:
            await (await self._opening[1]).release()
            self._opening = None
        if release.is_over:
            await self._keeper.forget(run_id)
        if run_id in self._stored_runs:
            self._stored_runs -= {run_id}
            await asyncio.to_thread(self._options.buffers.delete, run_id)

    async def _forget_snapshots(self, run_id: RunId) -> None:
        """Delete the run's snapshots, also those that the coordinator does not know about yet."""
        try:
            if self._snapshots is not None:
                await asyncio.to_thread(self._snapshots.forget, [run_id])
        except Unavailable as error:
            logger.warning("run %s: %s", run_id, error.message)

    def _hosting(self, run_id: RunId) -> StageHost:
        if run_id not in self._hosts:
            raise OutOfTurn(f"run {run_id} is not hosted here")
        return self._hosts[run_id]


def _run_of(message: KeepShard | GiveShard | DropShards) -> RunId:
    return message.run_id if isinstance(message, DropShards) else message.name.run_id


def _or_none(bytes_per_s: float) -> float:
    """Encode a limit: 0 means no limit."""
    return 0.0 if bytes_per_s == math.inf else bytes_per_s
