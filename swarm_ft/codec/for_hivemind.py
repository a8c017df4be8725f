"""A codec as a compression of hivemind, for its averagers, experts and other users.

hivemind selects the decoder by a number in each message and knows only its own six. If you run both
ends, `read_as` makes this process decode one of these numbers with our codec; all processes must
call it.
"""

from __future__ import annotations

import torch
from hivemind.compression import CompressionBase, CompressionInfo, serialization
from hivemind.proto import runtime_pb2
from torch import Tensor

from swarm_ft.codec.factory import from_spec
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadCodec, BadFrame

ROW_VALUES = 1024
"""Values of a row; codecs scale by row, and hivemind's averagers send flat pieces."""


class CodecCompression(CompressionBase):  # type: ignore[misc] # hivemind has no types
    """hivemind compression by a direct codec: q8, q4+z, top10, fp16, ...

    Args:
        codec: Codec as in `--bw` (docs/reference/codecs.md), without feedback.
        number: hivemind's number of the compression, which messages carry.

    Raises:
        BadCodec: The codec does not exist, or has state between messages.
    """

    def __init__(
        self, codec: str = "q8", number: int = runtime_pb2.CompressionType.UNIFORM_8BIT
    ) -> None:
        spec = parse_codec_spec(codec, Direction.BACKWARD)
        if spec.is_delta or spec.has_residual:
            raise BadCodec(f"codec {codec}: expected one without state between messages")
        self._codec = from_spec(spec)
        self.compression_type = number

    def compress(
        self, tensor: Tensor, info: CompressionInfo, allow_inplace: bool = False
    ) -> runtime_pb2.Tensor:
        """Return a message with the tensor.

        Raises:
            NonFinite: The tensor has an infinity or NaN.
        """
        del info, allow_inplace
        return runtime_pb2.Tensor(
            compression=self.compression_type,
            buffer=self._encoded(tensor.detach()) if tensor.numel() else b"",
            size=tensor.shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=tensor.requires_grad,
        )

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> Tensor:
        """Return the tensor of a message.

        Raises:
            BadFrame, MalformedMessage: The message has another codec, or another size than its
                shape.
        """
        shape = torch.Size(serialized_tensor.size)
        dtype = getattr(torch, serialized_tensor.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise BadFrame(f"tensor: expected a type of floats, got {serialized_tensor.dtype!a}")
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        encoded = EncodedTensor.from_bytes(serialized_tensor.buffer)
        flat = self._codec.decode(encoded).flatten()
        if not shape.numel() <= flat.numel() < shape.numel() + ROW_VALUES:
            raise BadFrame(f"tensor: expected {shape.numel()} values, got {flat.numel()}")
        return flat[: shape.numel()].reshape(shape).to(dtype)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return an upper bound of the ratio of compressed to original bytes."""
        rows, channels = _rows(info.descriptor.numel())
        largest = self._codec.max_payload_bytes(rows, channels)
        return largest / int(info.descriptor.numel() * info.descriptor.dtype.itemsize)

    def _encoded(self, tensor: Tensor) -> bytes:
        rows, channels = _rows(tensor.numel())
        x = torch.zeros(rows * channels, dtype=torch.float32)
        x[: tensor.numel()] = tensor.flatten().float().cpu()
        return self._codec.encode(x.reshape(rows, channels)).to_bytes()


def register_compression(compression: CodecCompression) -> None:
    """Register the compression: hivemind then decodes messages with its number by it."""
    name = runtime_pb2.CompressionType.Name(compression.compression_type)
    serialization._BASE_COMPRESSION_TYPES[name] = compression  # noqa: SLF001 - it has no other door


def _rows(num_values: int) -> tuple[int, int]:
    channels = min(num_values, ROW_VALUES)
    return -(-num_values // channels), channels
