"""One attempt of a run at one stage: connect to the neighbours, then run step after step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from torch import Tensor

from swarm_ft.buffers import BufferStore
from swarm_ft.clock import Clock
from swarm_ft.discovery.base import Directory
from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import BlockIndex, PeerId
from swarm_ft.peer.boundary import Boundary
from swarm_ft.peer.coder import FrameCoder
from swarm_ft.peer.neighbours import Dialer
from swarm_ft.peer.step import StageStep
from swarm_ft.peer.tied_embeddings import TiedExchange, exchange_from_last
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.frame import FrameKey
from swarm_ft.protocol.messages import (
    Assign,
    BoundaryHello,
    FromPeer,
    PlanStep,
    StageReady,
    StepReady,
)
from swarm_ft.protocol.pipeline import StageSchedule
from swarm_ft.protocol.session import WINDOW_FRAMES, BoundarySession
from swarm_ft.stage.engine import StageEngine
from swarm_ft.transport.base import Transport
from swarm_ft.transport.blob import BlobName


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerContext:
    """What a peer's parts share.

    Attributes:
        compute: one thread, in which the engine lives.
        codecs: threads that encode and decode.
        say: gives a message to the coordinator's stream.
    """

    peer_id: PeerId
    directory: Directory
    transport: Transport
    clock: Clock
    compute: Executor
    codecs: Executor
    say: Callable[[FromPeer], None]


class StageAttempt:
    """See the module's docstring; `run` until cancelled, plans come in through `plan`."""

    def __init__(
        self, context: PeerContext, assign: Assign, *, engine: StageEngine, store: BufferStore
    ) -> None:
        self.assign = assign
        self._context = context
        self._engine = engine
        self._store = store
        self._index = next(i for i, s in enumerate(assign.stages) if s.peer_id == context.peer_id)
        self._plans: asyncio.Queue[PlanStep] = asyncio.Queue(1)
        self._step: StageStep | None = None
        self.tied: TiedExchange | None = None
        self.upstream = self._boundary(Direction.BACKWARD) if self._index else None
        is_last = self._index == len(assign.stages) - 1
        self._downstream = None if is_last else self._boundary(Direction.FORWARD)

    @property
    def upstream_peer(self) -> PeerId:
        """The peer in front of this stage, which is not the first."""
        return self.assign.stages[self._index - 1].peer_id

    def plan(self, plan: PlanStep) -> None:
        """Run this step next.

        Raises:
            OutOfTurn: a step is waiting already.
        """
        if self._plans.full():
            raise OutOfTurn(f"step {plan.step} was planned while another one waits")
        self._plans.put_nowait(plan)

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ExceptionGroup: of the `SwarmError`s that ended the attempt.
        """
        async with asyncio.TaskGroup() as group:
            for boundary in (self.upstream, self._downstream):
                if boundary is not None:
                    group.create_task(boundary.run())
            if self._downstream is not None:
                group.create_task(self._dialer(self._downstream).run())
            group.create_task(self._work())

    async def _work(self) -> None:
        for boundary in (self.upstream, self._downstream):
            if boundary is not None:
                await boundary.connected.wait()
        run_id, attempt = self.assign.run_id, self.assign.attempt
        self._context.say(StageReady(run_id=run_id, attempt=attempt))
        while True:
            plan = await self._plans.get()
            self._context.say(await self._run_step(plan))

    async def _run_step(self, plan: PlanStep) -> StepReady:
        loop, compute = asyncio.get_running_loop(), self._context.compute
        step = self._make_step(plan)
        num_samples = sum(len(batch.samples) for batch in plan.microbatches)
        num_targets = num_samples * (self.assign.spec.train.seq_length - 1)
        await loop.run_in_executor(compute, self._engine.begin_step, plan.step, num_targets)
        self._store.rollback()
        self._step = step
        self._open_exchange(plan)
        for boundary, direction in self._incoming():
            boundary.begin(plan.step, step.expected(direction))
        await step.run()
        await self._synchronise_tied(plan)
        for boundary, _ in self._incoming():
            await boundary.settled()
        norm = await loop.run_in_executor(compute, self._engine.squared_grad_norm)
        return StepReady(
            run_id=plan.run_id,
            attempt=plan.attempt,
            step=plan.step,
            squared_grad_norm=norm,
            loss_sum=step.loss_sum,
            traffic=tuple(boundary.take_traffic() for boundary, _ in self._incoming()),
        )

    def _make_step(self, plan: PlanStep) -> StageStep:
        schedule = StageSchedule(
            num_stages=len(self.assign.stages),
            stage_index=self._index,
            num_microbatches=len(plan.microbatches),
        )
        return StageStep(
            plan,
            engine=self._engine,
            pool=self._context.compute,
            upstream=self.upstream,
            downstream=self._downstream,
            schedule=schedule,
        )

    def _incoming(self) -> list[tuple[Boundary, Direction]]:
        """This stage's boundaries, and which way the frames go that it receives there."""
        both = ((self.upstream, Direction.FORWARD), (self._downstream, Direction.BACKWARD))
        return [(boundary, way) for boundary, way in both if boundary is not None]

    # ---- tied embeddings

    def _open_exchange(self, plan: PlanStep) -> None:
        if self._engine.exchanges_tied_gradient and self._engine.is_first:
            model = self.assign.spec.model
            shape = (model.vocab_size, model.hidden_size)
            self.tied = TiedExchange(_blob_name(plan), shape)

    async def _synchronise_tied(self, plan: PlanStep) -> None:
        if not self._engine.exchanges_tied_gradient:
            return
        loop, compute = asyncio.get_running_loop(), self._context.compute
        own = await loop.run_in_executor(compute, self._engine.tied_gradient)
        if self.tied is not None:
            total = await self.tied.sum(own)
        else:
            total = await exchange_from_last(
                own,
                _blob_name(plan),
                self.assign.stages[0].peer_id,
                directory=self._context.directory,
                transport=self._context.transport,
            )
        await loop.run_in_executor(compute, self._engine.set_tied_gradient, total)

    # ---- boundaries

    def _boundary(self, sends: Direction) -> Boundary:
        assign, stages = self.assign, self.assign.stages
        behind = self._index if sends is Direction.BACKWARD else self._index + 1
        block = BlockIndex(stages[behind].layers.start)
        hello = BoundaryHello(
            run_id=assign.run_id,
            spec_digest=assign.spec.digest(),
            boundary=block,
            peer_id=self._context.peer_id,
            attempt=assign.attempt,
            window_frames=WINDOW_FRAMES,
        )
        coder = FrameCoder(assign.spec, run_id=assign.run_id, boundary=block, store=self._store)
        return Boundary(
            hello,
            session=BoundarySession(attempt=assign.attempt, sends=sends),
            coder=coder,
            pool=self._context.codecs,
            deliver=self._deliver,
        )

    def _deliver(self, key: FrameKey, value: Tensor) -> None:
        if self._step is not None:
            self._step.arrived(key, value)

    def _dialer(self, boundary: Boundary) -> Dialer:
        context = self._context
        return Dialer(
            boundary,
            self.assign.stages[self._index + 1].peer_id,
            directory=context.directory,
            transport=context.transport,
            clock=context.clock,
        )


def _blob_name(plan: PlanStep) -> BlobName:
    return BlobName(run_id=plan.run_id, attempt=plan.attempt, step=plan.step)
