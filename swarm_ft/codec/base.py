"""What every codec is and checks. Knows shapes, sizes and finiteness; knows no arithmetic."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.kernels import kernels_for
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import CodecSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Payload:
    """What a codec made of a tensor.

    Attributes:
        data: the bytes.
        value: gives what the codec reads from them, to the bit, on the tensor's device: of what the
            encoder has at hand, where that is less work.
    """

    data: bytes
    value: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """Writes one sample's tensor as bytes and reads it back. Stateless.

    The payload is the authority: an encoder may round as it likes, `decode` is exact to the bit
    on every machine, so both ends of a boundary call it and hold the same values. What comes is
    checked here; what a codec is, it says in `_write`, `_read` and `max_payload_bytes`.

    Attributes:
        spec: name and bits; every tensor it encodes carries them.
    """

    spec: CodecSpec
    has_one_size: ClassVar[bool] = False
    """Whether all payloads of a shape have the size that `max_payload_bytes` says."""

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """Encode one sample, apart from all others.

        Args:
            x: float32 [tokens, channels], on any device.
            base: the sample's buffer, of x's shape, for a delta codec; None for the others. It
                may be on another device than x.

        Raises:
            BadFrame: x or base is of another shape or type, or base is missing or superfluous.
            NonFinite: x, or its distance from base, holds an infinity or NaN.
        """
        return self._tensor(x, self.write(x, base).data)

    def encode_and_decode(
        self, x: Tensor, base: Tensor | None = None
    ) -> tuple[EncodedTensor, Tensor]:
        """What `encode` makes, and what `decode` makes of that, for less than both.

        Args:
            x, base: as `encode` takes them.

        Returns:
            The message, and its value to the bit: float32 [tokens, channels], on x's device.

        Raises:
            BadFrame, NonFinite: as `encode`.
        """
        payload = self.write(x, base)
        with _plainly(x.device):
            return self._tensor(x, payload.data), payload.value()

    def write(self, x: Tensor, base: Tensor | None = None) -> Payload:
        """What `encode` makes, for a codec around this one.

        Args:
            x, base: as `encode` takes them.

        Raises:
            BadFrame, NonFinite: as `encode`.
        """
        x = checked_sample(x)
        base = _checked_base(self.spec, base, *x.shape)
        with _plainly(x.device):
            return self._write(x, None if base is None else base.to(x.device))

    def decode(
        self,
        encoded: EncodedTensor,
        base: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """Read what `encode` wrote; finite whatever the bytes.

        Args:
            encoded: may come from a stranger; it is checked in full.
            base: the buffer that it was encoded against, for a delta codec; None for the others.
            device: where to; None: where the base is, or the CPU.

        Returns:
            float32 [tokens, channels], on the device.

        Raises:
            BadFrame: another codec's tensor, a payload that this codec does not write, or a
                base that is missing, superfluous or of another shape.
        """
        self._check_header(encoded)
        base = _checked_base(self.spec, base, encoded.tokens, encoded.channels)
        if device is None:
            device = CPU if base is None else base.device
        with _plainly(device):
            return self._read(encoded, None if base is None else base.to(device), device)

    def kept(self, encoded: EncodedTensor, value: Tensor, base: Tensor | None = None) -> Tensor:
        """What both ends keep of a sample as the base of its next frame: of most codecs the value.

        Args:
            encoded: as `encode` made it.
            value: what `decode` made of that.
            base: what it was encoded against; None for codecs that build on nothing.

        Returns:
            Finite float32 [tokens, channels] on the value's device, the same to the bit everywhere.
        """
        return value

    @abstractmethod
    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """No payload of that shape is larger, whatever its values."""

    @abstractmethod
    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        """The payload of x; base is on x's device, and None just where the codec takes none."""

    @abstractmethod
    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        """See `decode`; codec, shape and size are right, what the payload holds is not checked.

        The base is on the device.
        """

    def _unread(self, data: bytes, x: Tensor) -> Payload:
        """A payload of x whose value is to be read from its bytes; of a codec without a base."""
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


def _plainly(device: torch.device) -> AbstractContextManager[object]:
    """Nothing inside is computed in another type because a model around it is."""
    is_narrow = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_narrow else nullcontext()


