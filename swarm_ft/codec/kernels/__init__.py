"""Backends of the codecs' arithmetic: Triton on CUDA, Numba on CPUs, plain torch as the judge."""

from __future__ import annotations

import functools
import importlib.util

import torch

from swarm_ft.codec.kernels.base import Kernels
from swarm_ft.codec.kernels.reference import ReferenceKernels


def coding_device(device: torch.device) -> torch.device:
    """Where tensors are coded of a stage that computes there: there, if it has kernels."""
    is_plain = isinstance(kernels_for(device.type), ReferenceKernels)
    return torch.device("cpu") if is_plain else device


@functools.cache
def kernels_for(device_type: str) -> Kernels:
    """The fastest backend for tensors on such a device.

    Its modules are imported now: compilers take seconds, and a control plane needs none.
    """
    if device_type == "cuda" and torch.cuda.is_available() and importlib.util.find_spec("triton"):
        from swarm_ft.codec.kernels.cuda import TritonKernels

        return TritonKernels()
    if device_type == "cpu":
        from swarm_ft.codec.kernels.cpu import NumbaKernels

        return NumbaKernels()
    return ReferenceKernels()
