"""The speed of codecs on this machine, relative to a copy of the same tensor.

`bench` has the options and the output.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.codec.base import Codec
from swarm_ft.codec.basis import learn_basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.kernels.base import Kernels
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.codec.spec import CodecSpec

DEFAULT_CODECS = (
    "none,fp16,bf16,q2,q4,q8,aq2,aq3,aq4,aq4c,top10,aqtop10,"
    "q2+z,q4+z,aq2+z,aq4+z,aqc0.5,aqk0.5,fp16+z"
)
_GIGA = 1e9
_CHANNELS_A_DIRECTION = 16
"""Channels per learned direction, about as for changes of activations."""


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """The speed of one codec on one backend at one shape.

    Attributes:
        encode_gb_s, decode_gb_s: Gigabytes of float32 tensor per second, the median of repeats.
        encode_ratio, decode_ratio: Speed relative to a copy of the same tensor.
        bits_a_value: Bits per value of the encoded tensor, with its header.
        error: Norm of the decoding error, relative to the tensor or, for deltas, to the change.
    """

    codec: str
    backend: str
    tokens: int
    channels: int
    encode_gb_s: float
    decode_gb_s: float
    encode_ratio: float
    decode_ratio: float
    bits_a_value: float
    error: float


def measure(
    specs: Sequence[CodecSpec],
    shapes: Sequence[tuple[int, int]],
    *,
    devices: Sequence[torch.device],
    repeats: int,
    reference: bool = False,
) -> Iterator[SpeedRow]:
    """Measure all codecs at all shapes on one thread.

    Args:
        specs: Codecs.
        shapes: Shapes of the tensors, (tokens, channels).
        devices: Devices of the tensors.
        repeats: Measurements of each row.
        reference: Whether to measure the reference kernels in plain torch too.
    """
    torch.set_num_threads(1)
    for device in devices:
        for tokens, channels in shapes:
            x, base = _sample(tokens, channels, device)
            for spec in specs:
                for kernels in _backends(device, reference):
                    yield _row(from_spec(spec, kernels), kernels, x, base, repeats)


def devices_here() -> list[torch.device]:
    """Return the CPU, and the GPU if this machine has one."""
    return [torch.device(name) for name in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]


def cuda_name() -> str | None:
    """Return the name of the GPU; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _backends(device: torch.device, reference: bool) -> list[Kernels]:
    fast = kernels_for(device.type)
    return [fast, ReferenceKernels()] if reference else [fast]


def _sample(tokens: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw a tensor whose channels spread over three octaves, and another one a tenth away."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.exp2(torch.randn(channels, generator=generator))
    x = torch.randn(tokens, channels, generator=generator) * widths
    base = x + 0.1 * widths * torch.randn(tokens, channels, generator=generator)
    return x.to(device), base.to(device)


def _with_basis(codec: DirectionalCodec, x: Tensor, base: Tensor) -> tuple[Codec, Tensor, Tensor]:
    """Return the codec with a basis, and tensors that vary along few directions."""
    generator = torch.Generator().manual_seed(1)
    tokens, channels = x.shape
    count = max(1, channels // _CHANNELS_A_DIRECTION)
    spreads = x.norm() / tokens**0.5 * torch.logspace(0, -1.5, count).to(x.device)
    directions = torch.linalg.qr(torch.randn(channels, count, generator=generator))[0]
    drawn = torch.randn(tokens, count, generator=generator).to(x.device) * spreads
    rows = drawn @ directions.T.to(x.device)
    sent = base + rows if codec.spec.is_delta else rows
    return codec.with_side_info(learn_basis([rows.cpu()], codec.step_of(sent))), sent, base


def _row(codec: Codec, kernels: Kernels, x: Tensor, base: Tensor, repeats: int) -> SpeedRow:
    if isinstance(codec, DirectionalCodec):
        codec, x, base = _with_basis(codec, x, base)
    against = base if codec.spec.is_delta else None
    encoded = codec.encode(x, against)  # The first call compiles kernels.
    decoded = codec.decode(encoded, against, device=x.device)
    copy = torch.empty_like(x)
    encode_s, decode_s, copy_s = _median_seconds(
        repeats,
        x.device,
        lambda: codec.encode(x, against),
        lambda: codec.decode(encoded, against, device=x.device),
        lambda: copy.copy_(x),
    )
    tensor_bytes = x.numel() * x.element_size()
    return SpeedRow(
        codec=str(codec.spec),
        backend=type(kernels).__name__.removesuffix("Kernels").lower(),
        tokens=x.shape[0],
        channels=x.shape[1],
        encode_gb_s=tensor_bytes / encode_s / _GIGA,
        decode_gb_s=tensor_bytes / decode_s / _GIGA,
        encode_ratio=copy_s / encode_s,
        decode_ratio=copy_s / decode_s,
        bits_a_value=8 * len(encoded.to_bytes()) / x.numel(),
        error=_error(decoded, x, against),
    )


def _median_seconds(
    repeats: int, device: torch.device, *works: Callable[[], object]
) -> list[float]:
    """Measure each work; every repeat runs all of them in turn, so that noise hits all alike."""
    taken: list[list[float]] = [[] for _ in works]

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(repeats):
        for work, seconds in zip(works, taken, strict=True):
            wait()
            start = time.perf_counter()
            work()
            wait()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]


def _error(decoded: Tensor, x: Tensor, base: Tensor | None) -> float:
    target = x if base is None else x - base
    return float((decoded - x).norm() / target.norm())
