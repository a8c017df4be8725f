"""Backends of the codecs' arithmetic: Triton on CUDA, Numba on CPUs, torch as reference."""

from __future__ import annotations

import functools
import importlib.util

import torch

from swarm_ft.codec.kernels.base import Kernels
from swarm_ft.codec.kernels.reference import ReferenceKernels


def coding_device(device: torch.device) -> torch.device:
    """Return the device to encode a stage's tensors on: its own, if a backend for it exists."""
    is_plain = isinstance(kernels_for(device.type), ReferenceKernels)
    return torch.device("cpu") if is_plain else device


@functools.cache
def kernels_for(device_type: str) -> Kernels:
    """Return the fastest backend for tensors on a type of device.

    The backend's modules are imported on demand, because compilers take seconds to import and a
    coordinator needs none.
    """
    if device_type == "cuda" and torch.cuda.is_available() and importlib.util.find_spec("triton"):
        from swarm_ft.codec.kernels.cuda import TritonKernels

        return TritonKernels()
    if device_type == "cpu":
        from swarm_ft.codec.kernels.cpu import NumbaKernels

        return NumbaKernels()
    return ReferenceKernels()
