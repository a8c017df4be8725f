"""Batches through a codec, for pipelines of one's own: both ends of a boundary, and autograd.

    frames = encoder.encode(x, sample_ids)          # at one end: [B, T, C] to bytes, one a sample
    y = decoder.decode(frames, sample_ids)          # at the other: what both ends go on with

    y = boundary(x, sample_ids)                     # both ends in one process, for autograd

With a codec of changes (`aq...`) both ends keep a buffer of each sample and move it by what is
sent, so a sample's first frame is a key frame. A delta says which buffer it builds on: ends that
differ, as after a lost frame, notice, and `forget` has the sample begin anew.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarm_ft.codec import (
    buffer_bytes,
    encode_with_feedback,
    from_spec,
    pack_buffer,
    unpack_buffer,
)
from swarm_ft.codec.kernels import coding_device
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.spec.codec_spec import Direction, Feedback, parse_codec_spec, parse_key_spec
from swarm_ft.protocol.spec.digest import fingerprint_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DIRECT, _KEY, _DELTA = range(3)
_HEAD = struct.Struct("<B16s")
_NO_BASE = bytes(16)


class BufferKeeper:
    """What one end keeps of samples, by their ids; the sample seen longest ago goes first.

    Args:
        bits: of a stored value: 16, 8 or 4.
        max_bytes: that are kept at most; None keeps all.
    """

    def __init__(self, bits: int = 16, max_bytes: int | None = None) -> None:
        self.bits = bits
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, tuple[bytes, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, sample: object) -> bool:
        return sample in self._kept

    def get(self, sample: int, tokens: int, channels: int) -> tuple[Tensor, bytes] | None:
        """A sample's buffer, float32 [tokens, channels], and its fingerprint.

        None if none of that shape is kept.
        """
        found = self._kept.get(sample)
        if found is None or found[1:] != (tokens, channels):
            return None
        self._kept.move_to_end(sample)
        payload = found[0]
        return unpack_buffer(payload, tokens, channels, self.bits), fingerprint_of(payload)

    def put(self, sample: int, value: Tensor) -> None:
        """Keep a value, float32 [tokens, channels], in the place of the sample's last one."""
        self.forget([sample])
        tokens, channels = value.shape
        self._kept[sample] = pack_buffer(value, self.bits), tokens, channels
        self.num_bytes += buffer_bytes(tokens, channels, self.bits)
        while self._max_bytes is not None and self.num_bytes > self._max_bytes:
            self.forget([next(iter(self._kept))])

    def forget(self, samples: Sequence[int]) -> None:
        """Let go of samples; those that are not kept are passed over."""
        for sample in samples:
            payload = self._kept.pop(sample, None)
            if payload is not None:
                self.num_bytes -= len(payload[0])


class _End:
    """What both ends of one way know: its codecs, and this end's buffers (and residuals)."""

    def __init__(
        self,
        codec: str = "aq3+z",
        *,
        direction: Direction = Direction.FORWARD,
        key: str = "q4+z",
        buffers: BufferKeeper | None = None,
    ) -> None:
        spec = parse_codec_spec(codec, direction)
        self.codec = from_spec(spec)
        # A buffer of gradients begins with a gradient by their own codec, as in EF21.
        plain = replace(spec, feedback=Feedback.NONE)
        is_forward = direction is Direction.FORWARD
        self.key_codec = from_spec(parse_key_spec(key) if is_forward else plain)
        self.buffers = buffers if buffers is not None else BufferKeeper()
        self._residuals: dict[int, Tensor] = {}

    def forget(self, samples: Sequence[int]) -> None:
        """Have samples begin anew; both ends must."""
        self.buffers.forget(samples)
        for sample in samples:
            self._residuals.pop(sample, None)

    def max_frame_bytes(self, tokens: int, channels: int) -> int:
        """No frame of a sample of that shape is larger."""
        sizes = (one.max_payload_bytes(tokens, channels) for one in (self.codec, self.key_codec))
        head = len(EncodedTensor(self.codec.spec, tokens, channels, b"").to_bytes())
        return _HEAD.size + head + max(sizes)


