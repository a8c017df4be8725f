"""Boundaries for `torch.distributed.pipelining` that send frames of a codec instead of tensors.

That runtime sends the output of a stage's module, and its gradient, as tensors of one shape. The
module below a boundary therefore ends with a `SendEnd`, which turns activations into the bytes of
their frames, stored in a float32 tensor [samples, words]. The module above begins with a
`ReceiveEnd` with the same settings; gradients return in the same shape. The runtime copies these
tensors and never computes with them. Only codecs with frames of one size save bytes: those without
`+z` (aq4, q4, fp16, ...).

    stage 0:  hidden = layers(tokens);  return send_end(hidden, sample_ids)
    stage 1:  hidden = receive_end(words, sample_ids);  ...

Pass shapes to the stages with `example`: to infer them the runtime would run modules on
uninitialised memory, which holds no valid frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swarm_ft.codec.batches import BatchDecoder, BatchEncoder
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import BadFrame

_WORD_BYTES = 4


class _BoundaryEnd(nn.Module):
    """Base of both ends of a boundary.

    Args:
        tokens: Tokens of each sample.
        channels: Channels of each token.
        forward_codec: Codec of activations, as in `--fw`.
        backward_codec: Codec of gradients, as in `--bw`.
        key_codec: Codec of a sample's first activation.

    Raises:
        BadCodec: A codec does not exist or cannot be used in its direction.
    """

    def __init__(
        self,
        tokens: int,
        channels: int,
        *,
        forward_codec: str = "aq4",
        backward_codec: str = "q4",
        key_codec: str = "q4",
    ) -> None:
        super().__init__()
        self.tokens, self.channels = tokens, channels
        ways = (Direction.FORWARD, forward_codec), (Direction.BACKWARD, backward_codec)
        for way, codec in ways:
            encoder = BatchEncoder(codec, direction=way, key=key_codec)
            if way is self._sends:
                self.encoder = encoder
            else:
                self.decoder = BatchDecoder(codec, direction=way, key=key_codec)
        sizes = (end.max_frame_bytes(tokens, channels) for end in (self.encoder, self.decoder))
        self.words = -(-(_WORD_BYTES + max(sizes)) // _WORD_BYTES)

    _sends = Direction.FORWARD

    def example(self, samples: int) -> Tensor:
        """Return a tensor of the shape to pass to `PipelineStage(input_args=, output_args=)`."""
        return torch.zeros(samples, self.words, requires_grad=True)

    def to_words(self, x: Tensor, sample_ids: Sequence[int]) -> Tensor:
        """Return the frames of a batch, float32 [samples, words], on its device."""
        if x.shape[1:] != (self.tokens, self.channels):
            expected = f"[samples, {self.tokens}, {self.channels}]"
            raise BadFrame(f"x: expected {expected}, got {list(x.shape)}")
        rows = torch.zeros(len(x), self.words, dtype=torch.float32)
        for row, frame in zip(
            rows.view(torch.uint8), self.encoder.encode(x, sample_ids), strict=True
        ):
            data = len(frame).to_bytes(_WORD_BYTES, "little") + frame
            row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return rows.to(x.device)

    def from_words(self, words: Tensor, sample_ids: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decode frames to a batch [samples, tokens, channels]."""
        frames = []
        for row in words.detach().cpu().contiguous().view(torch.uint8):
            data = row.numpy().tobytes()
            length = int.from_bytes(data[:_WORD_BYTES], "little")
            frames.append(data[_WORD_BYTES : _WORD_BYTES + length])
        x = self.decoder.decode(frames, sample_ids, dtype=dtype, device=words.device)
        if x.shape[1:] != (self.tokens, self.channels):
            raise BadFrame(f"frames: expected [{self.tokens}, {self.channels}], got {x.shape[1:]}")
        return x


class SendEnd(_BoundaryEnd):
    """End below a boundary: sends activations, receives gradients."""

    def forward(self, x: Tensor, sample_ids: Tensor | Sequence[int]) -> Tensor:
        """Return the module's output for `x`, [samples, tokens, channels]."""
        sent: Tensor = _Sent.apply(x, self, _ids(sample_ids))  # type: ignore[no-untyped-call]
        return sent


class ReceiveEnd(_BoundaryEnd):
    """End above a boundary: receives activations, sends gradients."""

    _sends = Direction.BACKWARD

    def forward(
        self,
        words: Tensor,
        sample_ids: Tensor | Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return the activations [samples, tokens, channels] of the module's input."""
        x: Tensor = _Received.apply(  # type: ignore[no-untyped-call]
            words, self, _ids(sample_ids), dtype
        )
        return x


def _ids(sample_ids: Tensor | Sequence[int]) -> list[int]:
    return [int(sample) for sample in sample_ids]


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, end: SendEnd, sample_ids: list[int]) -> Tensor:
        ctx.end, ctx.sample_ids, ctx.dtype = end, sample_ids, x.dtype
        return end.to_words(x, sample_ids)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.end.from_words(gradients[0], ctx.sample_ids, ctx.dtype), None, None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, words: Tensor, end: ReceiveEnd, sample_ids: list[int], dtype: torch.dtype
    ) -> Tensor:
        ctx.end, ctx.sample_ids = end, sample_ids
        return end.from_words(words, sample_ids, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.end.to_words(gradients[0].contiguous(), ctx.sample_ids), None, None, None
