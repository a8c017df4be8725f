"""The Triton backend: for GPUs, or for any tensors in Triton's interpreter (TRITON_INTERPRET=1).

Knows which module has which kernel, and that kernels run on the device of their tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from swarm_ft.codec.kernels import cuda_entropy, cuda_grid
from swarm_ft.codec.kernels.base import Coded, Grid, Kernels, NarrowGrid, Scales


def _device_of(x: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, whatever their tensors': make it x's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


class TritonKernels(Kernels):
    """See `Kernels`."""

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """See `Kernels.pack`."""
        with _device_of(codes):
            return cuda_grid.pack(codes, bits)

    def unpack(self, packed: Tensor, count: int, bits: int) -> Tensor:
        """See `Kernels.unpack`."""
        with _device_of(packed):
            return cuda_grid.unpack(packed, count, bits)

    def quantize(self, x: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        """See `Kernels.quantize`."""
        with _device_of(x):
            return cuda_grid.quantize(x, base, scales, grid)

    def dequantize(self, codes: Tensor, base: Tensor | None, scales: Scales, grid: Grid) -> Tensor:
        """See `Kernels.dequantize`."""
        with _device_of(codes):
            return cuda_grid.dequantize(codes, base, scales, grid)

    def quantize_pack(
        self, x: Tensor, base: Tensor | None, scales: Scales, grid: NarrowGrid
    ) -> Tensor:
        """See `Kernels.quantize_pack`; one pass where tokens come in eights."""
        with _device_of(x):
            return cuda_grid.quantize_pack(x, base, scales, grid)

    def unpack_dequantize(
        self,
        packed: Tensor,
        shape: tuple[int, int],
        base: Tensor | None,
        scales: Scales,
        grid: NarrowGrid,
    ) -> Tensor:
        """See `Kernels.unpack_dequantize`; one pass where tokens come in eights."""
        with _device_of(packed):
            return cuda_grid.unpack_dequantize(packed, shape, base, scales, grid)

    def moments(self, x: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Kernels.moments`."""
        with _device_of(x):
            return cuda_entropy.moments(x, base)

    def grid_errors(
        self, x: Tensor, base: Tensor | None, covering: Tensor, multiples: Tensor, bits: int
    ) -> Tensor:
        """See `Kernels.grid_errors`."""
        with _device_of(x):
            return cuda_entropy.grid_errors(x, base, covering, multiples, bits)

    def histogram(self, codes: Tensor, contexts: Tensor, num_contexts: int) -> Tensor:
        """See `Kernels.histogram`."""
        with _device_of(codes):
            return cuda_entropy.histogram(codes, contexts, num_contexts)

    def encode_symbols(
        self, symbols: Tensor, contexts: Tensor, frequencies: Tensor, lanes: int
    ) -> Coded:
        """See `Kernels.encode_symbols`."""
        with _device_of(symbols):
            return cuda_entropy.encode_symbols(symbols, contexts, frequencies, lanes)

    def decode_symbols(
        self, coded: Coded, contexts: Tensor, frequencies: Tensor
    ) -> tuple[Tensor, bool]:
        """See `Kernels.decode_symbols`."""
        with _device_of(contexts):
            return cuda_entropy.decode_symbols(coded, contexts, frequencies)

    def hadamard(self, x: Tensor, tile: int) -> Tensor:
        """See `Kernels.hadamard`."""
        with _device_of(x):
            return cuda_entropy.hadamard(x, tile)
