"""The speed of kernels and whole codecs, beside a copy of the same tensor on the same device.

Kernels: from a float32 tensor on the device to its codes there, and back, without a word to the
host: as called, one call after the other, each with its launch, and queued, many of them in a CUDA
graph, where only the kernel's own time counts. What waits for the device cannot be queued. Codecs:
from the tensor to bytes in the host's memory and back, scales, transfers and waits included, as a
stage pays for them. Goals: 60 % of the copy for codes of fixed width, 10 GB/s of tensor for
entropy-coded ones.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row, ratio
from swarm_ft.cli.codec_speed import measure
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import Kernels, NarrowGrid, Scales
from swarm_ft.codec.spec import Direction, parse_codec_spec

SHAPES = ((1024, 1600), (4096, 4096))
REHEARSED_SHAPES = ((64, 160), (128, 128))
CODECS = (
    *("aq4", "aq3+z", "aqk0.5", "q1t+d+z", "q3+z", "q8", "q4", "aq2"),
    *("aq3", "aq2+z", "q2", "q3", "q2+z", "q4+z", "aq4+z", "fp16", "none"),
)
REHEARSED_CODECS = ("q4", "aq3+z", "none")
COPY_SHARE, ENTROPY_GB_S = 0.6, 10.0
REPEATS, CODEC_REPEATS, REHEARSED_REPEATS = 30, 10, 3
IN_A_GRAPH = 20
LANES, CONTEXTS = 32, 16
_GIGA = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Something to be timed.

    Attributes:
        is_entropy: whether its goal is a rate and not a share of a copy; it waits for the device.
    """

    name: str
    run: Callable[[], object]
    is_entropy: bool = False


def rows(scene: Scene) -> Iterator[Row]:
    """Kernels first: whole codecs are no faster than they are."""
    shapes = REHEARSED_SHAPES if scene.rehearse else SHAPES
    repeats = REHEARSED_REPEATS if scene.rehearse else REPEATS
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in shapes:
        yield from _kernel_rows(shape, device, repeats)
    repeats = REHEARSED_REPEATS if scene.rehearse else CODEC_REPEATS
    for shape, name in product(shapes, REHEARSED_CODECS if scene.rehearse else CODECS):
        if scene.left_s < 0:
            return
        yield from _codec_rows(name, shape, device, repeats)


def _codec_rows(
    name: str, shape: tuple[int, int], device: torch.device, repeats: int
) -> Iterator[Row]:
    spec = parse_codec_spec(name, Direction.FORWARD)
    try:
        measured = list(measure([spec], [shape], devices=[device], repeats=repeats))
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to be timed
        traceback.print_exc()
        yield {"table": "trouble", "codec": name, "what": f"{type(error).__name__}: {error}"[:300]}
        return
    for row in measured:
        for way in ("encode", "decode"):
            gb_s, of_copy = getattr(row, f"{way}_gb_s"), getattr(row, f"{way}_ratio")
            yield {
                "table": "codecs, to bytes on the host and back",
                "codec": row.codec,
                "backend": row.backend,
                "shape": f"{shape[0]} x {shape[1]}",
                "way": way,
                "GB/s": gb_s,
                "of a copy": of_copy,
                "goal met": meets_goal(gb_s, of_copy, is_entropy=spec.entropy),
                "bits": row.bits_a_value,
                "error": row.error,
            }


def meets_goal(gb_s: float, of_copy: float | None, *, is_entropy: bool) -> bool:
    """Whether it is as fast as it is to be."""
    return gb_s >= ENTROPY_GB_S if is_entropy else (of_copy or 0.0) >= COPY_SHARE


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a call by itself, and of one of many in a graph; None where there is none."""

    called_s: float
    queued_s: float | None

    @classmethod
    def of(cls, work: Work, device: torch.device, repeats: int) -> Timed:
        """Measure a piece of work after a first call that compiles it."""
        called_s, queued_s = seconds(work.run, device, repeats), None
        if device.type == "cuda" and not work.is_entropy:
            try:
                queued_s = queued_seconds(work.run, device, repeats)
            except RuntimeError:  # it cannot be captured: as called is something, too
                traceback.print_exc()
        return cls(called_s, queued_s)

    @property
    def judged_s(self) -> float:
        """The best estimate of the kernel's own seconds."""
        return self.called_s if self.queued_s is None else self.queued_s

    def cells(self, num_bytes: int, copy: Timed) -> dict[str, float | None]:
        """Return cells for the report, for a tensor of so many bytes and the times of its copy."""
        queued = self.queued_s
        return {
            "GB/s called": num_bytes / self.called_s / _GIGA,
            "of a copy, called": ratio(copy.called_s, self.called_s),
            "GB/s queued": None if queued is None else num_bytes / queued / _GIGA,
            "of a copy, queued": None if queued is None else ratio(copy.queued_s, queued),
        }


