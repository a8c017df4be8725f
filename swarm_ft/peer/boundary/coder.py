"""Encoding and decoding at one end of a boundary, with this end's per-sample buffers.

The scheme is AQ-SGD (arXiv 2206.01299, algorithm 1). A sample's first visit sends a key frame.
Later visits send the quantised change against the buffer, and both ends apply it to their buffer.

* Buffers are identified by content: a delta frame names the digests of the buffer that it changes
  and of the result, so that ends with different buffers notice at once.
* Buffers are stored at `buffer_bits`. Computation uses the decoded value, so that the rounding of a
  buffer becomes part of the next change.
* Residuals of error feedback are buffers of the sender alone, with 16 bits.
* Activations of held-out samples are sent as direct frames.
* Activations of frozen stages are direct frames too. They are constant for each sample, and the
  receiver caches them for all later visits.

The step's plan sets the codecs of both directions; buffers and residuals outlive a change of
codecs. All calls are synchronous and run in a codec thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.codec import (
    Codec,
    encode_with_feedback,
    from_spec,
    max_side_info_bytes,
    pack_buffer,
    read_side_info,
    unpack_buffer,
)
from swarm_ft.codec.base import CPU
from swarm_ft.codec.side_info import SideInfo
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.ids import BlockIndex, RunId, SampleId
from swarm_ft.peer.boundary.side_info import SideInfoKey, SideInfoStore, TensorKind
from swarm_ft.protocol.messages.boundary import Frame, FrameKey, FrameKind
from swarm_ft.protocol.spec.run_spec import MIN_LENGTH, RunSpec, TrainSpec
from swarm_ft.stage.device import share_with_default_stream

_KINDS: dict[Direction, Sequence[TensorKind]] = {
    Direction.FORWARD: (TensorKind.FIRST, TensorKind.CHANGE),
    Direction.BACKWARD: (TensorKind.GRADIENT,),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a delta frame cannot be decoded here; a key frame of its sample can."""

    reason: str


class _StepCodecs:
    """Codecs of the frames of a step.

    Args:
        train: Training options, with the codecs of the step's plan.
    """

    def __init__(self, train: TrainSpec) -> None:
        self.of = {way: from_spec(train.codec(way)) for way in Direction}
        self.waited_for = {
            Direction.FORWARD: from_spec(train.fill_frame_codec),
            Direction.BACKWARD: from_spec(train.drain_frame_codec),
        }
        self.of_keys = {way: from_spec(train.key_frame_codec(way)) for way in Direction}
        self.of_eval = (
            from_spec(parse_codec_spec("none", Direction.FORWARD)),
            from_spec(train.compressed_eval_codec),
        )


