"""The waits of a stage's microbatch: blocking calls, copies, and the GPU's use meanwhile.

One stage in the middle of a model has steps as a peer has them: frames are decoded and encoded in
codec threads by a peer's own coders, with buffers and digests; there is no network, and neighbours'
frames are made before. Beside it the same step without codecs: what is left between the two is
what the stage waits for its codecs. Torch's profiler counts. Without a GPU there is the time that
each part takes, and nothing to wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row, Value, ratio
from benchmarks.gpu.stages import checkpoint_of, device_here, gpt2, llama, spec_of
from swarm_ft.buffers import BufferStore
from swarm_ft.codec.base import CPU
from swarm_ft.codec.kernels import coding_device
from swarm_ft.codec.side_info import SideInfo
from swarm_ft.codec.spec import Direction
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, RunId, SampleId, StepNumber
from swarm_ft.peer.boundary.coder import FrameCoder, Refusal
from swarm_ft.peer.boundary.side_info import SideInfoStore
from swarm_ft.peer.node import NUM_CODEC_THREADS
from swarm_ft.protocol.messages.boundary import Frame, FrameKey
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.device import begin_codec_thread
from swarm_ft.stage.engine import StageEngine

MIDDLE = LayerRange(1, 7)
MICROBATCHES, IN_FLIGHT, AHEAD = 12, 4, 2
"""Forwards before the first backward, and inputs that are decoded before they are wanted."""
STEPS = 4
"""Key frames, and what compiles; changes; changes that are timed; changes that are profiled."""
CODECS: dict[str, dict[str, Any]] = {
    "aq3+z / q3+z": {},
    "aq4 / q8": {"forward_codec": "aq4", "backward_codec": "q8", "key_codec": "fp16"},
    "aqk0.6 / q1+z+last": {
        "forward_codec": "aqk0.6",
        "backward_codec": "q1+z+last",
        "key_codec": "qk0.45",
    },
}
DEFAULT = "aq3+z / q3+z"
CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaMemcpyAsync",
    "cudaEventSynchronize",
)
"""Of the host: what each takes is time that it waits, or copies memory that is not pinned."""
MILLI = 1e3
RUN = RunId("gpu")
T = TypeVar("T")
Sent = tuple[Frame, SideInfo | None]


@dataclass
class Spent:
    """Seconds of the compute thread, by what it did."""

    by_task: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, task: str, work: Callable[[], T]) -> T:
        """Do it, and count how long it took."""
        began_s = time.perf_counter()
        try:
            return work()
        finally:
            self.by_task[task] += time.perf_counter() - began_s


def rows(scene: Scene) -> Iterator[Row]:
    """GPT-2 XL's blocks and Llama-3-8B's in bfloat16, by several codecs, here and on the CPU."""
    for name, config, tokens in models(scene.rehearse):
        with checkpoint_of(config) as checkpoint:
            spec = spec_of(checkpoint, batch_size=MICROBATCHES, tokens=tokens)
            engine = StageEngine(
                checkpoint, spec, MIDDLE, device=device_here(), dtype=torch.bfloat16
            )
            engine.load()
            alone_s = computing_alone_s(engine, spec)
            cells: dict[str, Value] = {"model": name}
            for codecs, device in setups():
                changed = replace(spec, train=replace(spec.train, **CODECS[codecs]))
                with Stage(engine, changed, device) as stage:
                    words = {**cells, "codecs": codecs, "coded on": device.type}
                    yield from _rows(stage, words, alone_s)
                if scene.left_s < 0:
                    return


def setups() -> Iterator[tuple[str, torch.device]]:
    """Codecs, and what computes them: where the stage is; the default ones on the CPU too, last.

    What compiles for the CPU takes longer than all else.
    """
    device = coding_device(device_here())
    for codecs in CODECS:
        yield codecs, device
    if device != CPU:
        yield DEFAULT, CPU


def models(rehearse: bool) -> Iterator[tuple[str, PretrainedConfig, int]]:
    """Names, eight blocks each, and tokens of a sample."""
    if rehearse:
        yield "GPT-2, small", gpt2(64, 8, 97, 64), 32
        return
    yield "GPT-2 XL (1600), 6 blocks", gpt2(1600, 8, 1000), 1024
    yield "Llama-3-8B (4096), 6 blocks", llama(4096, 14336, 8, 1000), 1024


# ---- a stage with both its boundaries, and what neighbours sent


class Ends:
    """This stage's end of a boundary and the neighbour's, whose frames are made beforehand."""

    def __init__(self, spec: RunSpec, block: int, device: torch.device) -> None:
        self._stores, self._bases = (
            (BufferStore(), BufferStore()),
            (SideInfoStore(), SideInfoStore()),
        )
        boundary = BlockIndex(block)
        self.own, self.other = (
            FrameCoder(
                spec, run_id=RUN, boundary=boundary, store=store, side_info=bases, device=device
            )
            for store, bases in zip(self._stores, self._bases, strict=True)
        )

    def sent(self, step: int, way: Direction, tensors: Sequence[Tensor]) -> list[Sent]:
        """Encode the neighbour's frames of a step, each with its basis."""
        return [self._sent(key(step, number, way), x) for number, x in enumerate(tensors)]

    def _sent(self, name: FrameKey, x: Tensor) -> Sent:
        frame = self.other.encode(name, x)
        basis = self.other.side_info_of(frame) if frame.tensor.codec.has_side_info else None
        return frame, None if basis is None else self.own.read_side_info(basis.data)

    def commit(self, step: int) -> None:
        """Commit the step at both ends."""
        for store, bases in zip(self._stores, self._bases, strict=True):
            store.commit(StepNumber(step))
            bases.commit()
            bases.learn()


