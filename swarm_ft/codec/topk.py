"""The codec `topK`: a sample's largest entries and their positions. Uses no buffers or residuals.

Payload of one sample of n values, of which k are sent; its size depends on n and k alone:

    int16 exponent, k halves    the sent values in C order, as `fp16` writes them
    positions                   a bitmap of n bits, or Elias-Fano, whichever is smaller

Elias-Fano (Elias 1974, Fano 1971) splits each position after its low l = floor(log2(n / k)) bits.
The low parts are concatenated, l bits each. The high parts, which only rise, form a bit vector: bit
high_i + i is set for the i-th of them. Bits count from the highest of a byte, the last byte of each
part ends in zeros, and a set of positions has one encoding.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm_ft.codec.base import Codec, Payload, checked_peak, peak_of, to_device
from swarm_ft.codec.raw import HalfCodec
from swarm_ft.codec.spec import CodecName, CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame

Positions = NDArray[np.int64]
Bits = NDArray[np.uint8]

_VALUES = HalfCodec(CodecSpec(CodecName.FP16, 1600))
_MAGNITUDE = 0x7FFF_FFFF
"""Mask of a float32 without its sign. As integers, magnitudes keep their order."""


class TopKCodec(Codec):
    """Sparsifier: K percent of a sample's values with 16 bits each, and zeros elsewhere.

    It selects over the whole sample like Rudakov et al. (arXiv 2401.07788, section 2), but sends
    exactly k values, with ties to lower positions, and counts the bytes of positions. Decodes on
    the CPU.
    """

    has_one_size = True

    def max_payload_bytes(self, tokens: int, channels: int) -> int:
        """Return the size of every payload of this shape."""
        size = tokens * channels
        count = num_sent_entries(self.spec, size)
        return _VALUES.max_payload_bytes(1, count) + _position_bytes(count, size)

    def _write(self, x: Tensor, base: Tensor | None) -> Payload:
        checked_peak(peak_of(x))
        positions = largest(x, num_sent_entries(self.spec, x.numel()))
        values = _VALUES.encode(x.reshape(-1)[positions].view(1, -1)).payload
        return self._unread(values + _write_positions(positions.cpu().numpy(), x.numel()), x)

    def _read(self, encoded: EncodedTensor, base: Tensor | None, device: torch.device) -> Tensor:
        size = encoded.tokens * encoded.channels
        count = num_sent_entries(self.spec, size)
        cut = _VALUES.max_payload_bytes(1, count)
        values = _VALUES.decode(EncodedTensor(_VALUES.spec, 1, count, encoded.payload[:cut]))
        positions = _read_positions(encoded.payload[cut:], count, size)
        x = torch.zeros(size)
        x[torch.from_numpy(positions)] = values[0]
        return to_device(x.view(encoded.tokens, encoded.channels), device)


def num_sent_entries(spec: CodecSpec, size: int) -> int:
    """Return the number of entries to send: the percentage of `size`, rounded, at least one."""
    return max(1, (size * spec.hundredths + 5_000) // 10_000)


def largest(x: Tensor, count: int) -> Tensor:
    """Return the positions, in C order, of the entries of largest magnitude; ties to the first.

    Args:
        x: float32 [tokens, channels], on any device, without NaN.
        count: Number of positions, at least 1.

    Returns:
        int64 [count], rising, on x's device.
    """
    magnitudes = x.reshape(-1).view(torch.int32) & _MAGNITUDE
    threshold = _nth_largest(magnitudes, count)
    chosen = magnitudes > threshold
    ties = (magnitudes == threshold).nonzero().view(-1)
    chosen[ties[: count - int(chosen.count_nonzero())]] = True
    return chosen.nonzero().view(-1)


def _nth_largest(magnitudes: Tensor, count: int) -> int:
    if magnitudes.device.type != "cpu":
        return int(torch.topk(magnitudes, count, sorted=False).values.min())
    rank = len(magnitudes) - count  # numpy's selection takes half the time of torch's
    return int(np.partition(magnitudes.numpy(), rank)[rank])


def _low_bits(count: int, size: int) -> int:
    return (size // count).bit_length() - 1


def _high_length(count: int, size: int) -> int:
    """Return the bits of the vector of high parts: one more than the largest possible index."""
    return count + ((size - 1) >> _low_bits(count, size))


def _elias_fano_bytes(count: int, size: int) -> tuple[int, int]:
    """Return the bytes of the low parts and of the high parts."""
    return _bytes_of(count * _low_bits(count, size)), _bytes_of(_high_length(count, size))


def _bitmap_is_smaller(count: int, size: int) -> bool:
    return _bytes_of(size) <= sum(_elias_fano_bytes(count, size))


def _position_bytes(count: int, size: int) -> int:
    return min(_bytes_of(size), sum(_elias_fano_bytes(count, size)))


def _write_positions(positions: Positions, size: int) -> bytes:
    count = len(positions)
    if _bitmap_is_smaller(count, size):
        return _marks(positions, size)
    low_bits = _low_bits(count, size)
    shifts = np.arange(low_bits - 1, -1, -1)
    low = (positions[:, None] >> shifts & 1).astype(np.uint8)
    high = (positions >> low_bits) + np.arange(count)
    return np.packbits(low).tobytes() + _marks(high, _high_length(count, size))


def _read_positions(payload: bytes, count: int, size: int) -> Positions:
    """Decode `count` rising positions below `size`; the size of `payload` is checked before.

    Raises:
        BadFrame: The number of positions or their encoding is wrong.
    """
    if _bitmap_is_smaller(count, size):
        return _marked(payload, size, count)
    low_bits, cut = _low_bits(count, size), _elias_fano_bytes(count, size)[0]
    bits = _unpack_bits(payload[:cut], count * low_bits).reshape(count, low_bits)
    positions = _marked(payload[cut:], _high_length(count, size), count) - np.arange(count)
    for column in range(low_bits):
        positions = positions << 1 | bits[:, column]
    if positions[-1] >= size or (np.diff(positions) <= 0).any():
        raise BadFrame(f"frame: expected rising positions below {size}, got others")
    return positions


def _marks(positions: Positions, length: int) -> bytes:
    """Return a vector of `length` bits with those at `positions` set."""
    marks = np.zeros(length, np.uint8)
    marks[positions] = 1
    return np.packbits(marks).tobytes()


def _marked(payload: bytes, length: int, count: int) -> Positions:
    positions = np.flatnonzero(_unpack_bits(payload, length))
    if len(positions) != count:
        raise BadFrame(f"frame: expected {count} positions, got {len(positions)}")
    return positions.astype(np.int64, copy=False)


def _unpack_bits(payload: bytes, length: int) -> Bits:
    """Return `length` bits, one a byte; padding bits in the last byte must be zeros."""
    bits = np.unpackbits(np.frombuffer(payload, np.uint8))
    if bits[length:].any():
        raise BadFrame("frame: expected zeros after the last position, got ones")
    return bits[:length]


def _bytes_of(bits: int) -> int:
    return -(-bits // 8)
