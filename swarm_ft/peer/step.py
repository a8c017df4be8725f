"""One step at one stage: samples come in, the schedule picks tasks, tensors go out.

The schedule decides, the engine computes in the compute thread; this shell carries tensors
between them and the boundaries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from swarm_ft.errors import MalformedMessage
from swarm_ft.ids import MicrobatchIndex, SampleId
from swarm_ft.peer.boundary import Boundary
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.frame import FrameKey
from swarm_ft.protocol.messages import PlanStep
from swarm_ft.protocol.pipeline import StageSchedule, StepDone, Task, TaskKind
from swarm_ft.protocol.training_plan import Microbatch
from swarm_ft.stage.engine import StageEngine

P = ParamSpec("P")
R = TypeVar("R")


class StageStep:
    """State of one step at this stage.

    Args:
        plan: the step's microbatches, and tokens at the first and the last stage.
        engine: what computes; touched in the compute thread only.
        pool: the compute thread.
        upstream: the boundary in front of the stage; None at the first.
        downstream: the boundary behind it; None at the last.
        schedule: a new one, for this step.

    Raises:
        MalformedMessage: the plan lacks tokens that this stage needs.
    """

    def __init__(
        self,
        plan: PlanStep,
        *,
        engine: StageEngine,
        pool: Executor,
        upstream: Boundary | None,
        downstream: Boundary | None,
        schedule: StageSchedule,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._pool = pool
        self._upstream = upstream
        self._downstream = downstream
        self._schedule = schedule
        self._arrivals: asyncio.Queue[tuple[FrameKey, Tensor]] = asyncio.Queue()
        self._samples: dict[FrameKey, Tensor] = {}
        self._inputs: dict[MicrobatchIndex, Tensor] = {}
        self._gradients: dict[MicrobatchIndex, Tensor] = {}
        self._tokens = _stack_tokens(plan) if engine.is_first or engine.is_last else {}
        self.loss_sum = 0.0

    def expected(self, direction: Direction) -> frozenset[FrameKey]:
        """Keys of all frames of this step that go one way over one boundary."""
        return frozenset(
            self._key(batch, sample, direction)
            for batch in self._plan.microbatches
            for sample in batch.samples
        )

    def arrived(self, key: FrameKey, value: Tensor) -> None:
        """A neighbour's sample was decoded; float32 [tokens, channels]."""
        self._arrivals.put_nowait((key, value))

    async def run(self) -> None:
        """Compute everything of this step; gradients are then summed in the engine.

        Raises:
            NonFinite: an activation, a loss or a gradient is inf or NaN.
        """
        pending = self._first_inputs()
        while True:
            while isinstance(pending, Task):
                await self._compute(pending)
                while not self._arrivals.empty():
                    self._assemble(*self._arrivals.get_nowait())
                pending = self._schedule.computed(pending)
            if isinstance(pending, StepDone):
                return
            pending = self._assemble(*await self._arrivals.get())

    def _first_inputs(self) -> Task | StepDone | None:
        pending = None
        if self._engine.is_first:
            for index, tokens in self._tokens.items():
                self._inputs[index] = tokens
                pending = self._schedule.input_ready(index) or pending
        return pending

    def _assemble(self, key: FrameKey, value: Tensor) -> Task | StepDone | None:
        """Keep a sample; when its microbatch is complete, tell the schedule."""
        self._samples[key] = value
        batch = self._plan.microbatches[key.microbatch]
        keys = [self._key(batch, sample, key.direction) for sample in batch.samples]
        if any(k not in self._samples for k in keys):
            return None
        stacked = torch.stack([self._samples.pop(k) for k in keys])
        if key.direction is Direction.FORWARD:
            self._inputs[batch.index] = stacked
            return self._schedule.input_ready(batch.index)
        self._gradients[batch.index] = stacked
        return self._schedule.gradient_ready(batch.index)

    async def _compute(self, task: Task) -> None:
        index = task.microbatch
        match task.kind:
            case TaskKind.FORWARD:
                x = self._inputs.pop(index)
                output = await self._in_thread(self._engine.forward, index, x)
                self._send(self._downstream, index, output, Direction.FORWARD)
            case TaskKind.BACKWARD:
                gradient = self._gradients.pop(index)
                result = await self._in_thread(self._engine.backward, index, gradient)
                self._send(self._upstream, index, result, Direction.BACKWARD)
            case TaskKind.FORWARD_BACKWARD:
                x, tokens = self._inputs.pop(index), self._tokens[index]
                last = await self._in_thread(self._engine.forward_backward, index, x, tokens)
                self.loss_sum += last.loss_sum
                self._send(self._upstream, index, last.input_gradient, Direction.BACKWARD)

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))

    def _send(
        self,
        boundary: Boundary | None,
        index: MicrobatchIndex,
        values: Tensor | None,
        direction: Direction,
    ) -> None:
        if boundary is None or values is None:
            return
        batch = self._plan.microbatches[index]
        for row, sample in enumerate(batch.samples):
            boundary.send(self._key(batch, sample, direction), values[row])

    def _key(self, batch: Microbatch, sample: SampleId, direction: Direction) -> FrameKey:
        return FrameKey(self._plan.attempt, self._plan.step, batch.index, sample, direction)


def _stack_tokens(plan: PlanStep) -> Mapping[MicrobatchIndex, Tensor]:
    """Tokens of every microbatch, int64 [samples, tokens]."""
    try:
        return {
            batch.index: torch.stack([_tokens(plan.tokens[sample]) for sample in batch.samples])
            for batch in plan.microbatches
        }
    except (KeyError, RuntimeError) as error:
        raise MalformedMessage(f"plan of step {plan.step}: tokens missing or uneven") from error


def _tokens(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<u4").astype(np.int64))
