"""Codecs of the study that are no part of swarm-ft: `hqB` on rotated tiles, and `topK+efmix`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.codec import Codec, from_spec
from swarm_ft.codec.spec import Axis, CodecName, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.codec.topk import largest, num_sent_entries

TILE = 64
MIXED = "+efmix"
_PATTERN = re.compile(r"hq(?P<bits>[1-8](\.\d{1,2})?)(?P<entropy>\+z)?")


@dataclass(frozen=True, slots=True)
class RotatedTensor:
    """A tensor as `hqB` sends it: its rotated tiles, encoded by `qB`."""

    tokens: int
    channels: int
    tiles: EncodedTensor

    def to_bytes(self) -> bytes:
        """Return header and payload of the tiles."""
        return self.tiles.to_bytes()


@dataclass(frozen=True, slots=True)
class RotatedCodec:
    """Quantiser of Hadamard-rotated tiles, as in TAH-Quant (arXiv 2506.01352), without a buffer.

    A tile is 64 channels of one token, fewer in a narrower model; the last tile of a token is
    padded with zeros.

    Attributes:
        inner: Direct codec of [tiles, channels of a tile].
    """

    inner: Codec

    def encode(self, x: Tensor, base: Tensor | None = None) -> RotatedTensor:
        """Encode float32 [tokens, channels]."""
        return self.encode_and_decode(x)[0]

    def encode_and_decode(
        self, x: Tensor, base: Tensor | None = None
    ) -> tuple[RotatedTensor, Tensor]:
        """Encode a sample and decode the result."""
        tile = tile_of(x.shape[1])
        # The division comes first, so that no sum of a tile overflows.
        padded = torch.nn.functional.pad(x.detach(), (0, -x.shape[1] % tile)) / tile
        tiles, value = self.inner.encode_and_decode(hadamard(padded, tile).reshape(-1, tile))
        tokens, channels = x.shape
        return RotatedTensor(tokens, channels, tiles), _rotated_back(value, tokens, channels)

    def decode(
        self,
        encoded: RotatedTensor,
        base: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """Decode to float32 [tokens, channels] on the device."""
        value = self.inner.decode(encoded.tiles, device=device)
        return _rotated_back(value, encoded.tokens, encoded.channels)

    def next_base(
        self, encoded: RotatedTensor, value: Tensor, base: Tensor | None = None
    ) -> Tensor:
        """Return the decoded value."""
        return value


def parse_former(text: str) -> RotatedCodec | None:
    """Return the codec of a text such as `hq4` or `hq3+z`; None for all others."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    # Fixed-width codes need a scale for each tile. With an entropy stage one common scale has the
    # smaller error, and contexts separate wide tiles from narrow ones.
    has_entropy = match["entropy"] is not None
    axis = Axis.FRAME if has_entropy else Axis.TOKEN
    hundredths = round(100 * float(match["bits"]))
    return RotatedCodec(from_spec(CodecSpec(CodecName.Q, hundredths, axis, entropy=has_entropy)))


def tile_of(channels: int) -> int:
    """Return the channels of a tile."""
    return min(TILE, 1 << (channels - 1).bit_length())


def hadamard(x: Tensor, tile: int) -> Tensor:
    """Multiply each run of `tile` values, a power of two, by the Hadamard matrix of +-1.

    The butterflies go in the order of strides 1, 2, 4, ...
    """
    shape, stride = x.shape, 1
    while stride < tile:
        pairs = x.reshape(-1, 2, stride)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        stride *= 2
    return x.reshape(shape)


def _rotated_back(rotated: Tensor, tokens: int, channels: int) -> Tensor:
    x = hadamard(rotated.view(tokens, -1), rotated.shape[1])
    return x[:, :channels].contiguous()


# ---- mixed feedback: half of the entries for the gradient, half for the error


def encode_mixed(codec: Codec, x: Tensor, residual: Tensor | None) -> tuple[EncodedTensor, Tensor]:
    """Encode a gradient by `topK` with mixed error feedback (arXiv 2401.07788, section 2).

    Args:
        codec: `topK`, with or without a lossless stage.
        x: Gradient, float32 [tokens, channels].
        residual: Residual of the sample's last call; None for zeros.

    Returns:
        The message and the new residual.
    """
    x = x.detach()
    residual = torch.zeros_like(x) if residual is None else residual
    total = x + residual
    message = _mixed(x, residual, total, num_sent_entries(codec.spec, x.numel()))
    encoded, value = codec.encode_and_decode(message)
    return encoded, total - value


def _mixed(x: Tensor, residual: Tensor, total: Tensor, count: int) -> Tensor:
    """Return a tensor with the entries that `topK` of `count` entries sends.

    The larger half of `count` is for the largest entries of x, the other half for those of the
    residual; an entry chosen twice gets the sum. Remaining entries (overlapping halves, a residual
    of zeros) are the largest others of x + residual.
    """
    message = torch.zeros(x.numel(), device=x.device)
    _add_largest(message, x, count - count // 2)
    _add_largest(message, residual, count // 2)
    others = torch.where(message == 0, total.reshape(-1), 0)
    _add_largest(message, others, count - int(message.count_nonzero()))
    return message.view_as(total)


def _add_largest(message: Tensor, part: Tensor, count: int) -> None:
    if count:
        places = largest(part, count)
        message[places] += part.reshape(-1)[places]
