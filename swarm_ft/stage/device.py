"""From `--device` and `--dtype` to torch's objects. Knows what this machine has, nothing else."""

from __future__ import annotations

import os
import re

import torch

from swarm_ft.errors import BadOption

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device(text: str) -> torch.device:
    """`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        BadOption: anything else, or a GPU that this machine lacks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda:0" if num_gpus else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", text)
    if match is None:
        raise BadOption(f"--device '{text}': expected auto, cpu, cuda or cuda:N")
    if text == "cpu":
        return torch.device("cpu")
    index = int(match[1] or 0)
    if index >= num_gpus:
        raise BadOption(f"--device '{text}': torch finds {num_gpus} CUDA devices; try auto or cpu")
    return torch.device("cuda", index)


def pick_dtype(text: str) -> torch.dtype:
    """`float32` or `bfloat16`: what a stage computes in; its weights stay float32.

    Raises:
        BadOption: anything else.
    """
    if text not in DTYPES:
        raise BadOption(f"--dtype '{text}': expected {' or '.join(DTYPES)}")
    return DTYPES[text]


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free on the device now; for the CPU, on this machine."""
    if device.type == "cuda":
        free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return free_bytes
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
