"""Codecs for batches, for other pipelines: both ends of a boundary, and autograd.

    frames = encoder.encode(x, sample_ids)          # at one end: [B, T, C] to bytes, one a sample
    y = decoder.decode(frames, sample_ids)          # at the other end: the values that both use

    y = boundary(x, sample_ids)                     # both ends in one process, for autograd

With a delta codec (`aq...`) both ends store a buffer of each sample and update it with every frame;
a sample's first frame is a key frame. A delta frame names the buffer that it builds on, so ends
that differ, such as after a lost frame, are detected, and `forget` restarts the sample.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarm_ft.codec.factory import from_spec
from swarm_ft.codec.feedback import encode_with_feedback
from swarm_ft.codec.kernels import coding_device
from swarm_ft.codec.spec import Direction, Feedback, parse_codec_spec, parse_key_spec
from swarm_ft.codec.stored import buffer_bytes, pack_buffer, unpack_buffer
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import BadFrame

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DIRECT, _KEY, _DELTA = range(3)
_HEAD = struct.Struct("<B16s")
_NO_BASE = bytes(16)


class BufferCache:
    """Buffers of samples at one end; the least recently used ones are evicted.

    Args:
        bits: Bits of a stored value: 16, 8 or 4.
        max_bytes: Maximum size of all buffers; None for no limit.
    """

    def __init__(self, bits: int = 16, max_bytes: int | None = None) -> None:
        self.bits = bits
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._buffers: OrderedDict[int, tuple[bytes, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buffers)

    def __contains__(self, sample: object) -> bool:
        return sample in self._buffers

    def get(self, sample: int, tokens: int, channels: int) -> tuple[Tensor, bytes] | None:
        """Return a sample's buffer, float32 [tokens, channels], and its fingerprint.

        None means that there is no buffer of this shape.
        """
        found = self._buffers.get(sample)
        if found is None or found[1:] != (tokens, channels):
            return None
        self._buffers.move_to_end(sample)
        payload = found[0]
        return unpack_buffer(payload, tokens, channels, self.bits), fingerprint_of(payload)

    def put(self, sample: int, value: Tensor) -> None:
        """Store a value, float32 [tokens, channels], as the sample's buffer."""
        self.forget([sample])
        tokens, channels = value.shape
        self._buffers[sample] = pack_buffer(value, self.bits), tokens, channels
        self.num_bytes += buffer_bytes(tokens, channels, self.bits)
        while self._max_bytes is not None and self.num_bytes > self._max_bytes:
            self.forget([next(iter(self._buffers))])

    def forget(self, samples: Sequence[int]) -> None:
        """Delete the buffers of samples, if present."""
        for sample in samples:
            payload = self._buffers.pop(sample, None)
            if payload is not None:
                self.num_bytes -= len(payload[0])


class _End:
    """End of one direction: its codecs, buffers and residuals."""

    def __init__(
        self,
        codec: str = "aq3+z",
        *,
        direction: Direction = Direction.FORWARD,
        key: str = "q4+z",
        buffers: BufferCache | None = None,
    ) -> None:
        spec = parse_codec_spec(codec, direction)
        self.codec = from_spec(spec)
        # As in EF21, the first gradient of a buffer uses the codec of later ones.
        plain = replace(spec, feedback=Feedback.NONE)
        is_forward = direction is Direction.FORWARD
        self.key_codec = from_spec(parse_key_spec(key) if is_forward else plain)
        self.buffers = buffers if buffers is not None else BufferCache()
        self._residuals: dict[int, Tensor] = {}

    def forget(self, samples: Sequence[int]) -> None:
        """Restart samples with a key frame; both ends must do so."""
        self.buffers.forget(samples)
        for sample in samples:
            self._residuals.pop(sample, None)

    def max_frame_bytes(self, tokens: int, channels: int) -> int:
        """Return an upper bound of a frame's size for this shape."""
        sizes = (one.max_payload_bytes(tokens, channels) for one in (self.codec, self.key_codec))
        head = len(EncodedTensor(self.codec.spec, tokens, channels, b"").to_bytes())
        return _HEAD.size + head + max(sizes)