class FrameCoder:
    """Encodes the frames that this end sends and decodes those that it receives.

    Buffers change only when the step commits, see `BufferStore`.
    """

    def __init__(  # noqa: PLR0913 - what an attempt shares with its parts, by name
        self,
        spec: RunSpec,
        *,
        run_id: RunId,
        boundary: BlockIndex,
        store: BufferStore,
        side_info: SideInfoStore | None = None,
        keeps_input: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """Create the coder; all per-sample state lives in `store`.

        Args:
            spec: Spec of the run.
            run_id: Id of the run.
            boundary: First block after the boundary.
            store: Buffers of this peer's stage.
            side_info: Side information of the stage; None begins without any, and discards what it
                learns.
            keeps_input: Whether this end receives constants and caches them.
            device: Device of the computation and of decoded tensors.
        """
        self._device = device
        self._run_id = run_id
        self._boundary = boundary
        self._store = store
        self._side_info = SideInfoStore() if side_info is None else side_info
        self._longest, self._channels = spec.train.seq_length, spec.model.hidden_size
        self._codecs = _StepCodecs(spec.train)
        self._train = spec.train
        self._num_microbatches = 0
        self._bits = spec.train.buffer_bits
        is_constant, constants = spec.is_cacheable(boundary), spec.train.constant_codec
        self._constant_codec = from_spec(constants) if is_constant else None
        self._keeps_input = keeps_input

    def begin(self, train: TrainSpec, num_microbatches: int) -> None:
        """Start a step; no frame of an earlier step may be in work.

        Args:
            train: Training options of the run, with the codecs of the step's plan.
            num_microbatches: Microbatches on which the step trains.
        """
        self._codecs = _StepCodecs(train)
        self._num_microbatches = num_microbatches

    def encode(self, key: FrameKey, x: Tensor) -> Frame:
        """Encode a sample's tensor, and stage the buffer or residual that results.

        Args:
            key: Key of the frame.
            x: Tensor, float32 [tokens, channels], on any device.

        Raises:
            NonFinite: The tensor contains inf or NaN; the message names the sample.
        """
        try:
            return self._encode(key, x.to(self._device))
        except NonFinite as error:
            where = f"sample {key.sample}, step {key.step}, {key.direction.name.lower()}"
            raise NonFinite(f"{where}: {error.message}") from error

    def _encode(self, key: FrameKey, x: Tensor) -> Frame:
        codec = self._codec_of(key)
        if not codec.spec.is_delta:
            return Frame(key, FrameKind.DIRECT, self._encode_direct(key, x))
        record = self._record(End.SENT, key.sample, len(x))
        if record is None:
            self._record_frame(
                key, self._codecs.of_keys[key.direction], _kind_alone(key.direction), x
            )
            return self._encode_key(key, x)
        base = self._base_of(record)
        self._record_frame(key, codec, TensorKind.CHANGE, x, base)
        codec = self._informed(codec, TensorKind.CHANGE)
        tensor, value = codec.encode_and_decode(x, base)
        kept = self._packed(codec.next_base(tensor, value, base))
        digest = self._stage(End.SENT, key.sample, len(x), kept)
        return Frame(key, FrameKind.DELTA, tensor, record.digest, _result(digest, tensor))

    def has_side_info(self, direction: Direction) -> bool:
        """Whether the step's codecs in this direction use side information."""
        codecs = self._codecs
        of_each = codecs.of, codecs.of_keys, codecs.waited_for
        return any(of_way[direction].spec.has_side_info for of_way in of_each)

    def is_held_out(self, key: FrameKey) -> bool:
        """Whether a frame's sample is only evaluated."""
        return self._train.is_held_out(key.sample)

    def encode_again(self, frame: Frame) -> Frame:
        """Encode a delta frame of this end again, as a key frame of nearly the same value.

        This is for a receiver that lacks the buffer. The value is decoded from the delta frame, so
        that only frames have to be stored until the step commits.
        """
        record = self._record(End.SENT, frame.key.sample, frame.tensor.tokens)
        base = self._base_of(record) if record else None
        codec = self._informed(self._codec_of(frame.key), TensorKind.CHANGE)
        value = codec.decode(frame.tensor, base, device=self._device)
        return self._encode_key(frame.key, value)

    def side_info_of(self, frame: Frame) -> SideInfo | None:
        """Return the side information with which a frame of this end was encoded."""
        kind = (
            TensorKind.CHANGE if frame.kind is FrameKind.DELTA else _kind_alone(frame.key.direction)
        )
        return self._side_info.cached(SideInfoKey(self._boundary, kind))

    def new_side_info(self, direction: Direction, samples: Iterable[SampleId]) -> list[SideInfo]:
        """Return what frames of these samples use in this step for the first time."""
        kinds = _KINDS[direction]
        if direction is Direction.FORWARD:
            kept = set(self._store.samples(self._boundary, End.SENT).tolist())
            kinds = sorted(
                {TensorKind.CHANGE if one in kept else TensorKind.FIRST for one in samples}
            )
        return self._found(self._side_info.first_used, kinds)

    def next_side_info(self, direction: Direction) -> list[SideInfo]:
        """Return the side information of the next step, computing it if necessary."""
        return self._found(self._side_info.next_info, _KINDS[direction])

    def ready_side_info(self, direction: Direction) -> list[SideInfo]:
        """Return the side information of the next step, as far as it is computed already."""
        return self._found(self._side_info.next_if_ready, _KINDS[direction])

    def _found(
        self, look_up: Callable[[SideInfoKey], SideInfo | None], kinds: Iterable[TensorKind]
    ) -> list[SideInfo]:
        found = (look_up(SideInfoKey(self._boundary, kind)) for kind in kinds)
        return [info for info in found if info is not None]

    def read_side_info(self, data: bytes) -> SideInfo:
        """Decode side information of the other end.

        Raises:
            BadFrame: The bytes are no side information for this run.
        """
        return read_side_info(data, self._channels)

    @property
    def max_side_info_bytes(self) -> int:
        """Size limit of side information with the run's channels."""
        return max_side_info_bytes(self._channels)

    def decode(self, frame: Frame, info: SideInfo | None = None) -> Tensor | Refusal:
        """Decode a frame to the tensor of the next computation, float32 [tokens, channels].

        Args:
            frame: Frame of the other end.
            info: Side information that the frame names, if it has arrived.

        Returns:
            The tensor; or a refusal, which changes no state: the buffer is missing, or the result
            has another digest.

        Raises:
            BadFrame: The frame does not fit the run, or its payload does not fit its header.
        """
        self.check(frame)
        value = self._decoded(frame, info)
        return value if isinstance(value, Refusal) else share_with_default_stream(value)

    def _decoded(self, frame: Frame, info: SideInfo | None) -> Tensor | Refusal:
        tensor, sample, device = frame.tensor, frame.key.sample, self._device
        codec = self._codec_of(frame.key)
        if frame.kind is FrameKind.DIRECT:
            value = codec.with_side_info(info).decode(tensor, device=device)
            if self._keeps_input and not self._train.is_shadow(sample):
                self._stage(End.RECEIVED, sample, tensor.tokens, tensor.payload)
            return value
        base = None
        if frame.kind is FrameKind.KEY:
            codec = self._codecs.of_keys[frame.key.direction]
        else:
            record = self._record(End.RECEIVED, sample, tensor.tokens)
            if record is None or record.digest != frame.base_digest:
                return Refusal(f"sample {sample}: its base is {'other' if record else 'not'} here")
            base = self._base_of(record)
        codec = codec.with_side_info(info)
        value = codec.decode(tensor, base, device=device)
        payload = self._packed(codec.next_base(tensor, value, base))
        if _result(fingerprint_of(payload), tensor) != frame.result_digest:
            return self._differs(frame)
        self._stage(End.RECEIVED, sample, tensor.tokens, payload)
        return value

    def read_cached_input(self, sample: SampleId, tokens: int) -> Tensor | None:
        """Return a sample's cached constant, float32 [tokens, channels]; None if it is missing."""
        codec, record = self._constant_codec, self._record(End.RECEIVED, sample, tokens)
        if codec is None or record is None:
            return None
        kept = EncodedTensor(codec.spec, tokens, self._channels, record.payload)
        return share_with_default_stream(codec.decode(kept, device=self._device))

    def check(self, frame: Frame, *, is_early: bool = False) -> None:
        """Check a frame's header and size against the step's plan, without reading the payload.

        Args:
            frame: Frame of the other end.
            is_early: Whether its step has not begun here. Then any codec is allowed to which this
                step's codec may change; `decode` checks it against the plan.

        Raises:
            BadFrame: The shape, kind, codec or number of bytes is wrong.
        """
        codec, tensor = self._codec_of(frame.key), frame.tensor
        fits = MIN_LENGTH <= tensor.tokens <= self._longest
        if not fits or tensor.channels != self._channels:
            allowed = f"{MIN_LENGTH} to {self._longest} tokens of {self._channels} channels"
            got = f"{tensor.tokens} x {tensor.channels}"
            raise BadFrame(f"frame {frame.key}: expected {allowed}, got {got}")
        is_key = frame.kind is FrameKind.KEY
        expected = self._codecs.of_keys[frame.key.direction] if is_key else codec
        is_direct = frame.kind is FrameKind.DIRECT
        if is_early and tensor.codec.keeps == expected.spec.keeps:
            expected = from_spec(tensor.codec)
        if is_direct == codec.spec.is_delta or tensor.codec != expected.spec:
            raise BadFrame(
                f"frame {frame.key}: {frame.kind.name} of {tensor.codec} in a step whose "
                f"{frame.key.direction.name.lower()} codec is {codec.spec}"
            )
        size = expected.max_payload_bytes(tensor.tokens, tensor.channels)
        if len(tensor.payload) > size:
            sizes = f"at most {size} bytes, got {len(tensor.payload)}"
            raise BadFrame(f"frame {frame.key}: expected {sizes}")

    def _codec_of(self, key: FrameKey) -> Codec:
        """Return the codec of a direct or delta frame with this `FrameKey`."""
        if self._constant_codec is not None:
            return self._constant_codec
        if self._train.is_held_out(key.sample):
            return self._codecs.of_eval[self._train.is_compressed(key.sample)]
        codecs = self._codecs.waited_for if self._fills_or_drains(key) else self._codecs.of
        return codecs[key.direction]

    def _fills_or_drains(self, key: FrameKey) -> bool:
        """Whether a frame fills or drains the pipeline, while other stages wait."""
        if key.direction is Direction.FORWARD:
            return key.microbatch < self._train.fill_microbatches
        return self._num_microbatches - key.microbatch <= self._train.drain_microbatches

    def _encode_key(self, key: FrameKey, x: Tensor) -> Frame:
        codec = self._informed(self._codecs.of_keys[key.direction], _kind_alone(key.direction))
        tensor, value = codec.encode_and_decode(x)
        digest = self._stage(
            End.SENT, key.sample, len(x), self._packed(codec.next_base(tensor, value))
        )
        return Frame(key, FrameKind.KEY, tensor, result_digest=_result(digest, tensor))

    def _encode_direct(self, key: FrameKey, x: Tensor) -> EncodedTensor:
        codec = self._codec_of(key)
        if not codec.spec.has_residual:
            kind = _kind_alone(key.direction)
            self._record_frame(key, codec, kind, x)
            return self._informed(codec, kind).encode(x)
        record = self._record(End.RESIDUAL, key.sample, len(x))
        residual = None
        if record is not None:
            residual = unpack_buffer(record.payload, *x.shape, device=self._device)
        tensor, residual = encode_with_feedback(codec, x, residual)
        self._stage(End.RESIDUAL, key.sample, len(x), pack_buffer(residual))
        return tensor

    def _informed(self, codec: Codec, kind: TensorKind) -> Codec:
        """Return the codec with its side information for that kind, if it uses any."""
        if not codec.spec.has_side_info:
            return codec
        return codec.with_side_info(self._side_info.get(SideInfoKey(self._boundary, kind)))

    def _record_frame(
        self, key: FrameKey, codec: Codec, kind: TensorKind, x: Tensor, base: Tensor | None = None
    ) -> None:
        """Record a training sample's frame, from which the codec may learn."""
        if not self.is_held_out(key):
            where = SideInfoKey(self._boundary, kind)
            self._side_info.record_frame(where, key.sample, codec, x, base)

    def _record(self, end: End, sample: SampleId, tokens: int) -> BufferRecord | None:
        """Return a record of a sample; None if it is missing or has another shape."""
        record = self._store.get(self._buffer_key(end, sample))
        fits = record is not None and (record.tokens, record.channels) == (tokens, self._channels)
        return record if fits else None

    def _base_of(self, record: BufferRecord) -> Tensor:
        shape = record.tokens, record.channels
        return unpack_buffer(record.payload, *shape, self._bits, device=self._device)

    def _packed(self, value: Tensor) -> bytes:
        return pack_buffer(value, self._bits)

    def _differs(self, frame: Frame) -> Refusal:
        reason = f"sample {frame.key.sample}: the decoded buffer does not match the frame's digest"
        if frame.kind is FrameKind.KEY:
            raise BadFrame(f"{reason}, although it is a key frame")
        return Refusal(reason)

    def _stage(self, end: End, sample: SampleId, tokens: int, payload: bytes) -> bytes:
        digest = fingerprint_of(payload)
        record = BufferRecord(digest, tokens, self._channels, payload)
        self._store.stage(self._buffer_key(end, sample), record)
        return digest

    def _buffer_key(self, end: End, sample: SampleId) -> BufferKey:
        return BufferKey(self._run_id, self._boundary, end, sample)


def _kind_alone(direction: Direction) -> TensorKind:
    """Return the kind of the tensors in frames without a buffer."""
    return TensorKind.FIRST if direction is Direction.FORWARD else TensorKind.GRADIENT


def _result(buffer_digest: bytes, tensor: EncodedTensor) -> bytes:
    """Return the digest of a frame's result: the resulting buffer and the frame's bytes.

    The decoded value is finer than the buffer, so that altered bytes could produce another value
    with the same buffer.
    """
    return fingerprint_of(buffer_digest, tensor.payload)
