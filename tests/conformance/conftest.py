"""The backends of the codecs' kernels, for the suites that hold them all to one contract."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

FOLDER = Path(__file__).parent
TABLE_OF_KERNELS = FOLDER / "test_kernel_vectors.py"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave Triton's interpreter to `make test-codecs`, except for the table of all kernels."""
    for item in items:
        is_here = item.path.parent == FOLDER and item.path != TABLE_OF_KERNELS
        if is_here and "triton" in item.nodeid.partition("[")[2]:
            item.add_marker(pytest.mark.codecs)


@dataclass(frozen=True)
class Backend:
    """Kernels, and where their tensors are; tests see tensors on the CPU alone."""

    name: str
    kernels: Any
    device: str

    def __call__(self, kernel: str, *args: Any) -> Any:
        result = getattr(self.kernels, kernel)(*(_moved(arg, self.device) for arg in args))
        return _moved(result, "cpu")


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        return tuple(_moved(part, device) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(*(_moved(getattr(x, f.name), device) for f in fields(x)))
    return x


def _backend(name: str) -> Backend:
    if name == "reference":
        from swarm_ft.codec.kernels.reference import ReferenceKernels

        return Backend(name, ReferenceKernels(), "cpu")
    if name == "numba":
        pytest.importorskip("numba")
        from swarm_ft.codec.kernels.cpu import NumbaKernels

        return Backend(name, NumbaKernels(), "cpu")
    pytest.importorskip("triton")
    cuda = pytest.importorskip("swarm_ft.codec.kernels.cuda")
    return Backend(name, cuda.TritonKernels(), "cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", params=["reference", "numba", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each of them in turn."""
    return _backend(request.param)


@pytest.fixture(scope="session", params=["numba", "triton"])
def fast(request: pytest.FixtureRequest) -> Backend:
    """Each of those that are held to the reference."""
    return _backend(request.param)


@pytest.fixture(scope="session")
def reference() -> Backend:
    """Plain torch: the specification."""
    return _backend("reference")
