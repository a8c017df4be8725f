"""One run's stage on this peer: its weights, its buffers, and the attempt under way.

Obeys the coordinator's messages one after the other. A step's gradients wait in the engine until
its commit comes; a commit that comes twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from safetensors import SafetensorError

from swarm_ft.buffers import BufferStore
from swarm_ft.errors import InternalError, NotFound, OutOfTurn, SwarmError, Unavailable
from swarm_ft.ids import Attempt, RunId, StepNumber
from swarm_ft.log import get_logger
from swarm_ft.peer.all_reduce import Residuals
from swarm_ft.peer.attempt import StageAttempt
from swarm_ft.peer.boundary import BoundaryStream
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.donor import OfferedShard
from swarm_ft.peer.handover import Handover
from swarm_ft.peer.member_link import ReduceStream
from swarm_ft.peer.neighbours import answer, check_hello
from swarm_ft.peer.tied_embeddings import TiedStream
from swarm_ft.proto import peer_pb2 as pb
from swarm_ft.protocol.gradient_piece import ReduceHello
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.messages import (
    NO_ATTEMPT,
    Assign,
    BoundaryHello,
    CommitStep,
    HeldStage,
    PlanStep,
    StageExported,
    StageFailed,
    StageOffered,
    TakeStage,
)
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.shard import ShardName
from swarm_ft.stage.engine import StageEngine
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.blob import BlobName, send_file

logger = get_logger(__name__)

PROGRESS_LINES = 10
"""A run's steps that a peer's log tells of, about."""
NEIGHBOUR_PATIENCE_S = 60.0
"""How long an upstream neighbour that was told of an attempt sooner waits for this peer to hear
of it; then it waits as long as the stage takes to load."""

P = ParamSpec("P")
R = TypeVar("R")
EngineMaker = Callable[[RunSpec, LayerRange], StageEngine]


class StageHost:
    """See the module's docstring.

    Args:
        make_engine: an engine for this peer's device, not yet loaded.
        shard_dir: where the trained stage is written.
    """

    def __init__(
        self,
        context: PeerContext,
        run_id: RunId,
        spec: RunSpec,
        *,
        make_engine: EngineMaker,
        shard_dir: Path,
    ) -> None:
        self.run_id = run_id
        self._context = context
        self._spec = spec
        self._make_engine = make_engine
        self._shard_dir = shard_dir
        self._store = BufferStore()
        self._residuals = Residuals()
        self._summed_in: Attempt | None = None
        self._engine: StageEngine | None = None
        self._attempt: StageAttempt | None = None
        self._task: asyncio.Task[None] | None = None
        self._assigned = Attempt(-1)
        self._one_commit = asyncio.Lock()
        self._attempt_changed = asyncio.Event()
        self._handover = Handover(context, shard_dir, spec.digest())
        self._take: asyncio.Future[TakeStage] = asyncio.get_running_loop().create_future()
        self._committed_steps = 0
        self._last_attempt = NO_ATTEMPT
        self._shard: Path | None = None

    @property
    def has_result(self) -> bool:
        """Whether a trained stage lies here that nobody collected yet."""
        return self._shard is not None

    @property
    def buffers(self) -> BufferStore:
        """This stage's ends of the per-sample buffers."""
        return self._store

    @property
    def tasks_done(self) -> int:
        """Forwards and backwards of the open step that are computed."""
        return self._attempt.tasks_done if self._attempt is not None else 0

    @property
    def held(self) -> HeldStage | None:
        """What to tell a coordinator that does not know; None before the stage is loaded."""
        if self._engine is None:
            return None
        return HeldStage(
            run_id=self.run_id,
            spec_digest=self._spec.digest(),
            layers=self._engine.layers,
            committed_steps=self._committed_steps,
            last_attempt=self._last_attempt,
            exported=self._shard is not None,
        )

    # ---- what the coordinator says

    async def assign(self, assign: Assign) -> None:
        """Drop the present attempt and start another."""
        await self.stop()
        self._take = asyncio.get_running_loop().create_future()
        self._assigned = assign.attempt
        self._attempt_changed.set()
        self._task = asyncio.create_task(self._work(assign))

    def take(self, take: TakeStage) -> None:
        """The state that this assignment waits for is there to be fetched."""
        if take.attempt == self._assigned and not self._take.done():
            self._take.set_result(take)

    def find_shard(self, name: ShardName) -> OfferedShard | None:
        """A shard that newcomers may have from here."""
        return self._handover.find(name)

    def plan(self, plan: PlanStep) -> None:
        """Run a step of the present attempt; one of an older attempt is void."""
        if self._attempt is not None and plan.attempt == self._attempt.assign.attempt:
            self._attempt.plan(plan)

    async def commit(self, commit: CommitStep) -> None:
        """Apply the step's gradients, once. Cancelled, it still goes on to its end.

        Raises:
            OutOfTurn: the step is not the next one, or its gradients are not here.
        """
        # Weights, buffers and the count of steps move together, also when the stream breaks.
        await asyncio.shield(self._commit(commit))

    async def _commit(self, commit: CommitStep) -> None:
        async with self._one_commit:
            if commit.step < self._committed_steps:
                return
            if commit.step > self._committed_steps or self._engine is None:
                raise OutOfTurn(
                    f"commit of step {commit.step}, {self._committed_steps} are committed"
                )
            if commit.attempt != self._summed_in:
                raise OutOfTurn(
                    f"commit of step {commit.step} by attempt {commit.attempt}, gradients here "
                    f"are of {'none' if self._summed_in is None else self._summed_in}"
                )
            await self._compute(self._engine.apply, commit.clip_factor, commit.learning_rate)
            self._store.commit()
            self._residuals.commit()
            self._committed_steps += 1
            self._last_attempt = commit.attempt
            self._tell_progress()

    def _tell_progress(self) -> None:
        done, whole = self._committed_steps, self._spec.train.num_steps
        if done == 1 or done * PROGRESS_LINES // whole > (done - 1) * PROGRESS_LINES // whole:
            logger.info("run %s: step %d of %d", self.run_id, done, whole)

    async def export(self) -> None:
        """Write the trained stage down, and say so.

        Raises:
            OutOfTurn: nothing is loaded.
            Unavailable: the disk does not take it (now).
        """
        if self._engine is None:
            raise OutOfTurn(f"run {self.run_id}: nothing is loaded that could be written down")
        path = self._shard_dir / f"{self.run_id}-{self._engine.layers}.safetensors"
        try:
            shard_bytes = await self._compute(self._engine.export, path)
        except (OSError, SafetensorError) as error:
            raise Unavailable(f"{path} cannot be written: {error}") from error
        self._shard = path
        logger.info("run %s: trained; the result waits for its client", self.run_id)
        self._context.say(StageExported(run_id=self.run_id, shard_bytes=shard_bytes))

    async def release(self) -> None:
        """Let go of everything."""
        await self.stop()
        self._handover.close()
        self._engine = None
        if self._shard is not None:
            self._shard.unlink(missing_ok=True)
            self._shard = None

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
            await self._attempt_of(assign).run()
        except* SwarmError as group:
            self._fail(assign, _first_error(group))
        except* Exception:
            logger.exception("run %s: a bug ended the attempt", self.run_id)
            self._fail(assign, InternalError("a bug; the peer's log has the details"))
        finally:
            self._attempt = None

    async def _prepare(self, assign: Assign) -> None:
        layers = next(s.layers for s in assign.stages if s.peer_id == self._context.peer_id)
        name = ShardName(run_id=self.run_id, step=StepNumber(assign.committed_steps), layers=layers)
        is_taker = self._context.peer_id in assign.takers
        if self._engine is None or is_taker or (assign.fresh and self._committed_steps):
            await self._load(layers)
        if is_taker:
            await self._take_over(assign, name)
        if self._engine is None or self._committed_steps != assign.committed_steps:
            raise OutOfTurn(
                f"run {self.run_id}: {assign.committed_steps} steps are committed, "
                f"{self._committed_steps} of them here"
            )
        if not is_taker and any(
            s.peer_id in assign.takers for s in assign.stages if s.layers == layers
        ):
            state = await self._compute(self._engine.state)
            shard = (await self._handover.offer(name, state)).chunks
            self._context.say(
                StageOffered(
                    run_id=self.run_id,
                    attempt=assign.attempt,
                    digest=shard.digest(),
                    total_bytes=shard.total_bytes,
                )
            )

    async def _load(self, layers: LayerRange) -> None:
        """The stage as the run began with it."""
        self._engine = None
        engine = await self._compute(self._make_engine, self._spec, layers)
        await self._compute(engine.load)
        self._engine, self._store, self._residuals = engine, BufferStore(), Residuals()
        self._committed_steps, self._last_attempt = 0, NO_ATTEMPT
        self._shard = None
        logger.info("run %s: loaded layers %s", self.run_id, layers)

    async def _take_over(self, assign: Assign, name: ShardName) -> None:
        """The stage as its other replicas have it."""
        take = await self._take
        state = await self._handover.fetch(name, take.digest, take.donors)
        if self._engine is None:
            raise OutOfTurn(f"run {self.run_id}: nothing is loaded")
        await self._compute(self._engine.load_state, state)
        self._committed_steps, self._last_attempt = assign.committed_steps, assign.last_attempt
        logger.info("run %s: took layers %s over at step %d", self.run_id, name.layers, name.step)

    def _attempt_of(self, assign: Assign) -> StageAttempt:
        if self._engine is None:
            raise OutOfTurn(f"run {self.run_id}: nothing is loaded")
        self._attempt = StageAttempt(
            self._context,
            assign,
            engine=self._engine,
            store=self._store,
            residuals=self._residuals,
            summed_in=self._note_summed,
        )
        self._attempt_changed.set()
        return self._attempt

    def _note_summed(self, attempt: Attempt | None) -> None:
        self._summed_in = attempt

    def _fail(self, assign: Assign, error: SwarmError) -> None:
        logger.error("run %s: %s", self.run_id, error.message)
        self._context.say(
            StageFailed(
                run_id=self.run_id,
                attempt=assign.attempt,
                code=error.code,
                message=error.message,
            )
        )

    async def _compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._context.compute, partial(function, *args, **kwargs))

    # ---- what neighbours and clients ask

    async def on_boundary(self, stream: BoundaryStream, hello: BoundaryHello) -> None:
        """The upstream neighbour opened the boundary in front of this stage.

        It may have heard of the attempt before this peer did, and is then kept waiting.

        Raises:
            OutOfTurn: the attempt is over, or does not begin here in time.
            RunMismatch: the neighbour works by another RunSpec.
        """
        attempt = await self._wait_for_attempt(hello)
        boundary = attempt.upstream.get(hello.peer_id)
        if boundary is None:
            raise OutOfTurn(
                f"run {self.run_id}: peer {hello.peer_id} hosts no stage in front of this one"
            )
        check_hello(boundary.hello, hello, hello.peer_id)
        await answer(boundary, stream, hello)

    async def on_reduce(self, stream: ReduceStream, hello: ReduceHello) -> None:
        """Another replica of this stage wants to sum gradients.

        Raises:
            OutOfTurn: the attempt is over, or does not begin here in time, or it is no replica.
        """
        attempt = await self._wait_for_attempt(hello)
        if attempt.reducer is None:
            raise OutOfTurn(f"run {self.run_id}: this stage has no other replica")
        await attempt.reducer.serve(stream, hello)

    async def _wait_for_attempt(self, hello: BoundaryHello | ReduceHello) -> StageAttempt:
        try:
            async with asyncio.timeout(NEIGHBOUR_PATIENCE_S) as patience:
                while self._attempt is None or self._attempt.assign.attempt < hello.attempt:
                    if self._assigned >= hello.attempt:
                        patience.reschedule(None)
                    self._attempt_changed.clear()
                    await self._attempt_changed.wait()
        except TimeoutError:
            raise OutOfTurn(f"run {self.run_id}: attempt {hello.attempt} did not begin") from None
        return self._attempt

    async def on_tied_gradient(self, stream: TiedStream) -> None:
        """The last stage exchanges the gradients of the tied embeddings."""
        if self._attempt is None or self._attempt.tied is None:
            raise OutOfTurn(f"run {self.run_id}: no tied gradient is expected here now")
        await self._attempt.tied.serve(stream)

    async def on_weights(self, stream: MessageStream[pb.BlobPart, pb.WeightsRequest]) -> None:
        """A client fetches the trained stage.

        Raises:
            NotFound: it is not written down (yet).
        """
        if self._shard is None:
            raise NotFound(f"run {self.run_id}: this peer has no result of it")
        await send_file(stream, BlobName(run_id=self.run_id), self._shard)


def _first_error(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, SwarmError) else InternalError(str(error))
