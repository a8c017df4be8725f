"""How a stage comes by the state that others have, and gives them its own.

A newcomer takes it from the stage's other replicas; a run that goes back takes it from its
snapshots; replicas offer it to newcomers, and put it into the snapshots when they are asked to.
"""

from __future__ import annotations

import asyncio

from swarm_ft.errors import OutOfTurn, SwarmError
from swarm_ft.ids import Attempt, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.donor import OfferedShard
from swarm_ft.peer.handover import Handover
from swarm_ft.peer.stage_state import StageState
from swarm_ft.protocol.coordinator_messages import Assign, SaveStage, TakeStage
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.peer_messages import StageOffered, StageSaved
from swarm_ft.protocol.shard import ShardName
from swarm_ft.snapshots.shard import ShardContents

logger = get_logger(__name__)


class StateExchange:
    """See the module's docstring. Made in a running event loop."""

    def __init__(self, context: PeerContext, state: StageState, handover: Handover) -> None:
        self._context = context
        self._state = state
        self._handover = handover
        self._saves: set[asyncio.Task[None]] = set()
        self._taken_bytes = 0
        self.expect(Attempt(-1))

    def expect(self, attempt: Attempt) -> None:
        """From now on only this attempt's `TakeStage` counts."""
        self._attempt = attempt
        self._take: asyncio.Future[TakeStage] = asyncio.get_running_loop().create_future()

    def take(self, take: TakeStage) -> None:
        """The state that the attempt waits for is there to be fetched."""
        if take.attempt == self._attempt and not self._take.done():
            self._take.set_result(take)

    def pop_taken_bytes(self) -> int:
        """Bytes that were fetched from donors since the last call."""
        taken_bytes, self._taken_bytes = self._taken_bytes, 0
        return taken_bytes

    def find(self, name: ShardName) -> OfferedShard | None:
        """The shard of that name, if it is offered."""
        return self._handover.find(name)

    def close(self) -> None:
        """Offer nothing any more."""
        self._handover.close()

    # ---- what an assignment asks for

    def is_outdated(self, assign: Assign, layers: LayerRange) -> bool:
        """Whether the state that is here, if any, is not the one to go on with."""
        if not self._state.is_loaded or self._is_taker(assign):
            return True
        if self._state.engine.layers != layers:  # before the run went back it had another stage
            return True
        mine = (self._state.committed_steps, self._state.last_attempt)
        return assign.fresh and mine != (assign.committed_steps, assign.last_attempt)

    async def take_up(self, assign: Assign, layers: LayerRange) -> None:
        """Become the stage as its other replicas, or the run's snapshot, have it.

        Raises:
            Unavailable: nobody who has it gives it (now).
            BadSnapshot: what came is not that state.
        """
        step = StepNumber(assign.committed_steps)
        name = ShardName(run_id=assign.run_id, step=step, layers=layers)
        saved = {stage.layers: stage.digest for stage in assign.saved}
        if step and self._is_taker(assign):
            take = await self._take
            contents, self._taken_bytes = await self._handover.fetch(name, take.digest, take.donors)
        elif step and layers in saved:
            contents = await self._handover.read(name, saved[layers])
        else:
            return
        await self._state.restore(contents, step, assign.last_attempt)

    async def offer(self, assign: Assign, layers: LayerRange) -> None:
        """Offer the state to the stage's replicas that have not got it, if there are any.

        Raises:
            Unavailable: the disk does not take it (now).
        """
        replicas = {stage.peer_id for stage in assign.stages if stage.layers == layers}
        if self._is_taker(assign) or not replicas & set(assign.takers):
            return
        contents = await self._state.weights()
        shard = (await self._handover.offer(self._state.name, contents)).chunks
        self._context.say(
            StageOffered(
                run_id=assign.run_id,
                attempt=assign.attempt,
                digest=shard.digest(),
                total_bytes=shard.total_bytes,
            )
        )

    def _is_taker(self, assign: Assign) -> bool:
        return self._context.peer_id in assign.takers

    # ---- snapshots

    async def save(self, save: SaveStage) -> None:
        """Put the state into the run's snapshots; only copying it keeps the next step waiting.

        Raises:
            OutOfTurn: nothing is loaded, or other steps are committed here.
        """
        if self._state.committed_steps != save.step:
            here = self._state.committed_steps
            raise OutOfTurn(f"snapshot of step {save.step}, {here} are committed")
        contents = await self._state.everything()
        task = asyncio.create_task(self._save(self._state.name, contents))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    async def _save(self, name: ShardName, contents: ShardContents) -> None:
        try:
            entry = await self._handover.save(name, contents)
        except SwarmError as error:
            logger.warning("%s: cannot be saved: %s", name, error.message)
            return
        self._context.say(StageSaved(name=name, digest=entry.digest, total_bytes=entry.total_bytes))
