"""Bytes that tensors hold: those of a microbatch, and of all that are alive. Knows no engine."""

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

# ---- what some tensors lie in


class Storages:
    """Memory that tensors lie in, each piece counted once, however many are views of it.

    Args:
        but: tensors whose memory does not count.
    """

    def __init__(self, but: Iterable[Tensor] = ()) -> None:
        self._but = {_key(tensor) for tensor in but}
        self._bytes: dict[int, int] = {}

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

    def of(self, num_tokens: int) -> int:
        """What one of so many tokens would hold, were it the largest; never less than was seen."""
        if num_tokens <= self._num_tokens:
            return self.most
        return math.ceil(self.most * num_tokens / max(1, self._num_tokens))

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

        saved: list[ref[Tensor]] = []

        def save(tensor: Tensor) -> Tensor:
            kept = tensor.detach()
            saved.append(ref(kept))
            return kept

        with saved_tensors_hooks(save, lambda tensor: tensor):
            yield held
        # What was saved for nothing, as DoRA does, is gone by now.
        for tensor in (weak() for weak in saved):
            if tensor is not None:
                held.add(tensor)
        self._num_tokens = x.shape[:2].numel()
        self.saw(held)

    def saw(self, held: Storages) -> None:
        """A microbatch holds this."""
        self.most = max(self.most, held.num_bytes)


def _key(tensor: Tensor) -> int:
    # Not the address: in a rehearsal there is none.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


# ---- all that is alive


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of all tensors that operations inside give, until it is let go of.

    What a kernel allocates for itself, and gives to nobody, it does not see. Tensors without
    memory do not count.

    Attributes:
        now: bytes that are there.
        most: that were there at once, since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, ref[UntypedStorage]] = {}

    def begin(self) -> None:
        """Forget what was there before now."""
        self.most = self.now

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Torch's own: an operation is called."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        key, storage = _key(tensor), tensor.untyped_storage()
        grown = storage.nbytes() - self._sizes.get(key, 0)
        if key not in self._alive:
            self._alive[key] = ref(storage, partial(self._gone, key))
        self._sizes[key] = storage.nbytes()
        self.now += grown
        self.most = max(self.most, self.now)

    def _gone(self, key: int, _storage: object) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]
