"""The stage of a run on this peer: its weights, its buffers, and the attempt under way.

The host handles the coordinator's messages one after the other. A step's gradients wait in the
engine until their commit arrives; a repeated commit changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from swarm_ft.base.log import get_logger
from swarm_ft.buffers import BufferStore
from swarm_ft.digest import file_stem
from swarm_ft.errors import InternalError, OutOfMemory, OutOfTurn, SwarmError
from swarm_ft.ids import RunId
from swarm_ft.net.transfer import offer
from swarm_ft.peer.attempt import StageAttempt
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.failures import failure_of, stage_failed
from swarm_ft.peer.generation import GenerationSessions
from swarm_ft.peer.snapshot_keeper import SnapshotKeeper
from swarm_ft.peer.state.exchange import StateExchange
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CommitStep,
    HeldStage,
    PeerAlive,
    PlanStep,
    SaveStage,
    StageExported,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.transport.base import first_error

logger = get_logger(__name__)

PROGRESS_LINES = 10
"""Approximate number of steps of a run that a peer logs."""


class StageHost:
    """The stage of a run on this peer; see the module.

    Args:
        context: Context of the run.
        run_id: Id of the run.
        spec: Spec of the run.
        state: State of the stage, not loaded yet.
        shard_dir: Directory for the trained stage.
        snapshots: Store of the run's snapshots; None if this peer has no access to one.
        kept: Snapshots that peers keep for each other; None if this peer keeps none.
    """

    def __init__(  # noqa: PLR0913 - what a stage has around it
        self,
        context: PeerContext,
        run_id: RunId,
        spec: RunSpec,
        *,
        state: StageState,
        shard_dir: Path,
        snapshots: SnapshotStore | None = None,
        kept: SnapshotKeeper | None = None,
    ) -> None:
        self.run_id = run_id
        self._context = context
        self._spec = spec
        self._shard_dir = shard_dir
        self._state = state
        self._exchange = StateExchange(context, state, shard_dir, spec.digest(), snapshots, kept)
        self._attempt: StageAttempt | None = None
        self._task: asyncio.Task[None] | None = None
        self._result: ShardName | None = None
        self._texts: GenerationSessions | None = None
        self._clients: frozenset[str] = frozenset()
        self._layers: LayerRange | None = None

    @property
    def has_result(self) -> bool:
        """Whether a trained stage waits here for its client."""
        return self._result is not None

    def generation_sessions(self, name: ShardName) -> GenerationSessions | None:
        """Return the texts at the trained stage of this name; None if it is not here."""
        return self._texts if name == self._result else None

    @property
    def buffers(self) -> BufferStore:
        """Buffers at this stage's ends of its boundaries."""
        return self._state.store

    def alive(self) -> PeerAlive:
        """Return the run's heartbeat."""
        return self._attempt.alive() if self._attempt is not None else PeerAlive(run_id=self.run_id)

    @property
    def timeline(self) -> Timeline:
        """Recorder of this stage's spans."""
        return self._context.timeline

    @property
    def state_bytes(self) -> int:
        """Bytes of the stage without microbatches; an estimate before the stage is loaded."""
        if self._state.is_loaded:
            return self._state.engine.state_bytes
        return int(self._spec.memory_bytes(self._layers)) if self._layers is not None else 0

    async def wait_memory_free(self) -> None:
        """Wait until no microbatch of the step under way holds memory."""
        if self._attempt is not None:
            await self._attempt.is_memory_free.wait()

    @property
    def reported_state(self) -> HeldStage | None:
        """State to report in a hello; None before the stage is complete."""
        if self._exchange.is_behind:
            return None
        offered = self._context.offers[self._result] if self._result is not None else None
        return self._state.reported_state(offered.chunks.file if offered else None)

    # ---- messages of the coordinator

    async def assign(self, assign: Assign) -> None:
        """End the present attempt and start another."""
        await self.stop()
        self._layers = assign.layers_of(self._context.peer_id)
        self._clients = assign.spec.train.readers | {assign.owner}
        self._task = asyncio.create_task(self._work(assign))

    def start_catch_up(self, take: CatchUp) -> None:
        """Start to fetch the state that this assignment waits for."""
        self._exchange.start_catch_up(take)

    def plan(self, plan: PlanStep) -> None:
        """Run a step of the present attempt; a plan of an older attempt is ignored."""
        attempt = self._attempt
        if attempt is not None and attempt.assign.attempt == plan.attempt:
            self._exchange.planned(plan)
            attempt.queue_step(plan)

    async def commit(self, commit: CommitStep) -> None:
        """Apply the step's gradients, once. A cancelled call still runs to its end.

        Raises:
            OutOfTurn: The step is not the next one, or its gradients are not here.
        """
        self._context.timeline.on_commit()
        before = self._state.committed_steps
        transfer = self._exchange.catching_up
        if transfer is not None and transfer.awaits_commit(commit):
            await transfer.commit(commit)
        else:
            await self._state.commit(commit)
        self._context.timeline.send_spans()
        if self._state.committed_steps > before:
            self._log_progress()

    def _log_progress(self) -> None:
        done, whole = self._state.committed_steps, self._spec.train.num_steps
        if done == 1 or done * PROGRESS_LINES // whole > (done - 1) * PROGRESS_LINES // whole:
            logger.info("run %s: step %d of %d", self.run_id, done, whole)

    async def save(self, save: SaveStage) -> None:
        """Save the state to the run's snapshots; the next step waits only for the copy in memory.

        Raises:
            OutOfTurn: Nothing is loaded, or another number of steps is committed here.
        """
        await self._exchange.save(save)

    async def export(self) -> None:
        """Write the trained stage, offer it to its client, and report that.

        Raises:
            OutOfTurn: Nothing is loaded.
            Unavailable: The disk refuses the file (now).
        """
        name = replace(self._state.name, is_result=True)
        path = self._shard_dir / f"run-{file_stem(self.run_id)}-{name.layers}.safetensors"
        self._drop_result()
        await self._state.export(path)
        files = self._state.files
        offered = await asyncio.to_thread(offer, path, name, clients=self._clients, files=files)
        self._context.offers[name] = offered
        self._result = name
        self._texts = GenerationSessions(
            self._context, self._state.engine, self._spec.model.hidden_size
        )
        logger.info("run %s: trained; the result waits for its client", self.run_id)
        self._context.send_to_coordinator(
            StageExported(run_id=self.run_id, file=offered.chunks.file)
        )

    async def release(self) -> None:
        """Release the stage and delete all its files."""
        await self.stop()
        await self._exchange.close()
        await self._state.release()
        self._drop_result()

    def _drop_result(self) -> None:
        """Delete the result, which was collected or is out of date."""
        if self._texts is not None:
            self._texts.close()
            self._texts = None
        if self._result is not None:
            self._context.offers.pop(self._result).path.unlink(missing_ok=True)
            self._result = None

    async def close(self) -> None:
        """End the present attempt and flush buffers to disk."""
        await self.stop()
        await self._exchange.close()
        await self._state.wait_idle()  # a commit under way runs to its end, and needs its threads
        await asyncio.to_thread(self._state.store.close)

    async def stop(self) -> None:
        """End the present attempt; weights, gradients and buffers stay."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    # ---- an attempt

    async def _work(self, assign: Assign) -> None:
        try:
            await self._prepare(assign)
            transfer = self._exchange.catching_up
            self._attempt = StageAttempt(self._context, assign, self._state, transfer)
            await self._attempt.run()
        except* SwarmError as group:
            error = first_error(group) or InternalError(str(group))
            self._state.limits_microbatches |= isinstance(error, OutOfMemory)
            self._fail(assign, error)
        except* Exception as group:  # noqa: BLE001 - it is reported, and logged if it is a bug
            self._fail(assign, failure_of(group, self.run_id))
        finally:
            self._attempt = None

    async def _prepare(self, assign: Assign) -> None:
        """Bring the stage to the last commit, or begin to catch up; offer the state to learners."""
        await self._state.wait_idle()
        layers = assign.layers_of(self._context.peer_id)
        self._exchange.apply_assignment(assign, layers)
        if self._exchange.catching_up is not None:
            self._drop_result()
            if assign.spec.shared_values:
                await self._exchange.catching_up.run()
            return
        if self._exchange.is_outdated(assign, layers):
            await self._context.wait_for_room()
            await self._state.load(layers, is_beginning=not assign.committed_steps)
            self._drop_result()
            await self._exchange.restore_snapshot(assign, layers)
        if self._state.committed_steps != assign.committed_steps:
            raise OutOfTurn(
                f"run {self.run_id}: expected {assign.committed_steps} committed steps here, got "
                f"{self._state.committed_steps}"
            )
        await self._exchange.offer(assign, layers)

    def _fail(self, assign: Assign, error: SwarmError) -> None:
        detail = f" ({error.private})" if error.private else ""
        logger.error("run %s: %s%s", self.run_id, error.message, detail)
        self._context.send_to_coordinator(stage_failed(assign.run_id, assign.attempt, error))