def checked_sample(x: Tensor, name: str = "x") -> Tensor:
    """`x` without its graph, if it is float32 [tokens, channels] with at least one value.

    Raises:
        BadFrame: it is not.
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
    """`base`, if the codec builds on one and it is of that shape; None if it builds on nothing.

    Raises:
        BadFrame: it is missing, superfluous, or of another shape or type.
    """
    if not spec.is_delta:
        if base is not None:
            raise BadFrame(
                f"codec {spec} builds on no base, got one; only aq, ef21 and last codecs do"
            )
        return None
    if base is None:
        raise BadFrame(f"codec {spec} needs the sample's buffer as base; send a key frame")
    base = checked_sample(base, "base")
    if base.shape != (tokens, channels):
        raise BadFrame(f"base: expected [{tokens}, {channels}], got {list(base.shape)}")
    return base


def check_finite(x: Tensor) -> Tensor:
    """`x`, what a decoder made of a payload, if all of it is finite.

    Raises:
        BadFrame: it is not.
    """
    # A finite sum has finite terms; a sum that overflows by itself is looked at again.
    if not math.isfinite(x.sum().item()) and not math.isfinite(peak := peak_of(x)):
        raise BadFrame(f"frame: expected finite values, its codes and scales make {peak}")
    return x


def peak_of(x: Tensor) -> float:
    """The largest magnitude in `x`; infinite or NaN if it holds such a value."""
    return peak_there(x).item()


def peak_there(x: Tensor) -> Tensor:
    """`peak_of`, where x lies: a GPU is not waited for."""
    low, high = torch.aminmax(x)  # one pass, no copy, and NaN goes through
    return torch.maximum(-low, high)


def checked_peak(peak: float) -> float:
    """`peak`, the largest magnitude of what is to be encoded, if it is finite.

    Raises:
        NonFinite: it is not.
    """
    if not math.isfinite(peak):
        raise NonFinite(f"tensor to encode: expected finite values, found {peak}")
    return peak


def as_tensor(data: bytes, device: torch.device = CPU, dtype: str = "u1") -> Tensor:
    """Bytes as little-endian numbers [n] on a device, in memory of its own."""
    numbers = np.frombuffer(data, f"<{dtype}")
    return to_device(torch.from_numpy(numbers.astype(dtype)), device)  # which copies


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU's there; to a GPU through pinned memory, and not waited for."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """The tensors as arrays on the CPU; from a GPU through pinned memory, waited for once."""
    if not tensors[0].is_cuda:
        return [tensor.cpu().numpy() for tensor in tensors]
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.numpy() for copy in copies]


_FLOAT, _PATTERN = struct.Struct("<f"), struct.Struct("<I")


def bfloat16_pattern(x: float) -> int:
    """The 16 bits of the bfloat16 nearest to a float32, or the even one of two; x is finite."""
    (bits,) = _PATTERN.unpack(_FLOAT.pack(x))
    return int(bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def of_bfloat16(pattern: int) -> float:
    """The number of 16 bits, any of them, NaN too."""
    (x,) = _FLOAT.unpack(_PATTERN.pack(pattern << 16))
    return float(x)


def nearest_bfloat16(x: float) -> float:
    """The bfloat16 nearest to a float32; x is finite."""
    return of_bfloat16(bfloat16_pattern(x))


def bfloat16_bytes(x: Tensor) -> bytes:
    """`x` as bfloat16, little-endian, in C order."""
    return little_endian(x.to(torch.bfloat16).view(torch.int16), "<i2")


def read_bfloat16(payload: bytes, device: torch.device = CPU) -> Tensor:
    """What `bfloat16_bytes` wrote, as float32 [n] on a device; any pattern, NaN too."""
    return as_tensor(payload, device, "i2").view(torch.bfloat16).float()


def packed_numbers(numbers: NDArray[np.uint8], bits: int) -> bytes:
    """Numbers of the host below 2^bits as `Kernels.pack` lays them out."""
    return kernels_for("cpu").pack(torch.from_numpy(numbers), bits).numpy().tobytes()


def unpacked_numbers(data: bytes, count: int, bits: int) -> NDArray[np.uint8]:
    """What `packed_numbers` was given: uint8 [count]."""
    return kernels_for("cpu").unpack(as_tensor(data), count, bits).numpy()


def little_endian(x: Tensor, dtype: str) -> bytes:
    """`x` as numbers of numpy's `dtype`, in C order."""
    (numbers,) = to_host(x)
    return numbers.astype(dtype, copy=False).tobytes()
