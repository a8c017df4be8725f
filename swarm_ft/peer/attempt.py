"""An attempt of a run at one stage: runs step after step over its `Connections`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from swarm_ft.base import failpoints
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadCodec, MalformedMessage, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, PeerId
from swarm_ft.peer.boundary.end import Boundary
from swarm_ft.peer.buffer_storage import AttemptBuffers
from swarm_ft.peer.connections import Connections
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.reduce.all_reduce import synchronise
from swarm_ft.peer.state.learner import CatchUpTransfer
from swarm_ft.peer.state.stage_state import StageState, compile_codecs
from swarm_ft.peer.step import StageStep, StepProgress, StepRoutes
from swarm_ft.protocol.machines.pipeline import max_microbatches, min_microbatches
from swarm_ft.protocol.messages.boundary import FrameKey
from swarm_ft.protocol.messages.control import (
    Assign,
    PeerAlive,
    PlanStep,
    Stage,
    StageReady,
    StepReady,
    stages_of,
)
from swarm_ft.protocol.messages.reports import GradientTraffic
from swarm_ft.protocol.messages.timeline import SpanKind
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainSpec
from swarm_ft.protocol.spec.tasks import task_of
from swarm_ft.stage.base import Engine

P = ParamSpec("P")
R = TypeVar("R")


class StageAttempt:
    """An attempt of a run at this peer. `run` works until cancelled; `queue_step` feeds it.

    Attributes:
        assign: Assignment of the attempt.
        connections: Connections to neighbours, replicas and stages with the same weights.
        buffers: Access to the stage's buffers, which are the last activations of each sample at its
            boundaries: prefetches them and reports which exist.
        is_memory_free: Event that is set while no microbatch holds memory. Another run at this
            peer waits for it before it loads weights.
    """

    def __init__(
        self,
        context: PeerContext,
        assign: Assign,
        state: StageState,
        catching_up: CatchUpTransfer | None = None,
    ) -> None:
        """Create the attempt; `run` connects and computes.

        Args:
            context: Context of the peer.
            assign: Assignment of the attempt.
            state: State of the stage; without weights while this peer still receives them.
            catching_up: Transfer of the stage's state to this peer, if it is a learner.
        """
        self.assign = assign
        self.is_memory_free = asyncio.Event()
        self.is_memory_free.set()
        self._catching_up = catching_up
        self._context = context
        self._timeline = context.timeline
        self._state = state
        self.connections = Connections(
            context,
            assign,
            state,
            num_values=0 if self._is_behind else self._engine.num_values,
            deliver=self._deliver,
            on_consumed=self._on_consumed,
        )
        self._index = self.connections.index
        layers = self.connections.pipeline[self._index].layers
        self.buffers = AttemptBuffers(assign, state, layers)
        self._next_plan: asyncio.Queue[PlanStep] = asyncio.Queue(1)
        # These four change with each step. A step that only evaluates or listens has a plan too.
        self._plan: PlanStep | None = None
        self._step: StageStep | None = None
        self._computing_stages = self.connections.pipeline  # without this step's listeners
        self._compiled_spec = assign.spec  # with the codecs of the last step that changed them

    @property
    def _engine(self) -> Engine:
        return self._state.engine

    @property
    def _is_behind(self) -> bool:
        return self._catching_up is not None and not self._catching_up.has_caught_up

    def alive(self) -> PeerAlive:
        """Return a heartbeat: the progress of the step, and the peers that it waits for."""
        step, missing = self._step, self.connections.missing
        if self._plan is None:
            return PeerAlive(
                run_id=self.assign.run_id, attempt=self.assign.attempt, waits_for=missing
            )
        return PeerAlive(
            run_id=self.assign.run_id,
            attempt=self.assign.attempt,
            step=self._plan.step,
            parts_begun=step.parts_begun if step is not None else 0,
            compute_s=step.compute_s if step is not None else 0.0,
            waits_for=missing or self._blocking_peers,
        )

    @property
    def _blocking_peers(self) -> tuple[PeerId, ...]:
        """Peers without which the step cannot continue; none while this peer computes."""
        if self._step is None:
            return self.connections.waits_for
        if self._step.is_computing:
            return ()
        return self._step.waits_for or self.connections.waits_for

    def queue_step(self, plan: PlanStep) -> None:
        """Queue a planned step, to run next.

        Raises:
            OutOfTurn: Another step waits already.
            MalformedMessage: A route names a replica that does not exist, or an entry that is not
                allowed; or the run cannot switch to the plan's codecs.
        """
        _check_routes(plan, self._stages_without_listeners(plan), self.assign.spec)
        _check_codecs(plan, self.assign.spec)
        if self._next_plan.full():
            raise OutOfTurn(f"step {plan.step} was planned while another one waits")
        self._timeline.on_plan(plan)
        self._next_plan.put_nowait(plan)

    async def run(self) -> None:
        """Run steps until cancelled.

        Raises:
            ExceptionGroup: The `SwarmError`s that ended the attempt.
        """
        try:
            await self._run()
        finally:
            self._save_progress()
            self._timeline.send_spans()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self.connections.start(group)
            if self._catching_up is not None:
                group.create_task(self._catching_up.run())
            group.create_task(self._work())

    async def _work(self) -> None:
        await self.connections.wait_connected()
        self._context.send_to_coordinator(self._stage_ready())
        while True:
            plan = self._plan = await self._next_plan.get()
            self._step = None
            is_listener = self._context.peer_id in plan.listeners
            ready = await (self._listen(plan) if is_listener else self._run_step(plan))
            self._timeline.on_ready()
            self._context.send_to_coordinator(ready)

    async def _listen(self, plan: PlanStep) -> StepReady:
        """Receive the sum of a step that the other replicas compute."""
        if self._catching_up is None or self.connections.reducer is None:
            raise OutOfTurn(f"step {plan.step}: expected a step to compute, got one to listen to")
        train = _with_codecs_of(plan, self.assign.spec).train
        for boundary in self.connections.boundaries:
            boundary.begin(plan.step, {}, train, len(plan.microbatches))  # expects no frames
        if not plan.microbatches:
            return self._evaluation_report(plan)
        began_s = self._timeline.now_s()
        total = await self.connections.reducer.listen(plan.step, set(plan.listeners))
        self._timeline.add(SpanKind.REDUCE, began_s)
        self._catching_up.store_sum(plan.attempt, plan.step, total)
        return StepReady(
            run_id=plan.run_id,
            attempt=plan.attempt,
            step=plan.step,
            squared_grad_norm=0.0,
            gradients=self.connections.reducer.take_traffic(),
        )

    def _stage_ready(self) -> StageReady:
        """Return the report of what this peer brings into the attempt.

        That includes microbatches of the first uncommitted step which an earlier attempt finished.
        """
        progress, finished = self._state.progress, frozenset[MicrobatchIndex]()
        if progress is not None and progress.step == self.assign.committed_steps:
            finished = frozenset((*progress.done, *progress.evaluated))
        return StageReady(
            run_id=self.assign.run_id,
            attempt=self.assign.attempt,
            done=finished,
            buffers=self.buffers.begin(),
        )

    def _save_progress(self) -> None:
        """Save the progress of the open step, so that the next attempt continues it."""
        progress = self._state.progress
        # The state has no progress once the step is committed, or if its gradients are incomplete.
        if self._step is None or progress is None or self._step.progress is not progress:
            return
        progress.keep(self.connections.sent())
        progress.count(self.connections.take_traffic())

    async def _run_step(self, plan: PlanStep) -> StepReady:
        """Compute this peer's microbatches of a step, sum the gradients, and return the report."""
        if self._is_behind:
            raise OutOfTurn(f"step {plan.step} was planned over a peer that has not caught up")
        step = await self._begin(plan)
        self.is_memory_free.clear()
        try:
            await step.run()
        finally:
            self.is_memory_free.set()
        failpoints.reached("after-backward")
        if not plan.microbatches:
            await self._wait_settled()
            return self._evaluation_report(plan, step.progress)
        traffic = await self._sum_gradients(plan, step.progress)
        await self._wait_settled()
        norm = await self._run_on_gradient(self._engine.squared_grad_norm)
        self._state.gradient_attempt = plan.attempt
        failpoints.reached("before-ready")
        return self._training_report(plan, step, norm, traffic)

    def _training_report(
        self, plan: PlanStep, step: StageStep, norm: float, gradients: GradientTraffic
    ) -> StepReady:
        progress = step.progress
        return StepReady(
            run_id=plan.run_id,
            attempt=plan.attempt,
            step=plan.step,
            squared_grad_norm=norm,
            loss_sum=progress.loss_sum,
            num_targets=progress.num_targets,
            evaluation=progress.eval_sums(self.assign.spec.train),
            shadowed=progress.shadowed,
            shadows=progress.shadow_sum(self.assign.spec.train),
            compute_s=step.train_s,
            traffic=progress.count(self.connections.take_traffic()),
            gradients=gradients,
            buffers=self.buffers.take_counts(),
            lost=self.buffers.take_lost(),
        )

    def _evaluation_report(self, plan: PlanStep, progress: StepProgress | None = None) -> StepReady:
        """Return the report of a plan that only evaluates the run's last weights."""
        train = self.assign.spec.train
        return StepReady(
            run_id=plan.run_id,
            attempt=plan.attempt,
            step=plan.step,
            squared_grad_norm=0.0,
            evaluation=progress.eval_sums(train) if progress is not None else (),
            traffic=progress.count(self.connections.take_traffic()) if progress is not None else (),
        )

    async def _begin(self, plan: PlanStep) -> StageStep:
        """Open the step: resume the part that the plan counts as done here, or begin anew."""
        self._computing_stages = self._stages_without_listeners(plan)
        here, elsewhere = self._by_replica(plan.microbatches)
        held_out, _ = self._by_replica(plan.evaluation)
        done = [batch for batch in here if self._index in batch.done]
        # Only the last stage has results of held-out microbatches, their losses.
        evaluated = [b for b in held_out if self._index in b.done] if self._engine.is_last else []
        progress = await self._open(plan, [*done, *evaluated])
        spec = await self._compiled_for(plan)
        self.buffers.planned(plan.step, here=here, elsewhere=elsewhere)
        remaining = [batch for batch in (*here, *held_out) if self._index not in batch.done]
        step = self._step = self._make_step(plan, remaining, progress)
        self._begin_boundaries(plan, step, spec.train)
        self._send_again(plan, done, progress)
        return step

    def _by_replica(
        self, microbatches: Sequence[Microbatch]
    ) -> tuple[list[Microbatch], list[Microbatch]]:
        """Return the microbatches that pass this peer, and those that pass other replicas.

        Microbatches that enter the pipeline at a later stage, which has their inputs in its cache,
        are in neither list.
        """
        replica = self._computing_stages[self._index].peers.index(self._context.peer_id)
        passing = [batch for batch in microbatches if batch.entry <= self._index]
        here = [batch for batch in passing if batch.replica_at(self._index) == replica]
        elsewhere = [batch for batch in passing if batch.replica_at(self._index) != replica]
        return here, elsewhere

    def _begin_boundaries(self, plan: PlanStep, step: StageStep, train: TrainSpec) -> None:
        for boundaries, arriving in (
            (self.connections.upstream, Direction.FORWARD),
            (self.connections.downstream, Direction.BACKWARD),
        ):
            for boundary in boundaries.values():
                expected = step.expected(boundary, arriving)
                boundary.begin(plan.step, expected, train, len(plan.microbatches))

    async def _open(self, plan: PlanStep, done: list[Microbatch]) -> StepProgress:
        """Return the progress of the planned step at this peer.

        Args:
            plan: Plan of the step.
            done: Microbatches that the plan counts as done here. If there are any, the progress of
                the earlier attempt continues; otherwise the step begins anew.
        """
        progress = self._state.progress
        if done and progress is not None and progress.step == plan.step:
            progress.check(done)
            if not plan.microbatches:
                return progress
            return await self._state.resume_step(progress)
        if done:
            raise OutOfTurn(
                f"step {plan.step}: the plan counts microbatches as done here, but none are"
            )
        if not plan.microbatches:
            return self._state.begin_evaluation(plan.step)
        return await self._state.begin_step(plan.step, plan.num_targets)

    async def _compiled_for(self, plan: PlanStep) -> RunSpec:
        """Return the run with the step's codecs, after compiling their kernels."""
        spec = _with_codecs_of(plan, self.assign.spec)
        if spec != self._compiled_spec:
            await run_in(self._context.codecs, compile_codecs, spec, self._context.codec_device)
            self._compiled_spec = spec
        return spec

    def _stages_without_listeners(self, plan: PlanStep) -> tuple[Stage, ...]:
        """Return the pipeline without the peers that only listen in this step."""
        return stages_of(self.assign.assignments, but=plan.listeners)

    def _make_step(
        self, plan: PlanStep, batches: list[Microbatch], progress: StepProgress
    ) -> StageStep:
        from_upstream = [batch for batch in batches if batch.entry < self._index]
        routes = StepRoutes(
            stage_index=self._index,
            batches={batch.index: batch for batch in batches},
            upstream=self._routed(from_upstream, self._index - 1, self.connections.upstream),
            downstream=self._routed(batches, self._index + 1, self.connections.downstream),
            input_cache=self.connections.input_cache,
            held_out=frozenset(batch.index for batch in plan.evaluation),
            shadowed=_has_shadow(plan, self.assign.spec.train),
            task=task_of(self.assign.spec.train),
        )
        return StageStep(
            plan,
            routes,
            progress,
            engine=self._engine,
            context=self._context,
            max_held=self._max_microbatches(),
        )

    def _max_microbatches(self) -> int:
        """Return how many microbatches may hold memory at once.

        Plain 1F1B needs the least. More hide the latency of links; they are allowed once the engine
        has measured a microbatch, and until memory runs out for the first time.
        """
        least = min_microbatches(len(self._computing_stages), self._index)
        if self._state.limits_microbatches:
            return least
        return max_microbatches(
            least,
            room_bytes=self._context.room_bytes(self._engine.state_bytes),
            microbatch_bytes=self._engine.microbatch_bytes,
        )

    def _send_again(self, plan: PlanStep, done: list[Microbatch], progress: StepProgress) -> None:
        """Send results of earlier attempts again to neighbours that have not finished with them.

        Args:
            plan: Plan of the step.
            done: Microbatches of which this peer finished its part.
            progress: Progress of the step, which has the results.
        """
        upstream = (self._index - 1, self.connections.upstream, Direction.BACKWARD)
        downstream = (self._index + 1, self.connections.downstream, Direction.FORWARD)
        receivers = [upstream, downstream] if self._engine.sends_gradients else [downstream]
        for index, boundaries, direction in receivers:
            unfinished_there = [batch for batch in done if index not in batch.done]
            for microbatch, boundary in self._routed(unfinished_there, index, boundaries).items():
                for sample in progress.done[microbatch]:
                    key = FrameKey(plan.attempt, plan.step, microbatch, sample, direction)
                    boundary.send(key, progress.sent(key))

    def _routed(
        self, batches: list[Microbatch], index: int, boundaries: Mapping[PeerId, Boundary]
    ) -> dict[MicrobatchIndex, Boundary]:
        """Return the boundary of each microbatch on its way to or from stage `index`."""
        if not boundaries:
            return {}
        peers = self._computing_stages[index].peers
        return {batch.index: boundaries[peers[batch.replica_at(index)]] for batch in batches}

    async def _sum_gradients(self, plan: PlanStep, progress: StepProgress) -> GradientTraffic:
        """Sum the gradients over replicas, then over stages with the same weights."""
        if self.connections.reducer is not None or self.connections.shared_reducer is not None:
            # The sums replace the engine's gradient. An attempt that repeats them starts from this.
            progress.gradient = await self._run_on_gradient(self._engine.flat_gradient)
        return await self._reduce(plan, progress) + await self._sync_shared(plan)

    async def _reduce(self, plan: PlanStep, progress: StepProgress) -> GradientTraffic:
        """Sum this stage's gradients over its replicas; all of them get the same bits."""
        if self.connections.reducer is None or progress.gradient is None:
            return GradientTraffic()
        began_s, own = self._timeline.now_s(), progress.gradient
        total = await self.connections.reducer.reduce(plan.step, own, set(plan.listeners))
        sent = self.connections.reducer.take_traffic()
        self._timeline.add(SpanKind.REDUCE, began_s, num_bytes=sent.sent_bytes)
        await self._run_on_gradient(self._engine.take_sum, total)
        return sent

    async def _sync_shared(self, plan: PlanStep) -> GradientTraffic:
        """Sum the gradients of weights that several stages hold, so that all copies stay equal."""
        reducer, group = self.connections.shared_reducer, self.connections.shared_group
        if reducer is None or group is None:
            return GradientTraffic()
        began_s, compute = self._timeline.now_s(), self._context.compute
        await synchronise(reducer, group, plan.step, self._engine, compute)
        sent = reducer.take_traffic()
        self._timeline.add(SpanKind.TIE, began_s, num_bytes=sent.sent_bytes)
        return sent

    async def _wait_settled(self) -> None:
        """Wait until neighbours have acknowledged all that was sent."""
        began_s = self._timeline.now_s()
        await self.connections.wait_settled()
        self._timeline.add(SpanKind.WAIT_ACKS, began_s)

    async def _run_on_gradient(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run an engine's operation on the step's gradient in the compute thread."""
        timed = self._timeline.timed(SpanKind.GRADIENT, function)
        return await run_in(self._context.compute, timed, *args, **kwargs)

    def _deliver(self, key: FrameKey, value: Tensor) -> None:
        if self._step is not None:
            self._step.on_arrival(key, value)

    def _on_consumed(self, key: FrameKey) -> None:
        if self._step is not None:
            self._step.on_consumed(key)


def _has_shadow(plan: PlanStep, train: TrainSpec) -> bool:
    """Whether the plan also evaluates the step's first microbatch without compression.

    That is its shadow, which measures the effect of compression; it is the last microbatch of
    `plan.evaluation`.
    """
    return any(train.is_shadow(batch.samples[0]) for batch in plan.evaluation[-1:])


def _check_codecs(plan: PlanStep, spec: RunSpec) -> None:
    """Check that the run can switch to the codecs of a step's plan.

    Raises:
        MalformedMessage: The run cannot switch to these codecs.
    """
    _with_codecs_of(plan, spec)


def _with_codecs_of(plan: PlanStep, spec: RunSpec) -> RunSpec:
    """Return the run with the codecs of a step's plan.

    Raises:
        MalformedMessage: The run cannot switch to these codecs.
    """
    try:
        return spec if plan.codecs is None else spec.with_codecs(plan.codecs)
    except BadCodec as error:
        raise MalformedMessage(f"plan of step {plan.step}: {error.message}") from error


def _check_routes(plan: PlanStep, pipeline: Sequence[Stage], spec: RunSpec) -> None:
    """Check that every microbatch passes one computing replica of every stage.

    A microbatch enters at the first stage, or at the stage that caches its inputs.

    Raises:
        MalformedMessage: A microbatch has another route or entry.
    """
    cached = spec.first_uncached_stage(stage.layers for stage in pipeline)
    for batch in (*plan.microbatches, *plan.evaluation):
        if batch.entry not in (0, cached):
            raise MalformedMessage(
                f"plan of step {plan.step}: expected microbatches to enter at stage 0 or {cached}, "
                f"got {batch.entry}"
            )
        route = batch.route or (0,) * len(pipeline)
        counts = [len(stage.peers) for stage in pipeline]
        if len(route) != len(counts) or any(r >= n for r, n in zip(route, counts, strict=True)):
            raise MalformedMessage(
                f"plan of step {plan.step}: expected routes over stages of {counts} replicas, "
                f"got {list(route)}"
            )
