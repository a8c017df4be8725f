"""Devices and dtypes of a stage: from option texts to torch's objects, with each kind's limits.

The tests do not run Apple's GPUs (`mps`); known differences are handled here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarm_ft.base import systems
from swarm_ft.errors import BadOption
from swarm_ft.stage.names import check_device_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes in which a stage computes; its weights stay float32."""


def pick_device(text: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device of `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.

    `auto` is a CUDA GPU if there is one, else the CPU.

    Args:
        text: Text of the option.
        dtype: Dtype of the computation.

    Raises:
        BadOption: The text is no device, the machine lacks it, or it cannot compute in this dtype.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda:0" if num_gpus else "cpu")
    check_device_name(text)
    if text == "cpu":
        return torch.device("cpu")
    if text == "mps":
        return _apple_gpu(dtype)
    index = int(text.partition(":")[2] or 0)
    if index >= num_gpus:
        raise BadOption(f"--device '{text}': torch finds {num_gpus} CUDA devices; try auto or cpu")
    return torch.device("cuda", index)


def has_apple_gpu() -> bool:
    """Whether torch finds an Apple GPU."""
    return torch.backends.mps.is_available()


def _apple_gpu(dtype: torch.dtype) -> torch.device:
    if not torch.backends.mps.is_built():
        raise BadOption(
            "--device 'mps': this build of torch does not support it; on a Mac, reinstall torch"
        )
    if not has_apple_gpu():
        raise BadOption(
            "--device 'mps': torch finds no Apple GPU; expected an Apple silicon Mac with "
            "macOS 14 or newer; try cpu"
        )
    device = torch.device("mps")
    try:
        torch.ones(1, dtype=dtype, device=device).add_(1)
    except (RuntimeError, TypeError) as error:
        raise BadOption(
            f"--device 'mps': it does not compute in {dtype}: {error}; try --dtype float32"
        ) from None
    return device


def describe(device: torch.device) -> str:
    """Return a description of the device, for people."""
    if device.type != "cuda":
        return str(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of the device; for the CPU, of this machine.

    Raises:
        BadOption: The system does not report it.
    """
    if device.type == "cuda":
        free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return free_bytes
    free = systems.free_memory_bytes()
    if free is None:
        raise BadOption(
            "--memory: this system does not report its free memory; give a size such as 4GiB"
        )
    if device.type == "mps":  # it shares the machine's memory, up to a limit
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(free, left))
    return free


def total_memory_bytes(device: torch.device) -> int | None:
    """Return the total memory of the device; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return systems.total_memory_bytes()


def machine_memory_bytes(device: torch.device) -> int | None:
    """Return the memory that all processes on the device share, outside containers, if known."""
    if device.type == "cpu":
        return systems.machine_memory_bytes()
    return total_memory_bytes(device)


def limit_memory(device: torch.device, memory_bytes: int) -> None:
    """Limit the GPU memory of torch in this process; allocations beyond the limit fail."""
    if device.type == "cuda":
        share = memory_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def shares_memory(device: torch.device) -> bool:
    """Whether the device's memory is the machine's memory."""
    return device.type in {"cpu", "mps"}


# ---- streams of a GPU: engines compute in the default one, each codec thread in its own
#
# A thread that passes a tensor to another one has already waited for its values. Only torch's
# allocator has to be notified: it reuses memory in the order of the stream that allocated it, and
# does not know that another stream still reads it.


SWITCH_S = 2e-5
"""Seconds for which a thread may keep the interpreter while another waits.

Python's default is 5 ms.
"""


def begin_codec_thread(device: torch.device) -> None:
    """Give this codec thread its own stream of a GPU, beside the engine's.

    The call also shortens the switch interval of the whole process. Otherwise Python code of this
    thread would delay the compute thread, which launches a kernel every few microseconds.
    """
    sys.setswitchinterval(SWITCH_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        own = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(own)


def share_with_default_stream(x: Tensor) -> Tensor:
    """Mark a tensor of a codec thread as used by the default stream, and return it."""
    if x.is_cuda:
        x.record_stream(torch.cuda.default_stream(x.device))
    return x


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished all work of this thread; a CPU has."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def summable(tensor: Tensor) -> Tensor:
    """Return the tensor on a device with float64, which Apple's GPUs lack."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def sum_in_order(tensor: Tensor, dim: int) -> Tensor:
    """Return the sum over a dimension, which stays with size 1, in a fixed order of additions.

    Halves are added to halves, with the same result on every machine.
    """
    while (count := tensor.shape[dim]) > 1:
        half = count // 2
        folded = tensor.narrow(dim, 0, half) + tensor.narrow(dim, half, half)
        left = tensor.narrow(dim, 2 * half, count % 2)
        tensor = torch.cat([folded, left], dim) if count % 2 else folded
    return tensor


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore torch's random generators after the context."""
    apple = torch.mps.get_rng_state() if device.type == "mps" else None  # `fork_rng` omits it
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        if apple is not None:
            torch.mps.set_rng_state(apple)