class BatchEncoder(_End):
    """The sending end of one way over a boundary.

    Args:
        codec: as `--fw` and `--bw` take it (docs/reference/codecs.md).
        direction: of activations, or of gradients.
        key: codec of a sample's first frame, if `codec` sends changes.
        buffers: this end's own; one with all bytes it wants, if None.

    Raises:
        BadCodec: there is no such codec, or it makes no sense in that direction.
    """

    def encode(self, x: Tensor, sample_ids: Sequence[int]) -> list[bytes]:
        """A frame of each sample; buffers move.

        Args:
            x: float32, bfloat16 or float16 [samples, tokens, channels], on any device.
            sample_ids: of its samples, each once.

        Raises:
            BadFrame: another shape or type, or another number of samples.
            NonFinite: x holds an infinity or NaN.
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
        self.buffers.put(sample, codec.kept(tensor, value, base))
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
    """The receiving end; arguments are those of the `BatchEncoder` at the other."""

    def decode(
        self,
        frames: Sequence[bytes],
        sample_ids: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The batch that frames hold; buffers move as at the sending end.

        Args:
            frames: of `BatchEncoder.encode`; they may come from a stranger, and are checked in
                full.
            sample_ids: as they were given there.
            dtype: of what comes.
            device: so too.

        Returns:
            [samples, tokens, channels].

        Raises:
            BadFrame: a frame is not of these codecs, or builds on a buffer that is not here;
                `forget` the sample at both ends, and have it sent again.
            MalformedMessage: a frame is too short, or is none.
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
            raise BadFrame(f"frame of sample {sample}: {len(frame)} bytes are none")
        kind, digest = _HEAD.unpack_from(frame)
        tensor = EncodedTensor.from_bytes(frame[_HEAD.size :])
        kinds = (_KEY, _DELTA) if self.codec.spec.is_delta else (_DIRECT,)
        if kind not in kinds:
            raise BadFrame(f"frame of sample {sample}: kind {kind} is not of {self.codec.spec}")
        codec, base = self.key_codec if kind == _KEY else self.codec, None
        if kind == _DELTA:
            found = self.buffers.get(sample, tensor.tokens, tensor.channels)
            if found is None or found[1] != digest:
                here = "another buffer" if found else "no buffer"
                raise BadFrame(f"frame of sample {sample}: {here} of it is here; forget it there")
            base = found[0]
        value = codec.decode(tensor, base, device=device)
        if self.codec.spec.is_delta:
            self.buffers.put(sample, codec.kept(tensor, value, base))
        return value


def checked_batch(x: Tensor, sample_ids: Sequence[int]) -> Tensor:
    """`x` without its graph, as float32, if it is a batch of these samples.

    Raises:
        BadFrame: it is not.
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


class Boundary:
    """A boundary between two parts of a model in one process, for autograd.

    What passes is what would arrive over a link: forward compressed against buffers of each sample,
    backward compressed. So a model with boundaries in it trains as it would in a swarm, and
    `sent_bytes` says what that would send.

    Args:
        forward: codec of activations, as `--fw` takes it.
        backward: codec of gradients, as `--bw` takes it.
        key: codec of a sample's first activation.
        buffer_bits: of a stored value of a buffer: 16, 8 or 4.
        max_buffer_bytes: kept at most at each end; None keeps all.

    Attributes:
        sent_bytes: all frames so far, both ways.
        uncompressed_bytes: what they stand for, 4 bytes a value.

    Raises:
        BadCodec: there is no such codec, or it makes no sense where it stands.
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
        def kept() -> BufferKeeper:
            return BufferKeeper(buffer_bits, max_buffer_bytes)

        self._ways = {
            way: (
                BatchEncoder(codec, direction=way, key=key, buffers=kept()),
                BatchDecoder(codec, direction=way, key=key, buffers=kept()),
            )
            for way, codec in ((Direction.FORWARD, forward), (Direction.BACKWARD, backward))
        }
        self.sent_bytes = 0
        self.uncompressed_bytes = 0

    def __call__(self, x: Tensor, sample_ids: Sequence[int]) -> Tensor:
        """What arrives of `x`, [samples, tokens, channels] in its own type; it has a backward.

        Args:
            x: float32, bfloat16 or float16.
            sample_ids: of its samples, the same at every visit.

        Raises:
            BadFrame, NonFinite: as `BatchEncoder.encode`; so does the backward.
        """
        passed: Tensor = _Passage.apply(x, self, tuple(sample_ids))  # type: ignore[no-untyped-call]
        return passed

    def passed(self, x: Tensor, sample_ids: Sequence[int], way: Direction) -> Tensor:
        """One way over it, without a graph."""
        encoder, decoder = self._ways[way]
        frames = encoder.encode(x, sample_ids)
        self.sent_bytes += sum(map(len, frames))
        self.uncompressed_bytes += 4 * x.numel()
        return decoder.decode(frames, sample_ids, dtype=x.dtype, device=x.device)

    def forget(self, samples: Sequence[int]) -> None:
        """Have samples begin anew, at both ends."""
        for ends in self._ways.values():
            for end in ends:
                end.forget(samples)


class _Passage(torch.autograd.Function):
    """See `Boundary`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary, sample_ids: tuple[int, ...]) -> Tensor:
        ctx.boundary, ctx.sample_ids = boundary, sample_ids
        return boundary.passed(x, sample_ids, Direction.FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        passed = ctx.boundary.passed(gradient.contiguous(), ctx.sample_ids, Direction.BACKWARD)
        return passed, None, None
