"""What a stage computes on, and in: from option texts to torch's objects, and what each kind lacks.

Apple's GPUs (`mps`) were not run by the tests: what is known to differ is here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarm_ft import systems
from swarm_ft.errors import BadOption
from swarm_ft.stage.names import check_device_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a stage computes in; its weights stay float32."""


def pick_device(text: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """`auto` (a CUDA GPU where there is one, or else the CPU), `cpu`, `cuda`, `cuda:N` or `mps`.

    Args:
        text: as given.
        dtype: what it is to compute in.

    Raises:
        BadOption: anything else, or a GPU that this machine lacks, or that cannot compute in that.
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
    """Whether torch finds one."""
    return torch.backends.mps.is_available()


def _apple_gpu(dtype: torch.dtype) -> torch.device:
    if not torch.backends.mps.is_built():
        raise BadOption("--device 'mps': this build of torch has none; on a Mac, reinstall torch")
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
    """In words, for people."""
    if device.type != "cuda":
        return str(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free on the device now; for the CPU, on this machine.

    Raises:
        BadOption: nobody tells.
    """
    if device.type == "cuda":
        free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return free_bytes
    free = systems.free_memory_bytes()
    if free is None:
        raise BadOption(
            "--memory: this system does not tell how much is free; give a size such as 4GiB"
        )
    if device.type == "mps":  # which has the machine's, up to a part
        left = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(free, left))
    return free


def total_memory_bytes(device: torch.device) -> int | None:
    """Return the memory that the device has in all, free or not; None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return systems.total_memory_bytes()


def keep_within(device: torch.device, memory_bytes: int) -> None:
    """From now on torch takes no more of a GPU than that: what asks for more fails there."""
    if device.type == "cuda":
        share = memory_bytes / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def shares_memory(device: torch.device) -> bool:
    """Whether what lies on it is taken of the machine's memory."""
    return device.type in {"cpu", "mps"}


# ---- a GPU's streams: engines compute in the default one, and each codec thread has its own
#
# Whoever hands a tensor to another thread has waited for it. So what is left to be told is torch's
# allocator: memory of a stream is given out again in that stream's order, and not in another's that
# still reads it.


SWITCH_S = 2e-5
"""For so long a thread may keep the interpreter while another waits; Python's own is 5 ms."""


def begin_codec_thread(device: torch.device) -> None:
    """What this thread asks of a GPU from now on stands beside what others ask, not behind it.

    Nor is the thread that computes, which asks for a kernel every few microseconds, held up for
    long by what this one does in Python; that is so for the whole process.
    """
    sys.setswitchinterval(SWITCH_S)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        own = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(own)


def handed_over(x: Tensor) -> Tensor:
    """A tensor of such a thread, for the default stream to read."""
    if x.is_cuda:
        x.record_stream(torch.cuda.default_stream(x.device))
    return x


def synchronise(device: torch.device) -> None:
    """Wait until all that this thread asked of it is done; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def summable(tensor: Tensor) -> Tensor:
    """The tensor where float64 can be had; there is none on Apple's GPUs."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def summed(tensor: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, which stays, as 1; halves on halves, in one order everywhere."""
    while (count := tensor.shape[dim]) > 1:
        half = count // 2
        folded = tensor.narrow(dim, 0, half) + tensor.narrow(dim, half, half)
        left = tensor.narrow(dim, 2 * half, count % 2)
        tensor = torch.cat([folded, left], dim) if count % 2 else folded
    return tensor


@contextmanager
def drawing_apart(device: torch.device) -> Iterator[None]:
    """Torch's generators are put back after what runs inside."""
    apple = torch.mps.get_rng_state() if device.type == "mps" else None  # `fork_rng` cannot
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        if apple is not None:
            torch.mps.set_rng_state(apple)