class BatchEncoder(_End):
    """Sending end of one direction of a boundary.

    Args:
        codec: Codec as in `--fw` and `--bw` (docs/reference/codecs.md).
        direction: Direction: activations or gradients.
        key: Codec of a sample's first frame, if `codec` is a delta codec.
        buffers: Buffers of this end; None for an own set without limit.

    Raises:
        BadCodec: The codec does not exist or cannot be used in this direction.
    """

    def encode(self, x: Tensor, sample_ids: Sequence[int]) -> list[bytes]:
        """Encode a batch to one frame for each sample, updating buffers.

        Args:
            x: float32, bfloat16 or float16 [samples, tokens, channels], on any device.
            sample_ids: Ids of the samples, without duplicates.

        Raises:
            BadFrame: x has a wrong shape or type, or another number of samples.
            NonFinite: x has an infinity or NaN.
        """
        x = checked_batch(x, sample_ids).to(coding_device(x.device))
        return [self._frame(one, sample) for one, sample in zip(x, sample_ids, strict=True)]

    def _frame(self, x: Tensor, sample: int) -> bytes:
        if not self.codec.spec.is_delta:
            return _HEAD.pack(_DIRECT, _NO_BASE) + self._direct(x, sample).to_bytes()
        found = self.buffers.get(sample, *x.shape)
        base, digest = found or (None, _NO_BASE)
        codec, kind = (self.codec, _DELTA) if found else (self.key_codec, _KEY)
        tensor, value = codec.encode_and_decode(x, base)
        self.buffers.put(sample, codec.next_base(tensor, value, base))
        return _HEAD.pack(kind, digest) + tensor.to_bytes()

    def _direct(self, x: Tensor, sample: int) -> EncodedTensor:
        if not self.codec.spec.has_residual:
            return self.codec.encode(x)
        last = self._residuals.get(sample)
        fits = last is not None and last.shape == x.shape
        tensor, residual = encode_with_feedback(self.codec, x, last if fits else None)
        self._residuals[sample] = residual
        return tensor


