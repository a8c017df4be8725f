"""What a stage's microbatch waits for: calls that wait, copies, and how busy the GPU is meanwhile.

One stage in the middle of a model computes microbatches as a peer has it compute them, and its
output and its input's gradient pass the default codecs on the host, as a peer's boundary has it.
Torch's profiler counts. Without a GPU there is the time that each part takes, and nothing to wait.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row, Value, ratio
from benchmarks.gpu.stages import checkpoint_of, device_here, gpt2, llama, spec_of
from swarm_ft.codec import Codec, from_spec
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.codec_spec import Direction, parse_codec_spec
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.engine import StageEngine

MIDDLE = LayerRange(1, 7)
MICROBATCHES, IN_FLIGHT = 12, 4
CALLS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaMemcpyAsync",
    "cudaEventSynchronize",
)
"""Of the host: what each takes is time that it waits, or copies memory that is not pinned."""
MILLI = 1e3


@dataclass
class Spent:
    """Seconds of the host, by what it did."""

    by_task: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, task: str, work: Callable[[], Tensor | None]) -> Tensor | None:
        """Do it, and count how long it took."""
        began_s = time.perf_counter()
        try:
            return work()
        finally:
            self.by_task[task] += time.perf_counter() - began_s


def rows(scene: Scene) -> Iterator[Row]:
    """GPT-2 XL's blocks and Llama-3-8B's, in float32 and bfloat16."""
    for name, config, tokens in models(scene.rehearse):
        with checkpoint_of(config) as checkpoint:
            spec = spec_of(checkpoint, batch_size=MICROBATCHES, tokens=tokens)
            for dtype in (torch.bfloat16, torch.float32):
                engine = StageEngine(checkpoint, spec, MIDDLE, device=device_here(), dtype=dtype)
                engine.load()
                said: dict[str, Value] = {"model": name, "dtype": str(dtype)}
                yield from _rows(engine, spec, said)
                if scene.left_s < 0:
                    return


def models(rehearse: bool) -> Iterator[tuple[str, PretrainedConfig, int]]:
    """Names, eight blocks each, and tokens of a sample."""
    if rehearse:
        yield "GPT-2, small", gpt2(64, 8, 97, 64), 32
        return
    yield "GPT-2 XL (1600), 6 blocks", gpt2(1600, 8, 1000), 1024
    yield "Llama-3-8B (4096), 6 blocks", llama(4096, 14336, 8, 1000), 1024


def _rows(engine: StageEngine, spec: RunSpec, said: dict[str, Value]) -> Iterator[Row]:
    step(engine, spec, Spent())  # what is compiled, and what libraries keep of a first time
    spent, activities = Spent(), [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    began_s = time.perf_counter()
    step(engine, spec, spent)
    wall_s = time.perf_counter() - began_s
    with profile(activities=activities) as found:
        step(engine, spec, Spent())
    per_microbatch = MILLI / MICROBATCHES
    for task, task_s in spent.by_task.items():
        yield {
            "table": "the host's time, ms a microbatch",
            **said,
            "what": task,
            "ms": task_s * per_microbatch,
            "of the whole": ratio(task_s, wall_s),
        }
    events = {event.key: event for event in found.key_averages()}
    for call in CALLS:
        if call in events:
            event = events[call]
            yield {
                "table": "calls that wait, a microbatch",
                **said,
                "what": call,
                "calls": event.count / MICROBATCHES,
                "ms": event.cpu_time_total / MILLI / MICROBATCHES,
            }
    if torch.cuda.is_available():
        try:
            yield from _device_rows(found, said, wall_s)
        except (
            AttributeError
        ) as error:  # torch names a profile's events by other names now and then
            yield {"table": "trouble", **said, "what": f"the profile: {error}"}


def _device_rows(found: profile, said: dict[str, Value], wall_s: float) -> Iterator[Row]:
    """What the GPU did: copies by their kind, and all else."""
    taken: dict[str, float] = defaultdict(float)
    for event in found.events():
        if event.device_type.name == "CUDA":
            kind = event.name if event.name.startswith("Mem") else "kernels"
            taken[kind] += event.time_range.elapsed_us() / 1e6
    for kind, seconds in sorted(taken.items()):
        yield {
            "table": "the GPU's time, ms a microbatch",
            **said,
            "what": kind,
            "ms": seconds * MILLI / MICROBATCHES,
            "of the wall's": ratio(seconds, wall_s),
        }


def step(engine: StageEngine, spec: RunSpec, spent: Spent) -> None:
    """A step as a peer in the middle has it: forwards ahead, then by turns, weights at the end."""
    tokens, channels = spec.train.seq_length, spec.model.hidden_size
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, channels, generator=generator)
    gradient = 1e-4 * torch.randn(1, tokens, channels, generator=generator)
    forward = from_spec(parse_codec_spec(spec.train.forward_codec, Direction.FORWARD))
    backward = from_spec(parse_codec_spec(spec.train.backward_codec, Direction.BACKWARD))
    base = torch.randn(tokens, channels, generator=generator)
    engine.begin_step(StepNumber(0), MICROBATCHES * tokens)
    for number in range(MICROBATCHES + IN_FLIGHT):
        if number < MICROBATCHES:
            output = spent.timed("forward", partial(engine.forward, MicrobatchIndex(number), x))
            _coded(spent, forward, output, base)
        if number >= IN_FLIGHT:
            done = MicrobatchIndex(number - IN_FLIGHT)
            left = spent.timed("backward", partial(engine.backward, done, gradient))
            _coded(spent, backward, left, None)
            spent.timed("weights' gradients", partial(engine.weight_gradients, done))
    engine.squared_grad_norm()
    engine.apply(1.0, 1e-4)


def _coded(spent: Spent, codec: Codec, x: Tensor | None, base: Tensor | None) -> None:
    """What one end of a boundary does with what it sends, and with what comes."""
    if x is None:
        return

    def there_and_back() -> Tensor:
        return codec.decode(codec.encode(x[0], base), base)

    spent.timed(f"codec {codec.spec}, there and back", there_and_back)
