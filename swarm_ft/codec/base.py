"""What every codec is and checks. Knows shapes, sizes and finiteness; knows no arithmetic."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import CodecSpec


class Codec(Protocol):
    """Writes one sample's tensor as bytes and reads it back. Stateless.

    The payload is the authority: an encoder may round as it likes, `decode` is exact to the bit
    on every machine, so both ends of a boundary call it and hold the same values.
    """

    @property
    def spec(self) -> CodecSpec:
        """Name and bits; every tensor it encodes carries them."""
        ...

    def encode(self, x: Tensor, base: Tensor | None = None) -> EncodedTensor:
        """Encode one sample, apart from all others.

        Args:
            x: float32 [tokens, channels], on any device.
            base: the sample's buffer, of x's shape, for a delta codec; None for the others.

        Raises:
            BadFrame: x or base is of another shape or type, or base is missing or superfluous.
            NonFinite: x, or its distance from base, holds an infinity or NaN.
        """
        ...

    def decode(self, encoded: EncodedTensor, base: Tensor | None = None) -> Tensor:
        """Read what `encode` wrote; finite whatever the bytes.

        Args:
            encoded: may come from a stranger; it is checked in full.
            base: the buffer that it was encoded against, for a delta codec; None for the others.

        Returns:
            float32 [tokens, channels], on base's device or the CPU.

        Raises:
            BadFrame: another codec's tensor, a payload that this codec does not write, or a
                base that is missing, superfluous or of another shape.
        """
        ...

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """No payload of that shape is larger, whatever its values."""
        ...


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


def check_encoded(codec: Codec, encoded: EncodedTensor) -> None:
    """Refuse a tensor whose header does not fit this codec or its payload.

    Raises:
        BadFrame: another codec, a shape that is not positive, or a payload that is too large.
    """
    if encoded.codec != codec.spec:
        raise BadFrame(f"frame: expected codec {codec.spec}, got {encoded.codec}")
    shape = f"[{encoded.tokens}, {encoded.channels}]"
    if encoded.tokens < 1 or encoded.channels < 1:
        raise BadFrame(f"frame: expected a positive number of tokens and channels, got {shape}")
    largest = codec.max_payload_bytes(encoded.tokens, encoded.channels)
    if len(encoded.payload) > largest:
        raise BadFrame(
            f"frame: {codec.spec} of {shape} takes at most {largest} bytes, "
            f"got {len(encoded.payload)}"
        )


def check_size(encoded: EncodedTensor, expected: int) -> None:
    """Refuse a payload that is not of the one size that its header implies.

    Raises:
        BadFrame: another size.
    """
    if len(encoded.payload) != expected:
        shape = f"[{encoded.tokens}, {encoded.channels}]"
        raise BadFrame(
            f"frame: {encoded.codec} of {shape} takes {expected} bytes, got {len(encoded.payload)}"
        )


def refuse_base(spec: CodecSpec, base: Tensor | None) -> None:
    """Refuse a base where none belongs.

    Raises:
        BadFrame: there is one.
    """
    if base is not None:
        raise BadFrame(
            f"codec {spec} builds on no base, got one; only aq and ef21 codecs take a base"
        )


def checked_base(spec: CodecSpec, base: Tensor | None, tokens: int, channels: int) -> Tensor | None:
    """`base`, if the codec builds on one and it is of that shape; None if it builds on nothing.

    Raises:
        BadFrame: it is missing, superfluous, or of another shape or type.
    """
    if not spec.is_delta:
        refuse_base(spec, base)
        return None
    return needed_base(spec, base, tokens, channels)


def needed_base(spec: CodecSpec, base: Tensor | None, tokens: int, channels: int) -> Tensor:
    """`base`, if it is there and of that shape.

    Raises:
        BadFrame: it is missing, or of another shape or type.
    """
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
    low, high = torch.aminmax(x)  # one pass, no copy, and NaN goes through
    return torch.maximum(-low, high).item()


def checked_peak(peak: float) -> float:
    """`peak`, the largest magnitude of what is to be encoded, if it is finite.

    Raises:
        NonFinite: it is not.
    """
    if not math.isfinite(peak):
        raise NonFinite(
            f"tensor to encode: expected finite values, found {peak}; "
            "the model diverged, a lower learning rate may help"
        )
    return peak


def as_tensor(data: bytes) -> Tensor:
    """Bytes as uint8 [n] on the CPU, in memory of its own."""
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def to_host(*tensors: Tensor) -> list[NDArray[Any]]:
    """The tensors as arrays on the CPU; from a GPU through pinned memory, waited for once."""
    if not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors]
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.numpy() for copy in copies]