class BatchDecoder(_End):
    """Receiving end; it takes the arguments of the `BatchEncoder` at the other end."""

    def decode(
        self,
        frames: Sequence[bytes],
        sample_ids: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Decode frames to a batch, updating buffers as the sending end did.

        Args:
            frames: Frames of `BatchEncoder.encode`, possibly hostile; they are checked in full.
            sample_ids: Ids as passed to `encode`.
            dtype: Type of the result.
            device: Device of the result.

        Returns:
            [samples, tokens, channels].

        Raises:
            BadFrame: A frame has another codec, or needs a buffer that this end does not have;
                `forget`
                the sample at both ends and send it again.
            MalformedMessage: A frame is too short or not a frame.
        """
        if len(frames) != len(sample_ids) or not frames:
            raise BadFrame(f"{len(frames)} frames of {len(sample_ids)} samples: expected as many")
        where = coding_device(torch.device(device))
        values = [self._value(one, key, where) for one, key in zip(frames, sample_ids, strict=True)]
        if len({value.shape for value in values}) > 1:
            raise BadFrame("frames: expected samples of one shape in a batch")
        return torch.stack(values).to(device=device, dtype=dtype)

    def _value(self, frame: bytes, sample: int, device: torch.device) -> Tensor:
        if len(frame) < _HEAD.size:
            raise BadFrame(
                f"frame of sample {sample}: expected {_HEAD.size} bytes or more, got {len(frame)}"
            )
        kind, digest = _HEAD.unpack_from(frame)
        tensor = EncodedTensor.from_bytes(frame[_HEAD.size :])
        kinds = (_KEY, _DELTA) if self.codec.spec.is_delta else (_DIRECT,)
        if kind not in kinds:
            raise BadFrame(f"frame of sample {sample}: {self.codec.spec} has no kind {kind}")
        codec, base = self.key_codec if kind == _KEY else self.codec, None
        if kind == _DELTA:
            found = self.buffers.get(sample, tensor.tokens, tensor.channels)
            if found is None or found[1] != digest:
                problem = "has another buffer" if found else "has no buffer"
                raise BadFrame(
                    f"frame of sample {sample}: this end {problem} of it; forget it at both ends"
                )
            base = found[0]
        value = codec.decode(tensor, base, device=device)
        if self.codec.spec.is_delta:
            self.buffers.put(sample, codec.next_base(tensor, value, base))
        return value


def checked_batch(x: Tensor, sample_ids: Sequence[int]) -> Tensor:
    """Return `x` detached and as float32 if it is a batch of these samples.

    Raises:
        BadFrame: It is not.
    """
    if x.dim() != 3 or x.dtype not in DTYPES or x.numel() == 0:
        raise BadFrame(
            "x: expected float32, bfloat16 or float16 [samples, tokens, channels], "
            f"got {x.dtype} {list(x.shape)}"
        )
    if len(sample_ids) != len(x) or len(set(sample_ids)) != len(x):
        raise BadFrame(f"sample_ids: expected {len(x)} different ones, got {len(sample_ids)}")
    return x.detach().float()


# ---- both ends in one process


class CompressedBoundary:
    """A compressed boundary between two parts of a model in one process, for autograd.

    The forward pass returns what would arrive over a link: activations coded against each sample's
    buffer. The backward pass codes gradients. A model with such boundaries trains as in a swarm,
    and `sent_bytes` counts the traffic that this would cause.

    Args:
        forward: Codec of activations, as in `--fw`.
        backward: Codec of gradients, as in `--bw`.
        key: Codec of a sample's first activation.
        buffer_bits: Bits of a stored buffer value: 16, 8 or 4.
        max_buffer_bytes: Maximum size of the buffers at each end; None for no limit.

    Attributes:
        sent_bytes: Bytes of all frames so far, both directions.
        uncompressed_bytes: Bytes of the same values as float32.

    Raises:
        BadCodec: A codec does not exist or cannot be used in its direction.
    """

    def __init__(
        self,
        forward: str = "aq3+z",
        backward: str = "q3+z",
        *,
        key: str = "q4+z",
        buffer_bits: int = 16,
        max_buffer_bytes: int | None = None,
    ) -> None:
        def new_buffers() -> BufferCache:
            return BufferCache(buffer_bits, max_buffer_bytes)

        self._ways = {
            way: (
                BatchEncoder(codec, direction=way, key=key, buffers=new_buffers()),
                BatchDecoder(codec, direction=way, key=key, buffers=new_buffers()),
            )
            for way, codec in ((Direction.FORWARD, forward), (Direction.BACKWARD, backward))
        }
        self.sent_bytes = 0
        self.uncompressed_bytes = 0

    def __call__(self, x: Tensor, sample_ids: Sequence[int]) -> Tensor:
        """Return the decoded `x`, [samples, tokens, channels] in its type, with a backward pass.

        Args:
            x: float32, bfloat16 or float16.
            sample_ids: Ids of the samples, the same at every visit.

        Raises:
            BadFrame, NonFinite: See `BatchEncoder.encode`; also raised in the backward pass.
        """
        passed: Tensor = _Passage.apply(x, self, tuple(sample_ids))  # type: ignore[no-untyped-call]
        return passed

    def transfer(self, x: Tensor, sample_ids: Sequence[int], way: Direction) -> Tensor:
        """Encode and decode one direction, without a graph."""
        encoder, decoder = self._ways[way]
        frames = encoder.encode(x, sample_ids)
        self.sent_bytes += sum(map(len, frames))
        self.uncompressed_bytes += 4 * x.numel()
        return decoder.decode(frames, sample_ids, dtype=x.dtype, device=x.device)

    def forget(self, samples: Sequence[int]) -> None:
        """Restart samples with a key frame, at both ends."""
        for ends in self._ways.values():
            for end in ends:
                end.forget(samples)


class _Passage(torch.autograd.Function):
    """Autograd function of `Boundary`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, boundary: CompressedBoundary, sample_ids: tuple[int, ...]
    ) -> Tensor:
        ctx.boundary, ctx.sample_ids = boundary, sample_ids
        return boundary.transfer(x, sample_ids, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        passed = ctx.boundary.transfer(gradient.contiguous(), ctx.sample_ids, Direction.BACKWARD)
        return passed, None, None
