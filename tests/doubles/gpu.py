"""A double of a GPU: it computes on the CPU, and counts the operations of a real one.

    gpu = CountedGpu()
    with gpu.present():
        encoded = codec.encode(gpu.tensor(x), None)     # codec's kernels are gpu.kernels()
    gpu.operations, gpu.waits

Its tensors claim to be on `cuda:0`. As on a real one, what mixes them with the CPU's is an
error, and looking at a number waits. So does a copy that is not from or to pinned memory, or not
marked `non_blocking`. What its kernels cost is what Triton's have: see `_KERNELS`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import Coded, Coding, Kernels, Scales, WideGrid

_KERNELS = {
    "pack": (2, 0),
    "quantize": (2, 0),
    "quantize_symbols": (4, 0),
    "trellis_symbols": (5, 0),
    "turn": (2, 0),
    "slice_contexts": (2, 0),
    "quantize_pack": (2, 0),
    "moments": (9, 0),
    "grid_errors": (3, 0),
    "histogram": (2, 0),
    "encode_symbols": (14, 1),
    "dequantize": (2, 0),
    "unpack_dequantize": (2, 0),
}
"""Operations, and waits, of the senders' kernels in `kernels.cuda`: a launch, and what torch does
beside it. What is not here is what `Kernels` makes of torch's operations."""

_LOOKS = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2"}
"""What cannot go on before the device has answered."""


_DEVICE = torch.device("cuda:0")


class _OnGpu(Tensor):
    """A tensor that claims to be on a GPU, and is not; torch, which may lack one, holds it as one
    without values.
    """

    tensor: Tensor
    device = _DEVICE
    is_cuda = True

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func}: while the GPU was not present")


def _on_gpu(tensor: Tensor) -> _OnGpu:
    make: Any = Tensor._make_wrapper_subclass  # noqa: SLF001 - there is no public way
    made: _OnGpu = make(
        _OnGpu, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device="meta"
    )
    made.tensor = tensor
    return made


class CountedGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module's docstring.

    Attributes:
        operations: the number of each, of tensors on the GPU; views count.
        waits: for the GPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[str] = Counter()
        self.waits = 0

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Pretend that the GPU is present, and count, until the context ends."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "_lazy_init", lambda: None)
            patch.setattr(torch.cuda, "current_stream", lambda device: self)
            with self:
                yield

    def synchronize(self) -> None:
        """Count a wait for the stream."""
        self.waits += 1

    def tensor(self, x: Tensor) -> Tensor:
        """X on it."""
        return _on_gpu(x.clone())

    def kernels(self) -> Kernels:
        """Return the kernels of this GPU."""
        return _GpuKernels(self)  # type: ignore[abstract]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
        tensors += [x for part in args if isinstance(part, (list, tuple)) for x in part if _is(x)]
        to_gpu = torch.device(named.get("device") or "cpu").type in ("cuda", "meta")
        if name in ("is_pinned", "_pin_memory"):
            return name == "_pin_memory" and _pinned(tensors[0].clone())
        is_pinned = named.pop("pin_memory", None)
        if not to_gpu and not any(isinstance(x, _OnGpu) for x in tensors):
            made = func(*args, **named)
            return _pinned(made) if is_pinned else made
        self.operations[name] += 1
        if to_gpu:
            named["device"] = "cpu"
        if name in ("_to_copy", "copy_"):
            return self._copied(func, args, named, to_gpu=to_gpu)
        _check_not_mixed(name, tensors)
        masks = args[1] if name in ("index", "index_put_") else ()
        self.waits += name in _LOOKS or any(m is not None and m.dtype == torch.bool for m in masks)
        made = func(*_unwrapped(args), **_unwrapped(named))
        is_in_place = name.endswith("_") and not name.endswith("__")
        return args[0] if is_in_place else _wrapped(made)

    def _copied(
        self, func: Any, args: Sequence[Any], named: dict[str, Any], *, to_gpu: bool
    ) -> Tensor:
        """Copy to another device, or to another dtype."""
        is_new = func.overloadpacket.__name__ == "_to_copy"
        ends = [isinstance(x, _OnGpu) for x in (args[:1] if is_new else args[:2])]
        if is_new:
            ends.insert(0, to_gpu or (ends[0] and named.get("device") is None))
        free = named.get("non_blocking", args[2] if not is_new and len(args) > 2 else False)
        at_host = [x for x in args[:2] if isinstance(x, Tensor) and not isinstance(x, _OnGpu)]
        if ends[0] != ends[1] and not (free and all(_is_pinned(x) for x in at_host) and at_host):
            self.waits += 1
        made = func(*_unwrapped(args), **named)
        if not is_new:
            return cast(Tensor, args[0])
        if made is args[0] or (ends[1] and made is args[0].tensor):
            made = made.clone()
        return _on_gpu(made) if ends[0] else cast(Tensor, made)


def _is(x: Any) -> bool:
    return isinstance(x, Tensor)


def _pinned(x: Tensor) -> Tensor:
    x.is_in_pinned_memory = True  # type: ignore[attr-defined]
    return x


def _is_pinned(x: Tensor) -> bool:
    return getattr(x, "is_in_pinned_memory", False)


def _check_not_mixed(name: str, tensors: Sequence[Tensor]) -> None:
    if any(x.dim() and not isinstance(x, _OnGpu) for x in tensors):
        raise AssertionError(f"{name}: of tensors on the GPU and on the CPU")


def _unwrapped(x: Any) -> Any:
    return tree_map(lambda part: part.tensor if isinstance(part, _OnGpu) else part, x)


def _wrapped(x: Any) -> Any:
    return tree_map(lambda part: _on_gpu(part) if isinstance(part, Tensor) else part, x)


class _GpuKernels(Kernels):
    """The CPU's kernels, for tensors on the GPU."""

    def __init__(self, gpu: CountedGpu) -> None:
        self._gpu = gpu

    def __getattribute__(self, name: str) -> Any:
        if name not in _KERNELS:
            return super().__getattribute__(name)
        gpu: CountedGpu = super().__getattribute__("_gpu")

        def call(*args: Any) -> Any:
            operations, waits = _KERNELS[name]
            gpu.operations[name] += operations
            gpu.waits += waits
            with _disable_current_modes():
                return _moved(getattr(kernels_for("cpu"), name)(*_moved(args, _inner)), _on_gpu)

        return call


def _inner(x: Tensor) -> Tensor:
    assert isinstance(x, _OnGpu), "a kernel was given a tensor on the CPU"
    return x.tensor


def _moved(x: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, Tensor):
        return move(x)
    if isinstance(x, tuple):
        return tuple(_moved(part, move) for part in x)
    if isinstance(x, Scales):
        return Scales(move(x.rows), move(x.cols))
    if isinstance(x, Coding):
        return Coding(move(x.row_classes), move(x.col_classes), x.slices, x.low_bits)
    if isinstance(x, WideGrid):
        return WideGrid(x.shrink, x.seed, _moved(x.shifts, move))
    if isinstance(x, Coded):
        return Coded(move(x.states), move(x.counts), move(x.words))
    return x