class Stage:
    """See the module's docstring."""

    def __init__(self, engine: StageEngine, spec: RunSpec, device: torch.device) -> None:
        self.engine, self.spec, self.device = engine, spec, device
        layers = engine.layers
        self._above, self._below = (
            Ends(spec, block, device) for block in (layers.start, layers.stop)
        )
        start = partial(begin_codec_thread, device)
        self._pool = ThreadPoolExecutor(NUM_CODEC_THREADS, "codec", initializer=start)
        self._inputs, self._gradients = some_tensors(spec, 0, 1.0), some_tensors(spec, 1, 1e-4)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def step(self, step: int, spent: Spent, around: Callable[[], Any] | None = None) -> float:
        """Run a step and return its seconds, without the work of the neighbours.

        Args:
            step: the first is 0.
            spent: counts.
            around: a context that the step alone is in.
        """
        moved = [0.1 * x for x in some_tensors(self.spec, 2 + step, 1.0)]
        inputs = [x + change for x, change in zip(self._inputs, moved, strict=True)]
        received = self._above.sent(step, Direction.FORWARD, inputs)
        returned = self._below.sent(step, Direction.BACKWARD, self._gradients)
        began_s = time.perf_counter()
        if around is None:
            self._step(step, received, returned, spent)
        else:
            with around():
                self._step(step, received, returned, spent)
        taken_s = time.perf_counter() - began_s
        self._above.commit(step)
        self._below.commit(step)
        return taken_s

    def _step(self, step: int, received: list[Sent], returned: list[Sent], spent: Spent) -> None:
        """Run forward passes ahead, then alternate both passes, then the passes for weights."""
        engine, ahead = self.engine, Ahead(self._pool)
        engine.begin_step(StepNumber(step), MICROBATCHES * self.spec.train.seq_length)
        encoded: list[Future[Frame]] = []
        for number in range(MICROBATCHES + IN_FLIGHT):
            index, done = MicrobatchIndex(number), MicrobatchIndex(number - IN_FLIGHT)
            ahead.decode(self._above.own, received[: number + AHEAD])
            ahead.decode(self._below.own, returned[: max(0, done + AHEAD)])
            if number < MICROBATCHES:
                x = spent.timed("waits for an input", partial(ahead.take, self._above.own))
                output = spent.timed("forward", partial(engine.forward, index, x[None]))
                name = key(step, number, Direction.FORWARD)
                encoded.append(self._pool.submit(self._below.own.encode, name, output[0]))
            if done >= 0:
                gradient = spent.timed("waits for a gradient", partial(ahead.take, self._below.own))
                left = spent.timed("backward", partial(engine.backward, done, gradient[None]))
                if left is not None:
                    name = key(step, done, Direction.BACKWARD)
                    encoded.append(self._pool.submit(self._above.own.encode, name, left[0]))
                spent.timed("weights' gradients", partial(engine.weight_gradients, done))
        spent.timed("waits for the last frames", lambda: [one.result() for one in encoded])
        spent.timed("optimizer", partial(apply, engine))


