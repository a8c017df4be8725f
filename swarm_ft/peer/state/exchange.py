"""Transfers of a stage's state between this peer, its replicas and the run's snapshots.

A learner fetches the state from the stage's other replicas; a run that rolls back reads it from its
snapshots. Replicas offer the state to learners, and save it when the coordinator requests that. The
digest of an offer names it, and the coordinator forwards that digest, so that a false source is
detected. The same holds for snapshots, whose digests the coordinator stores. Offers also contain a
proof for each learner, which it can compute only from the whole state, so that a learner that lacks
it is detected too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from swarm_ft.base import failpoints
from swarm_ft.base.log import get_logger
from swarm_ft.base.private_files import private_folder
from swarm_ft.base.sealing import Sealer
from swarm_ft.errors import BadSnapshot, OutOfTurn, Unavailable
from swarm_ft.ids import Attempt, PeerId, StepNumber
from swarm_ft.net.transfer import OfferedShard, offer
from swarm_ft.peer.context import PeerContext, run_in, run_uncancellable
from swarm_ft.peer.failures import failure_of, stage_failed
from swarm_ft.peer.snapshot_keeper import SnapshotKeeper
from swarm_ft.peer.state.learner import CatchUpTransfer
from swarm_ft.peer.state.recut import recut
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    PlanStep,
    SavedStage,
    SaveStage,
    StageOffered,
    StageSaved,
    StageUnsaved,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.snapshots.local_files import LocalFiles
from swarm_ft.snapshots.shard import ShardContents, read_shard, write_shard
from swarm_ft.snapshots.store import SnapshotStore

logger = get_logger(__name__)

T = TypeVar("T")

RETRY_S = 2.0
"""Seconds before the next try after the disk refused a state."""


class StateExchange:
    """Transfers of one run's stage; see the module.

    Args:
        context: Context of the run.
        state: State of the stage.
        folder: Directory for temporary files.
        spec_digest: Digest of the run's spec.
        snapshots: Store of the run's snapshots; None if this peer has no access to one.
        kept: Snapshots that peers keep for each other; None if this peer keeps none.

    Attributes:
        catching_up: Transfer of the state to this peer, if the assignment names it a learner.
    """

    def __init__(
        self,
        context: PeerContext,
        state: StageState,
        folder: Path,
        spec_digest: bytes,
        snapshots: SnapshotStore | None,
        keeper: SnapshotKeeper | None = None,
    ) -> None:
        self.catching_up: CatchUpTransfer | None = None
        self._context = context
        self._state = state
        self._folder = folder
        self._spec_digest = spec_digest
        self._snapshots = snapshots
        self._keeper = keeper
        self._attempt = Attempt(-1)
        self._stage_keys: Mapping[LayerRange, bytes] = {}
        self._last_catch_up: CatchUp | None = None
        self._offered_to: dict[PeerId, ShardName] = {}
        self._offering: dict[ShardName, asyncio.Task[None]] = {}
        self._saves: set[asyncio.Task[None]] = set()
        self._one_save = asyncio.Lock()  # two requests for one step have one file

    @property
    def is_behind(self) -> bool:
        """Whether committed steps are missing here."""
        return self.catching_up is not None and not self.catching_up.has_caught_up

    async def close(self) -> None:
        """Cancel all transfers and wait for their ends; no file is written afterwards."""
        self._stop_catching_up()
        for save in self._saves:
            save.cancel()
        ending = (*self._saves, *self._offering.values())
        self._stop_offering(set())
        await asyncio.gather(*ending, return_exceptions=True)

    # ---- requests of an assignment

    def apply_assignment(self, assign: Assign, layers: LayerRange) -> None:
        """Begin, continue or end the transfer of the state to this peer.

        Raises:
            OutOfTurn: The assignment continues an earlier transfer, but this peer missed sums
                since.
        """
        self._attempt, self._stage_keys = assign.attempt, assign.stage_keys
        own = self._context.peer_id
        step = next((learner.step for learner in assign.learners if learner.peer_id == own), None)
        if step is None:
            self._stop_catching_up()
            return
        name = ShardName(run_id=assign.run_id, step=step, layers=layers)
        if self.catching_up is not None and self.catching_up.can_resume(assign, name):
            self.catching_up.begin_attempt(assign.attempt)
        elif step == assign.committed_steps:
            self._stop_catching_up()
            self.catching_up = CatchUpTransfer(
                self._context, self._state, self._folder, name, assign
            )
        else:
            raise OutOfTurn(
                f"{name}: expected the sums of all {assign.committed_steps} committed steps, some "
                "are missing here"
            )
        if self._last_catch_up is not None:
            self.catching_up.start_fetch(self._last_catch_up)

    def _stop_catching_up(self) -> None:
        if self.catching_up is not None:
            self.catching_up.close()
            self.catching_up = None

    def start_catch_up(self, take: CatchUp) -> None:
        """Begin to fetch the state; the notice may come before its assignment."""
        self._last_catch_up = take
        if self.catching_up is not None:
            self.catching_up.start_fetch(take)

    def is_outdated(self, assign: Assign, layers: LayerRange) -> bool:
        """Whether the state here, if any, is not the one with which the run continues."""
        if not self._state.is_loaded:
            return True
        if self._state.engine.layers != layers:  # the rollback changed this peer's stage
            return True
        mine = (self._state.committed_steps, self._state.last_attempt)
        return assign.fresh and mine != (assign.committed_steps, assign.last_attempt)

    async def restore_snapshot(self, assign: Assign, layers: LayerRange) -> None:
        """Restore the stage from the run's snapshot, if the run rolled back to one.

        If the snapshot has other stages, the state is assembled from all that contain its layers.

        Raises:
            Unavailable: The snapshots cannot be read (now).
            BadSnapshot: A file does not contain the expected state.
        """
        for save in tuple(self._saves):  # these belong to the history before the rollback
            save.cancel()
        step = StepNumber(assign.committed_steps)
        if not step or not assign.saved:
            return
        parts = {
            stage.layers: await self._read(
                ShardName(run_id=assign.run_id, step=step, layers=stage.layers), stage
            )
            for stage in assign.saved
            if stage.layers.overlaps(layers)
        }
        contents = parts.get(layers) or await self._recut(parts, layers, assign.spec)
        await self._state.restore(contents, step, assign.last_attempt)

    async def _recut(
        self, parts: Mapping[LayerRange, ShardContents], layers: LayerRange, spec: RunSpec
    ) -> ShardContents:
        names = await run_in(self._context.compute, self._state.engine.state_names)
        logger.info("layers %s: from those of %s", layers, " and ".join(map(str, parts)))
        return await asyncio.to_thread(recut, parts, layers, names, spec.model.hidden_size)

    async def _read(self, name: ShardName, stage: SavedStage) -> ShardContents:
        keeper, files = self._keeper, self._files_of(name.layers)
        if not stage.keepers:
            path = await self._fetch(name, stage.digest)
            return await asyncio.to_thread(read_shard, path, name, self._spec_digest, files)
        if keeper is None:
            raise Unavailable(f"{name}: this peer cannot fetch snapshots of peers")
        path = await keeper.fetch(replace(name, is_saved=True), stage, self._folder)
        try:
            return await asyncio.to_thread(read_shard, path, name, self._spec_digest, files)
        finally:
            if not keeper.has_file(path):
                path.unlink(missing_ok=True)

    async def _fetch(self, name: ShardName, digest: bytes) -> Path:
        """Fetch a shard from the store of all snapshots."""
        store = self._store()
        found = await asyncio.to_thread(store.list_snapshots, name.run_id, self._spec_digest)
        manifest = next((manifest for manifest in found if manifest.step == name.step), None)
        if manifest is None or manifest.shard(name.layers).digest != digest:
            raise BadSnapshot(
                f"{name}: the snapshots here have no such state; start this peer with the same "
                f"--snapshots as the coordinator"
            )
        return await asyncio.to_thread(store.fetch_shard, manifest, name.layers, self._folder)

    def _files_of(self, layers: LayerRange, *, seals: bool = False) -> LocalFiles:
        """Return the files of a stage in snapshots; peers of other stages have no key for them."""
        key = self._stage_keys.get(layers)
        return LocalFiles(Sealer(key, "files") if key else None, seals=seals)

    def _store(self) -> SnapshotStore:
        if self._snapshots is None:
            raise Unavailable("this peer has no --snapshots URL; start it with the coordinator's")
        return self._snapshots

    # ---- learners

    async def offer(self, assign: Assign, layers: LayerRange) -> None:
        """Offer the states that learners fetch here.

        The next step waits only for the copy in memory.

        Raises:
            OutOfTurn: Nothing is loaded.
        """
        self._offered_to = {
            learner.peer_id: ShardName(run_id=assign.run_id, step=learner.step, layers=layers)
            for learner in assign.learners
            if self._context.peer_id in learner.sources
        }
        names = set(self._offered_to.values())
        self._stop_offering(names)
        for name in names:
            if name in self._offering and not self._offering[name].done():
                continue  # the offer is reported as soon as it is ready
            if name in self._context.offers:
                report = self._offer(name, self._context.offers[name].path)
            elif name == self._state.name:
                report = self._write_and_offer(name, await self._state.weights())
            else:
                continue
            self._offering[name] = asyncio.create_task(self._reported(name, report))

    async def _reported(self, name: ShardName, offering: Awaitable[None]) -> None:
        """Report an error of an offer, because the learner would wait in vain."""
        try:
            await offering
        except Exception as error:  # noqa: BLE001 - it is reported, and logged if it is a bug
            failure = failure_of(error, name.run_id)
            logger.warning("%s: cannot be offered: %s", name, failure.message)
            self._context.send_to_coordinator(stage_failed(name.run_id, self._attempt, failure))

    def planned(self, plan: PlanStep) -> None:
        """End the offers to peers that compute in this step, since they have the state."""
        wanted = {name for peer, name in self._offered_to.items() if peer in plan.listeners}
        self._stop_offering(wanted)

    async def _write_and_offer(self, name: ShardName, contents: ShardContents) -> None:
        write = partial(self._write, self._folder, name, contents, self._state.files)
        await self._offer(name, await self._retry(name, write))

    async def _offer(self, name: ShardName, path: Path) -> None:
        """Offer a state to all peers that are to fetch it by then."""
        offers = self._context.offers
        try:
            while name not in offers or not self._takers(name) <= offers[name].proofs.keys():
                offered = partial(offer, path, name, self._takers(name), files=self._state.files)
                read = partial(asyncio.to_thread, offered)
                offers[name] = await self._retry(name, read)
        finally:
            self._drop_unless_offered(name, path)
        self._report_offered(name, offers[name])

    def _drop_unless_offered(self, name: ShardName, path: Path) -> None:
        if name not in self._context.offers:
            path.unlink(missing_ok=True)

    def _takers(self, name: ShardName) -> set[PeerId]:
        return {peer for peer, offered_name in self._offered_to.items() if offered_name == name}

    async def _retry(self, name: ShardName, do: Callable[[], Awaitable[T]]) -> T:
        """Call a function until the disk accepts its file."""
        while True:
            try:
                return await do()
            except Unavailable as error:
                logger.warning("%s: cannot be offered yet: %s", name, error.message)
                await asyncio.sleep(RETRY_S)

    def _report_offered(self, name: ShardName, offered: OfferedShard) -> None:
        self._context.send_to_coordinator(
            StageOffered(
                run_id=name.run_id,
                attempt=self._attempt,
                step=name.step,
                digest=offered.chunks.digest(),
                total_bytes=offered.chunks.total_bytes,
                proofs={peer: offered.proofs[peer] for peer in self._takers(name)},
            )
        )

    def _stop_offering(self, but: set[ShardName]) -> None:
        for name in self._offering.keys() - but:
            self._offering.pop(name).cancel()
        own = (name for name in self._context.offers if name.run_id == self._state.run_id)
        states = {name for name in own if not name.is_result}
        for name in states - but:
            self._context.offers.pop(name).path.unlink(missing_ok=True)

    # ---- snapshots

    async def save(self, save: SaveStage) -> None:
        """Save the state to the run's snapshots; the next step waits only for the copy in memory.

        Raises:
            OutOfTurn: Nothing is loaded, or another number of steps is committed here.
        """
        if self._state.committed_steps != save.step:
            committed = self._state.committed_steps
            raise OutOfTurn(
                f"snapshot: expected a state of {save.step} committed steps, got {committed}"
            )
        contents, name = await self._state.full_state(), self._state.name
        has_key = name.layers in self._stage_keys
        seals = self._state.files.seals or (save.by_peers and has_key)
        files = self._files_of(name.layers, seals=seals)
        put = self._keep_locally if save.by_peers else self._put
        task = asyncio.create_task(self._save(name, partial(put, name, contents, files)))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    async def _save(self, name: ShardName, put: Callable[[], Awaitable[SavedStage]]) -> None:
        try:
            async with self._one_save:
                entry = await put()
        except Exception as error:  # noqa: BLE001 - it is reported, and logged if it is a bug
            failure = failure_of(error, name.run_id)
            logger.warning("%s: cannot be saved: %s", name, failure.message)
            self._context.send_to_coordinator(StageUnsaved(name=name, reason=failure.message))
            return
        self._context.send_to_coordinator(
            StageSaved(name=name, digest=entry.digest, total_bytes=entry.total_bytes)
        )

    async def _put(self, name: ShardName, contents: ShardContents, files: LocalFiles) -> SavedStage:
        """Put a state into the snapshot store; a cancelled call waits for the write under way."""
        store = self._store()
        failpoints.reached_meanwhile("saving")
        async with self._temporary_file(name, contents, files) as path:
            put = asyncio.to_thread(store.put_shard, name, path)
            return await run_uncancellable(asyncio.create_task(put))

    async def _keep_locally(
        self, name: ShardName, contents: ShardContents, files: LocalFiles
    ) -> SavedStage:
        """Keep a state here for other peers, encrypted, since any peer may fetch it."""
        if self._keeper is None or not files.seals:
            raise Unavailable("this peer keeps no snapshots, or has no key to encrypt them with")
        async with self._temporary_file(name, contents, files) as path:
            put = self._keeper.put(replace(name, is_saved=True), path)
            file = await run_uncancellable(asyncio.create_task(put))
        return SavedStage(layers=name.layers, digest=file.digest, total_bytes=file.total_bytes)

    @asynccontextmanager
    async def _temporary_file(
        self, name: ShardName, contents: ShardContents, files: LocalFiles
    ) -> AsyncIterator[Path]:
        # The folder is a separate one: the same state, without this peer's own parts, may be on
        # offer.
        folder = self._folder / "saved"
        private_folder(folder)
        path = await self._write(folder, name, contents, files)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)  # it is still here only if the move failed

    async def _write(
        self, folder: Path, name: ShardName, contents: ShardContents, files: LocalFiles
    ) -> Path:
        """Write a state to a file; a cancelled call leaves no file."""
        what = folder, name, self._spec_digest, contents, files
        writing = asyncio.create_task(asyncio.to_thread(write_shard, *what))
        try:
            return await run_uncancellable(writing)
        except asyncio.CancelledError:
            if writing.done() and writing.exception() is None:
                writing.result().unlink()
            raise
