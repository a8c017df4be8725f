"""Compiles every Triton kernel for one GPU architecture, on a machine that has no GPU.

Run as a process of its own: `python compile_triton.py 90`. The wrappers of `TritonKernels` get CPU
tensors, and Triton's own binder and compiler do all but the launch. Prints what was compiled.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from swarm_ft.codec.kernels.base import SLICES, Coding, NarrowGrid, Scales, WideGrid
from swarm_ft.codec.kernels.cuda import TritonKernels

ARCHITECTURE = int(sys.argv[1])
compiled: dict[str, Any] = {}


class GpuThatIsNotThere:
    """A driver with the answers that Triton needs before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    def launch(*args: Any, **options: Any) -> None:
        if min(grid) < 1 or (len(grid) > 1 and grid[1] >= 1 << 16):
            raise ValueError(f"{kernel.__name__}: a grid of {grid} cannot be launched")
        compiled[kernel.__name__] = kernel.run(*args, grid=grid, warmup=True, **options)

    return launch


def launch_grids(kernels: TritonKernels, tokens: int, channels: int) -> None:
    x = torch.zeros(tokens, channels)
    one, rows, cols = torch.ones(1), torch.ones(tokens), torch.ones(channels)
    for base in (None, x):
        for scales in (Scales(rows, cols), Scales(one, cols), Scales(rows, one)):
            for grid in (NarrowGrid(4), NarrowGrid(3, seed=1), WideGrid(15), WideGrid(seed=2)):
                kernels.dequantize(kernels.quantize(x, base, scales, grid), base, scales, grid)
                if isinstance(grid, WideGrid):
                    classes = rows.to(torch.uint8), cols.to(torch.uint8)
                    kernels.quantize_symbols(x, base, scales, grid, Coding(*classes, 2, 0))
                if isinstance(grid, NarrowGrid):
                    packed = kernels.quantize_pack(x, base, scales, grid)
                    kernels.unpack_dequantize(packed, (tokens, channels), base, scales, grid)
        coding = Coding(rows.to(torch.uint8), cols.to(torch.uint8), 2, 0)
        for scales in (Scales(rows, one), Scales(one, one)):
            kernels.trellis_symbols(x, base, scales, 1, coding, 32)
        kernels.moments(x, base)
        kernels.flip_signs(x.to(torch.int16), 1)
        shifts = x.to(torch.uint8).view(-1)
        kernels.flip_signs(x.to(torch.int16), 1, shifts)
        grid = WideGrid(seed=2, shifts=shifts)
        kernels.dequantize(x.to(torch.int16), base, Scales(one, cols), grid)
        kernels.grid_errors(x, base, cols, torch.ones(5), 3)


def launch_symbols(kernels: TritonKernels, count: int) -> None:
    symbols = torch.zeros(count, dtype=torch.uint8)
    frequencies = torch.ones(3, 256, dtype=torch.int32)
    kernels.histogram(symbols, symbols, 3)
    for slices in range(1, SLICES + 1):
        kernels.slice_contexts(symbols, 1, slices)
    for lanes in (1, 32):
        coded = kernels.encode_symbols(symbols, symbols, frequencies, lanes)
        kernels.decode_symbols(coded, symbols, frequencies)


def main() -> None:
    driver.set_active(GpuThatIsNotThere())
    JITFunction.__getitem__ = compile_only
    # What no kernel fills is read all the same. The one has overloads that the other has not.
    torch.empty = torch.zeros  # type: ignore[assignment]
    kernels = TritonKernels()
    for shape in ((1024, 1600), (1, 1)):
        launch_grids(kernels, *shape)
    for bits in range(1, 9):
        kernels.unpack(kernels.pack(torch.zeros(4096, dtype=torch.uint8), bits), 4096, bits)
    launch_symbols(kernels, 100_001)
    fused = [name for name, kernel in compiled.items() if "fma" in kernel.asm["ptx"]]
    sys.stdout.write(json.dumps({"compiled": sorted(compiled), "fused": fused}))


main()
