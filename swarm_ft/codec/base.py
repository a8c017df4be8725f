"""Base class of codecs, and checks that all codecs share: shapes, sizes, finiteness."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.kernels import kernels_for
from swarm_ft.codec.side_info import Learning, Observation, SideInfo, observed
from swarm_ft.codec.spec import CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, NonFinite

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Payload:
    """Encoded bytes of a tensor, with their decoded value.

    Attributes:
        data: The bytes.
        value: Function that returns the decoded value, bit-exact and on the tensor's device. It may
            reuse the encoder's intermediate results.
    """

    data: bytes
    value: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """A stateless encoder and decoder of one sample's tensor.

    The payload is authoritative. An encoder may round freely, but `decode` gives the same bits on
    every machine, so both ends of a boundary decode and hold the same values. This class checks all
    input; subclasses implement `_write`, `_read` and `max_payload_bytes`.

    Attributes:
        spec: Name and parameters; every encoded tensor carries them.
    """

    spec: CodecSpec
    has_one_size: ClassVar[bool] = False
    """Whether all payloads of a shape have exactly `max_payload_bytes` bytes."""

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """Encode one sample independently of all others.

        Args:
            x: float32 [tokens, channels], on any device.
            base: Buffer of the sample with the shape of x, for delta codecs; None for others. It
                may be
                on another device than x.

        Raises:
            BadFrame: x or base has a wrong shape or type, or base is missing or superfluous.
            NonFinite: x, or its difference from base, has an infinity or NaN.
        """
        return self._tensor(x, self.write(x, base).data)

    def encode_and_decode(
        self, x: Tensor, base: Tensor | None = None
    ) -> tuple[EncodedTensor, Tensor]:
        """Encode a sample and decode the result, at less cost than two calls.

        Args:
            x, base: See `encode`.

        Returns:
            The encoded tensor, and its decoded value, float32 [tokens, channels], on x's device.

        Raises:
            BadFrame, NonFinite: See `encode`.
        """
        payload = self.write(x, base)
        with _without_autocast(x.device):
            return self._tensor(x, payload.data), payload.value()

    def write(self, x: Tensor, base: Tensor | None = None) -> Payload:
        """Return the payload of a sample, for a codec that wraps this one.

        Args:
            x, base: See `encode`.

        Raises:
            BadFrame, NonFinite: See `encode`.
        """
        x = checked_sample(x)
        base = _checked_base(self.spec, base, *x.shape)
        with _without_autocast(x.device):
            return self._write(x, None if base is None else base.to(x.device))

    def decode(
        self,
        encoded: EncodedTensor,
        base: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """Decode a tensor; the result is finite for any bytes.

        Args:
            encoded: Encoded tensor, possibly hostile; it is checked in full.
            base: Buffer that it was encoded against, for delta codecs; None for others.
            device: Target device; None for that of the base, or the CPU.

        Returns:
            float32 [tokens, channels] on the device.

        Raises:
            BadFrame: The tensor has another codec, its payload is invalid, or the base is missing,
                superfluous or of another shape.
        """
        self._check_header(encoded)
        base = _checked_base(self.spec, base, encoded.tokens, encoded.channels)
        if device is None:
            device = CPU if base is None else base.device
        with _without_autocast(device):
            return self._read(encoded, None if base is None else base.to(device), device)

    def next_base(
        self, encoded: EncodedTensor, value: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return the value that both ends store as the base of the sample's next frame.

        Most codecs store the decoded value itself.

        Args:
            encoded: Result of `encode`.
            value: Result of `decode` for it.
            base: Base that it was encoded against; None for direct codecs.

        Returns:
            Finite float32 [tokens, channels] on the value's device, the same bits on every machine.
        """
        return value

    @property
    def learning(self) -> Learning | None:
        """Rule by which the codec learns side information; None if it needs none."""
        return None

    def with_side_info(self, info: SideInfo | None) -> Codec:
        """Return the codec with side information; with None it encodes without any."""
        return self

    def observe(self, x: Tensor, base: Tensor | None = None) -> Observation:
        """Return what `learn` needs of a sample.

        Args:
            x, base: See `encode`.
        """
        return observed(x, base)

    def learn(self, seen: Sequence[Observation]) -> SideInfo | None:
        """Return side information for tensors like these; None if it would not help."""
        return None

    @abstractmethod
    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of the payload's size for any values of this shape."""

    @abstractmethod
    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        """Encode x; base is on x's device, and None exactly for direct codecs."""

    @abstractmethod
    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        """Decode a tensor whose codec, shape and size are checked, but not the payload's content.

        The base is on the device.
        """

    def _unread(self, data: bytes, x: Tensor) -> Payload:
        """Return a payload whose value is decoded from its bytes; for codecs without a base."""
        return Payload(data, lambda: self._read(self._tensor(x, data), None, x.device))

    def _tensor(self, x: Tensor, data: bytes) -> EncodedTensor:
        return EncodedTensor(self.spec, len(x), x.shape[1], data)

    def _check_header(self, encoded: EncodedTensor) -> None:
        if encoded.codec != self.spec:
            raise BadFrame(f"frame: expected codec {self.spec}, got {encoded.codec}")
        shape = f"[{encoded.tokens}, {encoded.channels}]"
        if encoded.tokens < 1 or encoded.channels < 1:
            raise BadFrame(f"frame: expected a positive number of tokens and channels, got {shape}")
        size = len(encoded.payload)
        largest = self.max_payload_bytes(encoded.tokens, encoded.channels)
        if size > largest or (self.has_one_size and size < largest):
            bound = "" if self.has_one_size else "at most "
            raise BadFrame(
                f"frame: {self.spec} of {shape} takes {bound}{largest} bytes, got {size}"
            )


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast inside the context; a surrounding model must not change the arithmetic."""
    is_narrow = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_narrow else nullcontext()


def checked_sample(x: Tensor, name: str = "x") -> Tensor:
    """Return `x` detached if it is non-empty float32 [tokens, channels].

    Raises:
        BadFrame: It is not.
    """
    if x.dtype != torch.float32 or x.dim() != 2 or x.numel() == 0:
        raise BadFrame(
            f"{name}: expected float32 [tokens, channels] of one sample, "
            f"got {x.dtype} {list(x.shape)}; encode samples one at a time"
        )
    return x.detach()


def _checked_base(
    spec: CodecSpec, base: Tensor | None, tokens: int, channels: int
) -> Tensor | None:
    """Return the base of a delta codec if its shape fits; None for a direct codec.

    Raises:
        BadFrame: The base is missing, superfluous, or of another shape or type.
    """
    if not spec.is_delta:
        if base is not None:
            raise BadFrame(
                f"codec {spec} takes no base, got one; only aq, ef21 and last codecs take one"
            )
        return None
    if base is None:
        raise BadFrame(f"codec {spec} needs the sample's buffer as base; send a key frame")
    base = checked_sample(base, "base")
    if base.shape != (tokens, channels):
        raise BadFrame(f"base: expected [{tokens}, {channels}], got {list(base.shape)}")
    return base


def check_finite(x: Tensor) -> Tensor:
    """Return a decoded tensor if all its values are finite.

    Raises:
        BadFrame: A value is not.
    """
    # A finite sum has finite terms. A sum of finite terms may overflow; then the peak decides.
    if not math.isfinite(x.sum().item()) and not math.isfinite(peak := peak_of(x)):
        raise BadFrame(f"frame: expected finite values, its codes and scales make {peak}")
    return x


def peak_of(x: Tensor) -> float:
    """Return the largest magnitude in `x`; infinite or NaN if a value is."""
    return peak_tensor(x).item()


def peak_tensor(x: Tensor) -> Tensor:
    """Return the largest magnitude as a tensor on x's device, without synchronising with a GPU."""
    low, high = torch.aminmax(x)  # one pass, no copy, and NaN goes through
    return torch.maximum(-low, high)


