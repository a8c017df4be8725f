"""How many bytes a microbatch holds at a stage. Knows torch's storages; no step, no schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


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
