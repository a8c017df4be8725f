"""Compression of gradients between replicas: pieces of a flat gradient, with error feedback.

A piece is viewed as rows of 128 values with one scale each. The last row is filled with repetitions
of its own values, which leave its scale unchanged. Members that send gradients and the one that
sends the sum both feed their errors back: the end-to-end scheme of AQ-SGD (arXiv 2206.01299), here
for gradients. Its published code stores residuals and scales as float16 and never sends values of
1e-8; here both have the range of float32. Pure: residuals are arguments and results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec.factory import from_spec
from swarm_ft.codec.sizes import PIECE_ROWS, ROW_VALUES
from swarm_ft.codec.spec import CodecName, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """Result of `PieceCodec.encode`.

    Attributes:
        tensor: Encoded values for the receiver.
        values: Decoded values, float32 [n].
        residual: Error to add to the next values of this piece, float32 [n]; None for an exact
            codec.
    """

    tensor: EncodedTensor
    values: Tensor
    residual: Tensor | None


class PieceCodec:
    """Codec of a run's gradient pieces."""

    def __init__(self, spec: CodecSpec) -> None:
        self._codec = from_spec(spec)

    @property
    def is_exact(self) -> bool:
        """Whether the codec is lossless, so that there are no residuals."""
        return self._codec.spec.name is CodecName.NONE

    def encode(self, values: Tensor, residual: Tensor | None = None) -> EncodedPiece:
        """Encode values plus the error of this piece's last encoding.

        Args:
            values: float32 [n] on the CPU, at most one piece; not modified.
            residual: float32 [n]; None for zeros.

        Raises:
            NonFinite: values or residual has an infinity or NaN.
        """
        total = values if residual is None else values + residual
        if self.is_exact:
            return EncodedPiece(self._codec.encode(_rows(total)), total, None)
        tensor, rows = self._codec.encode_and_decode(_rows(total))
        decoded = rows.reshape(-1)[: len(total)]
        return EncodedPiece(tensor, decoded, total - decoded)

    def decode(self, tensor: EncodedTensor, num_values: int) -> Tensor:
        """Return the values of a piece, float32 [n]; finite for any bytes.

        Raises:
            BadFrame: The tensor is not a valid piece of this many values.
        """
        rows = _num_rows(num_values)
        if (tensor.tokens, tensor.channels) != (rows, ROW_VALUES):
            shape = f"{tensor.tokens} x {tensor.channels}"
            raise BadFrame(f"piece: expected {rows} x {ROW_VALUES} values, got {shape}")
        return self._codec.decode(tensor).reshape(-1)[:num_values]

    def check(self, tensor: EncodedTensor) -> None:
        """Check from header and size that a tensor can be a piece; its payload is not read.

        Raises:
            BadFrame: The tensor has another codec, too many values, or too many bytes.
        """
        spec = self._codec.spec
        if tensor.codec != spec:
            raise BadFrame(f"piece: expected {spec}, the run's --dp, got {tensor.codec}")
        if tensor.tokens > PIECE_ROWS or tensor.channels != ROW_VALUES:
            shape = f"{tensor.tokens} x {tensor.channels}"
            raise BadFrame(f"piece: expected at most {PIECE_ROWS} x {ROW_VALUES}, got {shape}")
        largest = self._codec.max_payload_bytes(tensor.tokens, ROW_VALUES)
        if len(tensor.payload) > largest:
            raise BadFrame(f"piece: expected {largest} bytes at most, got {len(tensor.payload)}")


def _num_rows(num_values: int) -> int:
    return -(-num_values // ROW_VALUES)


def _rows(values: Tensor) -> Tensor:
    """Return values [n] as rows [rows, 128]; a view if the last row is full."""
    count = len(values) % ROW_VALUES
    if count:
        tail = values[-count:].repeat(-(-ROW_VALUES // count))[count:ROW_VALUES]
        values = torch.cat([values, tail])
    return values.reshape(-1, ROW_VALUES)