def _kernel_rows(shape: tuple[int, int], device: torch.device, repeats: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(device)
    base = (x.cpu() + 0.1 * torch.randn(shape, generator=generator)).to(device)
    kernels, copied = kernels_for(device.type), torch.empty_like(x)
    num_bytes = x.numel() * x.element_size()
    copy = Timed.of(Work(name="copy", run=lambda: copied.copy_(x)), device, repeats)
    cells = {"table": "kernels, on the device", "shape": f"{shape[0]} x {shape[1]}"}
    yield {**cells, "kernel": "copy", **copy.cells(num_bytes, copy)}
    for work in (*_narrow_works(kernels, x, base), *_entropy_works(kernels, x)):
        timed = Timed.of(work, device, repeats)
        gb_s, share = num_bytes / timed.judged_s / _GIGA, ratio(copy.judged_s, timed.judged_s)
        met = meets_goal(gb_s, share, is_entropy=work.is_entropy)
        yield {**cells, "kernel": work.name, **timed.cells(num_bytes, copy), "goal met": met}


def _narrow_works(kernels: Kernels, x: Tensor, base: Tensor) -> Iterator[Work]:
    scales = Scales(torch.ones(1, device=x.device), torch.full((x.shape[1],), 0.5).to(x.device))
    shape = (x.shape[0], x.shape[1])
    for bits in (2, 3, 4):
        grid = NarrowGrid(bits)
        for name, other in ((f"{bits} bits", None), (f"{bits} bits of a change", base)):
            packed = kernels.quantize_pack(x, other, scales, grid)
            yield Work(
                name=f"encode {name}",
                run=partial(kernels.quantize_pack, x, other, scales, grid),
            )
            yield Work(
                name=f"decode {name}",
                run=partial(kernels.unpack_dequantize, packed, shape, other, scales, grid),
            )


def _entropy_works(kernels: Kernels, x: Tensor) -> Iterator[Work]:
    """Yield the entropy coder's work alone, at about 2 bits a value and one byte a symbol."""
    symbols = (x.reshape(-1) / 0.8).round().clamp(-8, 7).add(8).to(torch.uint8)
    contexts = (torch.arange(x.numel(), device=x.device) % CONTEXTS).to(torch.uint8)
    frequencies = _frequencies(kernels.histogram(symbols, contexts, CONTEXTS))
    coded = kernels.encode_symbols(symbols, contexts, frequencies, LANES)
    yield Work(
        name="encode symbols",
        run=lambda: kernels.encode_symbols(symbols, contexts, frequencies, LANES),
        is_entropy=True,
    )
    yield Work(
        name="decode symbols",
        run=lambda: kernels.decode_symbols(coded, contexts, frequencies),
        is_entropy=True,
    )


def _frequencies(counts: Tensor) -> Tensor:
    """Scale each context's counts to int32 that sum to 4096; counted symbols get at least 1."""
    seen = counts > 0
    shares = counts * (4096 - 256) // counts.sum(1, keepdim=True).clamp(min=1) + seen
    left = 4096 - shares.sum(1)
    shares[torch.arange(len(shares), device=shares.device), shares.argmax(1)] += left
    return shares.to(torch.int32)


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call, after a first one that compiles."""
    work()
    taken = []
    for _ in range(repeats):
        if device.type != "cuda":
            began_s = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began_s)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def queued_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call within a CUDA graph of many, after one that compiles."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            work()
    return seconds(graph.replay, device, repeats) / IN_A_GRAPH
