"""Pieces of a flat gradient to encoded tensors and back, with error feedback.

A piece is seen as rows of 128 values, so that each row has its own scale; the last one is filled up
with its own values over again, which leave its scale as it is. Both the members that send their
values and the one that sends the sum feed their errors back: the end-to-end scheme of AQ-SGD
(arXiv 2206.01299), here of gradients. Its published code keeps residuals and scales in halves, so
that values of 1e-8 are never sent; here both have the range of float32. Pure: residuals are passed
in and out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.messages.reduction import PIECE_ROWS, ROW_VALUES
from swarm_ft.protocol.spec.codec_spec import CodecName, CodecSpec


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """What `encode` made.

    Attributes:
        tensor: goes to the other side.
        values: float32 [n], what it decodes to there.
        residual: float32 [n], what it lacks; to be added to the next values of this piece. None
            if the codec loses nothing.
    """

    tensor: EncodedTensor
    values: Tensor
    residual: Tensor | None


class PieceCodec:
    """The codec of a run's gradient pieces."""

    def __init__(self, spec: CodecSpec) -> None:
        self._codec = from_spec(spec)

    @property
    def is_exact(self) -> bool:
        """Whether it loses nothing, so that there are no residuals."""
        return self._codec.spec.name is CodecName.NONE

    def encode(self, values: Tensor, residual: Tensor | None = None) -> EncodedPiece:
        """Encode values with the error that this piece's last encoding made.

        Args:
            values: float32 [n] on the CPU, n from 1 to a piece's; not written to.
            residual: float32 [n], or None for zeros.

        Raises:
            NonFinite: values or residual hold an infinity or NaN.
        """
        total = values if residual is None else values + residual
        if self.is_exact:
            return EncodedPiece(self._codec.encode(_rows(total)), total, None)
        tensor, rows = self._codec.encode_and_decode(_rows(total))
        decoded = rows.reshape(-1)[: len(total)]
        return EncodedPiece(tensor, decoded, total - decoded)

    def decode(self, tensor: EncodedTensor, num_values: int) -> Tensor:
        """The values of a piece, float32 [n]; finite whatever the bytes.

        Raises:
            BadFrame: not what this codec writes of so many values.
        """
        rows = _num_rows(num_values)
        if (tensor.tokens, tensor.channels) != (rows, ROW_VALUES):
            shape = f"{tensor.tokens} x {tensor.channels}"
            raise BadFrame(f"piece: expected {rows} x {ROW_VALUES} values, got {shape}")
        return self._codec.decode(tensor).reshape(-1)[:num_values]

    def check(self, tensor: EncodedTensor) -> None:
        """Whether a tensor can be a piece, from its header and size; its payload is not read.

        Raises:
            BadFrame: another codec, more values than a piece has, or more bytes than they take.
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
    """Values [n] as [rows, 128]; a view where the last row is full."""
    count = len(values) % ROW_VALUES
    if count:
        tail = values[-count:].repeat(-(-ROW_VALUES // count))[count:ROW_VALUES]
        values = torch.cat([values, tail])
    return values.reshape(-1, ROW_VALUES)
