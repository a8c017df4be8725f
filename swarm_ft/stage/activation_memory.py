"""Bytes that tensors hold: those of a microbatch, and those of all live tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from weakref import ref

from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ---- the memory behind some tensors


class Storages:
    """Memory behind tensors; each storage counts once, however many views it has.

    Args:
        but: Tensors whose memory does not count.
    """

    def __init__(self, but: Iterable[Tensor] = ()) -> None:
        self._but = {_key(tensor) for tensor in but}
        self._bytes: dict[int, int] = {}

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Self:
        """Return the storages of these tensors."""
        storages = cls()
        for tensor in tensors:
            storages.add(tensor)
        return storages

    @property
    def num_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(self._bytes.values())

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        if _key(tensor) not in self._but:
            self._bytes[_key(tensor)] = tensor.untyped_storage().nbytes()


class MicrobatchMemory:
    """The most bytes that one microbatch was measured to hold, from its forward pass on.

    Attributes:
        most: Measured bytes; 0 before the first microbatch.
    """

    def __init__(self) -> None:
        self.most = 0
        self._num_tokens = 0

    def estimate(self, num_tokens: int) -> int:
        """Return the bytes for a microbatch of `num_tokens`; never less than measured."""
        if num_tokens <= self._num_tokens:
            return self.most
        return math.ceil(self.most * num_tokens / max(1, self._num_tokens))

    @contextmanager
    def measuring(self, x: Tensor, but: nn.Module) -> Iterator[Storages]:
        """Measure what a forward pass in the context saves, if no larger microbatch was measured.

        Args:
            x: Input [B, T] or [B, T, C], which counts too.
            but: Module whose weights do not count.

        Yields:
            Storages to which the caller adds what else it holds.
        """
        if x.shape[:2].numel() <= self._num_tokens:
            yield Storages()
            return
        held = Storages(but=(*but.parameters(), *but.buffers()))
        held.add(x)

        saved: list[ref[Tensor]] = []

        def save(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            saved.append(ref(detached))
            return detached

        with saved_tensors_hooks(save, lambda tensor: tensor):
            yield held
        # Tensors that were saved for nothing, as DoRA does, are freed by now.
        for tensor in (weak() for weak in saved):
            if tensor is not None:
                held.add(tensor)
        self._num_tokens = x.shape[:2].numel()
        self.record(held)

    def record(self, held: Storages) -> None:
        """Add a measurement."""
        self.most = max(self.most, held.num_bytes)


def _key(tensor: Tensor) -> int:
    # The key is not the address, which tensors of a rehearsal do not have.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


# ---- all live tensors


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that operations in the context return, until they are freed.

    Memory that a kernel allocates and does not return is not seen. Tensors without memory do not
    count.

    Attributes:
        now: Bytes of live tensors.
        most: Most bytes at one time since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, ref[UntypedStorage]] = {}

    def begin(self) -> None:
        """Start a new measurement of `most`."""
        self.most = self.now

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Count the results of an operation; torch calls this."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._count_storage(tensor)
        return result

    def _count_storage(self, tensor: Tensor) -> None:
        key, storage = _key(tensor), tensor.untyped_storage()
        grown = storage.nbytes() - self._sizes.get(key, 0)
        if key not in self._alive:
            self._alive[key] = ref(storage, partial(self._on_freed, key))
        self._sizes[key] = storage.nbytes()
        self.now += grown
        self.most = max(self.most, self.now)

    def _on_freed(self, key: int, _storage: object) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]
