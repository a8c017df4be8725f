"""Tile sizes and warps of the kernels that pack codes: which is the fastest on this GPU.

Of codes of four bits, with and without a base; queued in a CUDA graph, beside a copy. Without a GPU
as called, in an interpreter that knows no warps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.pool import Task, done_in_processes
from benchmarks.gpu.report import Row, ratio
from benchmarks.gpu.speed import REHEARSED_REPEATS, REPEATS, Timed, Work
from swarm_ft.codec.kernels import cuda_grid
from swarm_ft.codec.kernels.base import packed_bytes

SHAPE, REHEARSED_SHAPE = (4096, 4096), (64, 128)
TILES, WARPS = (512, 256, 1024, 2048), (4, 1, 2, 8)
"""What is used now comes first."""
REHEARSED_TILES, REHEARSED_WARPS = TILES[:2], WARPS[:1]
BITS, STREAMS = 4, 8


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of kernels; values, codes and scales fit no other shape."""

    x: Tensor
    base: Tensor
    packed: Tensor
    values: Tensor
    rows: Tensor
    cols: Tensor

    @classmethod
    def of(cls, shape: tuple[int, int], device: torch.device) -> Tensors:
        """Drawn at random, and half a step away from each other."""
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        packed = torch.zeros(packed_bytes(x.numel(), BITS), dtype=torch.uint8, device=device)
        one = torch.ones(1, device=device)
        cols = 0.5 * torch.ones(shape[1], device=device)
        return cls(x, x + 0.25, packed, torch.empty_like(x), one, cols)

    def launches(self, size: int, warps: int) -> dict[tuple[str, bool], Callable[[], object]]:
        """Return launches by kernel and whether of a change, as the kernels' methods do them."""
        tokens, channels = self.x.shape
        each = tokens // STREAMS, channels
        tile = cuda_grid.tile_of(each, size)
        grid = cuda_grid.tiles(each, tile)
        numbers = self.rows, self.cols, None, tokens, channels, True, False, BITS
        options = {**tile, **cuda_grid.EXACT, "num_warps": warps}
        encode, decode = cuda_grid._quantize_pack[grid], cuda_grid._unpack_dequantize[grid]  # noqa: SLF001
        return {
            (name, base is not None): partial(launch, out, operand, base, *numbers, **options)
            for base in (None, self.base)
            for name, launch, out, operand in (
                ("encode", encode, self.packed, self.x),
                ("decode", decode, self.values, self.packed),
            )
        }


def rows(scene: Scene) -> Iterator[Row]:
    """Compiled in several processes first, into Triton's cache; then timed, one by one."""
    shape = REHEARSED_SHAPE if scene.rehearse else SHAPE
    tiles, warps = (REHEARSED_TILES, REHEARSED_WARPS) if scene.rehearse else (TILES, WARPS)
    device, repeats = _device(), REHEARSED_REPEATS if scene.rehearse else REPEATS
    yield from done_in_processes(
        [
            Task(f"{size} codes, {count} warps", partial(launched, shape, size, count))
            for size, count in product(sorted(tiles, reverse=True), warps)
        ],
        scene,
    )
    tensors = Tensors.of(shape, device)
    copy = Timed.of(Work(name="copy", run=lambda: tensors.values.copy_(tensors.x)), device, repeats)
    num_bytes = tensors.x.numel() * tensors.x.element_size()
    for size, count in product(tiles, warps):
        for (name, of_change), launch in tensors.launches(size, count).items():
            taken_s = Timed.of(Work(name=name, run=launch), device, repeats).judged_s
            yield {
                "table": f"{BITS} bits, {shape[0]} x {shape[1]}",
                "kernel": name,
                "of a change": of_change,
                "codes a stream": size,
                "warps": count,
                "GB/s": num_bytes / taken_s / 1e9,
                "of a copy": ratio(copy.judged_s, taken_s),
            }
        if scene.left_s < 0:
            return


def launched(shape: tuple[int, int], size: int, warps: int) -> list[Row]:
    """Compile what that takes; no rows."""
    for launch in Tensors.of(shape, _device()).launches(size, warps).values():
        launch()
    return []


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