class Ahead:
    """Frames that are decoded before they are wanted, each once and in order."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._pending: dict[FrameCoder, list[Future[Tensor | Refusal]]] = defaultdict(list)
        self._taken: dict[FrameCoder, int] = defaultdict(int)

    def decode(self, coder: FrameCoder, frames: Sequence[Sent]) -> None:
        """Have all of these decoded soon."""
        pending = self._pending[coder]
        for frame, basis in frames[len(pending) :]:
            pending.append(self._pool.submit(coder.decode, frame, basis))

    def take(self, coder: FrameCoder) -> Tensor:
        """Return the value of the next frame.

        Raises:
            RuntimeError: the coder refused it.
        """
        value = self._pending[coder][self._taken[coder]].result()
        self._taken[coder] += 1
        if isinstance(value, Refusal):
            raise RuntimeError(value.reason)
        return value


def computing_alone_s(engine: StageEngine, spec: RunSpec) -> float:
    """Seconds of the same step with tensors that are there, and nothing sent; the second one's."""
    device = device_here()
    x, gradient = (some_tensors(spec, seed, 1.0)[0][None].to(device) for seed in (0, 1))
    taken_s = 0.0
    for step in range(2):
        began_s = time.perf_counter()
        engine.begin_step(StepNumber(step), MICROBATCHES * spec.train.seq_length)
        for number in range(MICROBATCHES + IN_FLIGHT):
            if number < MICROBATCHES:
                engine.forward(MicrobatchIndex(number), x)
            if number >= IN_FLIGHT:
                done = MicrobatchIndex(number - IN_FLIGHT)
                engine.backward(done, 1e-4 * gradient)
                engine.weight_gradients(done)
        apply(engine)
        taken_s = time.perf_counter() - began_s
    return taken_s


def apply(engine: StageEngine) -> None:
    """Run the optimizer's step and wait for its end."""
    engine.squared_grad_norm()
    engine.apply(1.0, 1e-4)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def key(step: int, number: int, way: Direction) -> FrameKey:
    """Return the key of a frame; each microbatch has one sample, the same at every step."""
    index, sample = MicrobatchIndex(number), SampleId(number)
    return FrameKey(Attempt(1), StepNumber(step), index, sample, way)


def some_tensors(spec: RunSpec, seed: int, size: float) -> list[Tensor]:
    """Float32 [tokens, channels] on the CPU for each microbatch."""
    generator = torch.Generator().manual_seed(seed)
    shape = MICROBATCHES, spec.train.seq_length, spec.model.hidden_size
    return list(size * torch.randn(shape, generator=generator))


# ---- rows


def _rows(stage: Stage, cells: dict[str, Value], alone_s: float) -> Iterator[Row]:
    for step in range(STEPS - 2):
        stage.step(step, Spent())
    spent = Spent()
    wall_s = stage.step(STEPS - 2, spent)
    per_microbatch = MILLI / MICROBATCHES
    yield {
        "table": "a step, ms a microbatch",
        **cells,
        "ms": wall_s * per_microbatch,
        "without codecs": alone_s * per_microbatch,
        "times that": ratio(wall_s, alone_s),
    }
    for task, task_s in spent.by_task.items():
        yield {
            "table": "the compute thread's time, ms a microbatch",
            **cells,
            "what": task,
            "ms": task_s * per_microbatch,
            "of the whole": ratio(task_s, wall_s),
        }
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        stage.step(STEPS - 1, Spent())
    yield from _call_rows(found, cells)
    if torch.cuda.is_available():
        yield from _device_rows(found, cells, wall_s)


def _call_rows(found: profile, cells: dict[str, Value]) -> Iterator[Row]:
    events = {event.key: event for event in found.key_averages()}
    for call in CALLS:
        if call in events:
            event = events[call]
            yield {
                "table": "calls that wait, a microbatch, of all threads",
                **cells,
                "what": call,
                "calls": event.count / MICROBATCHES,
                "ms": event.cpu_time_total / MILLI / MICROBATCHES,
            }


def _device_rows(found: profile, cells: dict[str, Value], wall_s: float) -> Iterator[Row]:
    """Sum the GPU's time by stream: each kind of copy apart, and all kernels together."""
    taken: dict[tuple[str, str], float] = defaultdict(float)
    for event in found.events():
        if event.device_type.name == "CUDA":
            kind = event.name if event.name.startswith("Mem") else "kernels"
            stream = str(getattr(event, "device_resource_id", "?"))
            taken[stream, kind] += event.time_range.elapsed_us() / 1e6
    for (stream, kind), seconds in sorted(taken.items()):
        yield {
            "table": "the GPU's time, ms a microbatch",
            **cells,
            "stream": stream,
            "what": kind,
            "ms": seconds * MILLI / MICROBATCHES,
            "of the wall's": ratio(seconds, wall_s),
        }
