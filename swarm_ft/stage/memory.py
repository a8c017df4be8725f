"""How many bytes a microbatch holds at a stage. Knows torch's storages; no step, no schedule."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from swarm_ft.errors import BadOption

# ---- from `--device` and `--dtype` to torch's objects

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What a stage computes in; its weights stay float32."""


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


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free on the device now; for the CPU, on this machine."""
    if device.type == "cuda":
        free_bytes: int = torch.cuda.mem_get_info(device)[0]
        return free_bytes
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Storages:
    """Memory that tensors lie in, each piece counted once, however many are views of it.

    Args:
        but: tensors whose memory does not count.
    """

    def __init__(self, but: Iterable[Tensor] = ()) -> None:
        self._but = {_key(tensor) for tensor in but}
        self._bytes: dict[tuple[torch.device, int], int] = {}

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Self:
        """What these lie in."""
        storages = cls()
        for tensor in tensors:
            storages.add(tensor)
        return storages

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(self._bytes.values())

    def add(self, tensor: Tensor) -> None:
        """Count what this one lies in, unless it is counted already."""
        if _key(tensor) not in self._but:
            self._bytes[_key(tensor)] = tensor.untyped_storage().nbytes()


class HeldBytes:
    """The most bytes that one microbatch was seen to hold, from its forward pass on.

    Attributes:
        most: 0 before the first.
    """

    def __init__(self) -> None:
        self.most = 0
        self._num_tokens = 0

    @contextmanager
    def measuring(self, x: Tensor, but: nn.Module) -> Iterator[Storages]:
        """Count what a forward pass inside saves, if no microbatch was as large before.

        Args:
            x: its input [B, T] or [B, T, C], which is held too.
            but: its weights are there anyway and do not count.

        Yields:
            To which the caller adds what else it holds.
        """
        if x.shape[:2].numel() <= self._num_tokens:
            yield Storages()
            return
        held = Storages(but=(*but.parameters(), *but.buffers()))
        held.add(x)

        def save(tensor: Tensor) -> Tensor:
            held.add(tensor)
            return tensor.detach()

        with saved_tensors_hooks(save, lambda tensor: tensor):
            yield held
        self._num_tokens = x.shape[:2].numel()
        self.saw(held)

    def saw(self, held: Storages) -> None:
        """A microbatch holds this."""
        self.most = max(self.most, held.num_bytes)


def _key(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()