def checked_peak(peak: float) -> float:
    """Return the largest magnitude of a tensor to encode if it is finite.

    Raises:
        NonFinite: It is not.
    """
    if not math.isfinite(peak):
        raise NonFinite(f"tensor to encode: expected finite values, found {peak}")
    return peak


def as_tensor(data: bytes, device: torch.device = CPU, dtype: str = "u1") -> Tensor:
    """Return bytes as little-endian numbers [n] on a device, in their own memory."""
    numbers = np.frombuffer(data, f"<{dtype}")
    return to_device(torch.from_numpy(numbers.astype(dtype)), device)  # which copies


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a CPU tensor to a device; to a GPU through pinned memory, without synchronising."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """Return tensors as CPU arrays; from a GPU through pinned memory, with one synchronisation."""
    if not tensors[0].is_cuda:
        return [tensor.cpu().numpy() for tensor in tensors]
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.numpy() for copy in copies]


_FLOAT, _PATTERN = struct.Struct("<f"), struct.Struct("<I")


def bfloat16_pattern(x: float) -> int:
    """Return the 16 bits of the bfloat16 nearest to a finite float32, ties to even."""
    (bits,) = _PATTERN.unpack(_FLOAT.pack(x))
    return int(bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def bfloat16_value(pattern: int) -> float:
    """Return the number of a bfloat16 pattern; any pattern is valid, NaN included."""
    (x,) = _FLOAT.unpack(_PATTERN.pack(pattern << 16))
    return float(x)


def nearest_bfloat16(x: float) -> float:
    """Return the bfloat16 nearest to a finite float32."""
    return bfloat16_value(bfloat16_pattern(x))


def bfloat16_bytes(x: Tensor) -> bytes:
    """Return `x` as little-endian bfloat16 in C order."""
    return little_endian(x.to(torch.bfloat16).view(torch.int16), "<i2")


def read_bfloat16(payload: bytes, device: torch.device = CPU) -> Tensor:
    """Return the numbers of `bfloat16_bytes` as float32 [n] on a device; NaN patterns are valid."""
    return as_tensor(payload, device, "i2").view(torch.bfloat16).float()


def packed_numbers(numbers: NDArray[np.uint8], bits: int) -> bytes:
    """Pack CPU numbers below 2^bits in the layout of `Kernels.pack`."""
    return kernels_for("cpu").pack(torch.from_numpy(numbers), bits).numpy().tobytes()


def unpacked_numbers(data: bytes, count: int, bits: int) -> NDArray[np.uint8]:
    """Unpack the numbers of `packed_numbers`, uint8 [count]."""
    return kernels_for("cpu").unpack(as_tensor(data), count, bits).numpy()


def little_endian(x: Tensor, dtype: str) -> bytes:
    """Return `x` as little-endian numbers of numpy's `dtype`, in C order."""
    (numbers,) = to_host(x)
    return numbers.astype(dtype, copy=False).tobytes()
