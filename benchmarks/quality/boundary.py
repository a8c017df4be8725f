"""A cut between two stages, in process: what goes through it is encoded, counted and decoded.

Does for each sample what the two ends of a boundary do, with the project's own codecs, buffers and
feedback. Both ends hold the same buffers, so here they are kept once. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from benchmarks.quality.configs import DEFAULT_BITS, Config
from benchmarks.quality.former import MIXED, encode_mixed, parse_former
from benchmarks.quality.published import parse_published
from benchmarks.quality.reuse import Partly, Reuse, merged, parse_reuse
from swarm_ft.codec import Codec, pack_buffer, unpack_buffer
from swarm_ft.codec.codebook import CodebookCodec
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.feedback import encode_with_feedback
from swarm_ft.codec.spec import Direction
from swarm_ft.ids import BlockIndex, SampleId
from swarm_ft.peer.boundary.side_info import SideInfoKey, SideInfoStore, TensorKind
from swarm_ft.protocol.spec.quality import QualityControl
from swarm_ft.protocol.spec.run_spec import forward_codec_of, key_codec_of
from tests.codecs import parse

MOST = 0.9
"""Of the changes' energy."""


class AnyCodec(Protocol):
    """The project's, or a published one."""

    def encode(self, x: Tensor, base: Tensor | None = None) -> Any:  # noqa: ANN401
        """Encode as `Codec` does."""
        ...

    def encode_and_decode(self, x: Tensor, base: Tensor | None = None) -> tuple[Any, Tensor]:
        """Encode and decode as `Codec` does."""
        ...

    def decode(
        self,
        encoded: Any,  # noqa: ANN401
        base: Tensor | None = None,
        *,
        device: torch.device | None = None,
    ) -> Tensor:
        """Decode as `Codec` does."""
        ...

    def next_base(self, encoded: Any, value: Tensor, base: Tensor | None = None) -> Tensor:  # noqa: ANN401
        """Return the next base as `Codec` does."""
        ...


@dataclass(slots=True)
class Tally:
    """Values sent and the bits they took, headers included."""

    bits: int = 0
    values: int = 0

    def add(self, encoded: Any) -> None:  # noqa: ANN401
        """Count one encoded tensor."""
        self.bits += 8 * len(encoded.to_bytes())
        self.values += encoded.tokens * encoded.channels

    @property
    def rate(self) -> float:
        """Bits a value."""
        return self.bits / max(1, self.values)


@dataclass(slots=True)
class Changes:
    """Changes of samples' values between two visits, over all of their tokens.

    Attributes:
        squared: of the values themselves, summed.
        products: of a token's changes by channel, summed: float64 [channels, channels].
    """

    squared: float = 0.0
    products: Tensor | None = None

    def add(self, x: Tensor, base: Tensor) -> None:
        """Count one sample, [tokens, channels], and what its last visit left."""
        change = (x - base).double()
        self.squared += x.double().square().sum().item()
        products = change.T @ change
        self.products = products if self.products is None else self.products + products

    @property
    def size(self) -> float:
        """Root mean square of the change, of that of the values."""
        if self.products is None:
            return 0.0
        return (self.products.trace().item() / self.squared) ** 0.5

    @property
    def directions(self) -> int:
        """The number of orthogonal directions that have nine tenths of the changes' energy."""
        if self.products is None:
            return 0
        energy = torch.linalg.eigvalsh(self.products).flip(0).cumsum(0)
        return int((energy < MOST * energy[-1]).sum()) + 1


@dataclass(slots=True)
class Learner:
    """The bases of one direction of one boundary: what a stage would learn, step by step."""

    bases: SideInfoStore = field(default_factory=SideInfoStore)
    told: dict[SideInfoKey, bytes] = field(default_factory=dict)

    def begin(self) -> None:
        """Commit the step before."""
        self.bases.commit()

    def along(self, codec: AnyCodec, kind: TensorKind, tally: Tally) -> AnyCodec:
        """Return the codec with its basis; count the bytes of a new basis."""
        if not isinstance(codec, DirectionalCodec | CodebookCodec):
            return codec
        key = SideInfoKey(BlockIndex(0), kind)
        basis = self.bases.get(key)
        if basis is not None and self.told.get(key) != basis.name:
            self.told[key] = basis.name
            tally.bits += 8 * len(basis.data)
        return codec.with_side_info(basis)

    def note(
        self, codec: AnyCodec, kind: TensorKind, sample: int, x: Tensor, base: Tensor | None
    ) -> None:
        """Record the tensor that was sent, if its codec learns a basis from frames."""
        if isinstance(codec, Codec):  # published codecs learn nothing
            key = SideInfoKey(BlockIndex(0), kind)
            self.bases.record_frame(key, SampleId(sample), codec, x, base)


_Sent = tuple[Any, Tensor, Tensor]
"""What was encoded, what the other side computes on, and what both ends keep of it."""


@dataclass(slots=True)
class Channel:
    """One direction of one boundary, with what its ends remember of each sample.

    Attributes:
        codec: of all visits, or of all but the first.
        first: of a sample's first visit; None if that is as all others.
        is_mixed: whether half of what it sends is for the residual.
        waited_for: of later visits of the sample of a batch that all stages wait for; so too.
        waited_row: of that sample in a batch: forward the first, backward the last.
        bits: of a value in a buffer.
        reuse: what of later visits is not sent; None: nothing.
        reused_values: how many were not, since the tally began.
    """

    codec: AnyCodec
    first: AnyCodec | None
    is_delta: bool
    has_residual: bool
    is_mixed: bool = False
    waited_for: AnyCodec | None = None
    waited_row: int = 0
    bits: int = DEFAULT_BITS
    reuse: Reuse | None = None
    reused_values: int = 0
    tally: Tally = field(default_factory=Tally)
    changes: Changes = field(default_factory=Changes)
    learner: Learner = field(default_factory=Learner)
    seen: set[int] = field(default_factory=set)
    buffers: dict[int, bytes] = field(default_factory=dict)
    residuals: dict[int, Tensor] = field(default_factory=dict)

    def send(self, sample: int, x: Tensor, *, all_wait: bool = False) -> Tensor:
        """Return the receiver's values for a sample's float32 [tokens, channels].

        Raises:
            NonFinite: the tensor holds an infinity or NaN.
        """
        if self.first is not None and sample not in self.seen:
            encoded, y, kept = self._send_by(self.first, sample, x, None)
        else:
            encoded, y, kept = self._send_later(sample, x, all_wait=all_wait)
        self.seen.add(sample)
        if self.is_delta or self.reuse:
            self.buffers[sample] = pack_buffer(kept, self.bits)
        self.tally.add(encoded)
        return y

    def _send_later(self, sample: int, x: Tensor, *, all_wait: bool) -> _Sent:
        if self.has_residual:
            residual = self.residuals.get(sample)
            codec = cast(Codec, self.codec)  # published ones have no feedback
            encode = encode_mixed if self.is_mixed else encode_with_feedback
            encoded, self.residuals[sample] = encode(codec, x, residual)
            y = self.codec.decode(encoded, device=x.device)
            return encoded, y, y
        base = self.base_of(sample, x) if sample in self.buffers else None
        if base is not None:
            self.changes.add(x, base)
        used = self.waited_for if all_wait and self.waited_for else self.codec
        if base is not None and self.reuse is not None:
            return self._send_moved(used, sample, x, base, self.reuse)
        return self._send_by(used, sample, x, base)

    def _send_by(self, codec: AnyCodec, sample: int, x: Tensor, base: Tensor | None) -> _Sent:
        base = base if self.is_delta else None
        kind = _kind_of(codec, base)
        used = self.learner.along(codec, kind, self.tally)
        self.learner.note(used, kind, sample, x, base)
        encoded, y = used.encode_and_decode(x, base)
        return encoded, y, used.next_base(encoded, y, base)

    def _send_moved(
        self, codec: AnyCodec, sample: int, x: Tensor, base: Tensor, reuse: Reuse
    ) -> _Sent:
        moved = reuse.moved(x, base)
        self.reused_values += x[~moved].numel()
        frame, sent = None, None
        if moved.any():
            frame, sent, _ = self._send_by(codec, sample, x[moved], base[moved])
        flags = moved if reuse.by_token else moved[:1]
        y = merged(moved, sent, base)
        return Partly(len(x), x.shape[1], flags, frame), y, y

    def forget(self) -> None:
        """Forget all samples."""
        self.seen.clear()
        self.buffers.clear()
        self.residuals.clear()

    def base_of(self, sample: int, x: Tensor) -> Tensor:
        """Return the buffer of the sample's last visit, in the shape and on the device of x."""
        tokens, channels = x.shape
        payload = self.buffers[sample]
        return unpack_buffer(payload, tokens, channels, self.bits, device=x.device)


def _kind_of(codec: AnyCodec, base: Tensor | None) -> TensorKind:
    if isinstance(codec, CodebookCodec):
        return TensorKind.GRADIENT
    return TensorKind.FIRST if base is None else TensorKind.CHANGE


@dataclass(slots=True)
class Boundary:
    """Both directions of one cut.

    Attributes:
        at_inference: forward channels, by name, that evaluation may switch on: `compressed`, as a
            new sample is sent, by the key codec if later visits send deltas; and then `direct`,
            the codec of deltas without its buffers.
        changes_inference: whether `compressed` loses anything.
    """

    forward: Channel
    backward: Channel
    at_inference: dict[str, Channel]
    changes_inference: bool


class Cuts:
    """All boundaries of a model. `cut` is called by the model, between its blocks."""

    def __init__(self, config: Config, count: int, *, adapts: bool = False) -> None:
        self.control = QualityControl.of(config.quality, adapts=adapts) if config.quality else None
        if self.control is not None:
            fw, key = _codecs_of(self.control)
            config = replace(config, fw=fw, key=key)
        self.boundaries = [_boundary_of(config) for _ in range(count)]
        self.mode = "off"
        self.ids: list[int] = []
        self.lengths: list[int] = []

    def begin(self, mode: str, ids: Tensor, lengths: Tensor) -> None:
        """Begin a batch of these samples, whose tensors cross the cuts in both directions.

        `mode` is `train`, `off` or a name of at_inference.
        """
        self.mode, self.ids, self.lengths = mode, ids.tolist(), lengths.tolist()
        if mode == "train":
            for boundary in self.boundaries:
                boundary.forward.learner.begin()
                boundary.backward.learner.begin()

    def cut(self, index: int, x: Tensor) -> Tensor:
        """`x`, [samples, tokens, channels], as the next stage gets it."""
        boundary = self.boundaries[index]
        if self.mode == "train":
            return _Cut.apply(x, self, boundary)
        if self.mode != "off":
            return self.through(boundary.at_inference[self.mode], x)
        return x

    def through(self, channel: Channel, x: Tensor, scale: float = 1.0) -> Tensor:
        """Every sample of `x` times `scale` through `channel`; padding becomes zero."""
        y, waited_row = torch.zeros_like(x), channel.waited_row % len(x)
        with torch.autocast(x.device.type, enabled=False):  # a codec computes in its own dtype
            for row, (sample, length) in enumerate(zip(self.ids, self.lengths, strict=True)):
                sent = x[row, :length].detach().contiguous()
                passed = channel.send(sample, sent * scale, all_wait=row == waited_row)
                y[row, :length] = passed / scale
        return y

    def measured(self, excess: float) -> None:
        """Adapt the codecs, if they are controlled, to the loss in nats that compression added."""
        if self.control is not None:
            self.control = self.control.with_measurement(excess)
            for boundary in self.boundaries:
                later, first = _codecs_of(self.control)
                boundary.forward.codec = _codec(later, Direction.FORWARD)
                boundary.forward.first = _codec(first, Direction.FORWARD)

    def forget(self) -> None:
        """Forget all samples, since none is visited again soon."""
        for boundary in self.boundaries:
            boundary.forward.forget()
            boundary.backward.forget()

    def reused(self) -> float:
        """Return the share of forward tokens that were reused since the last call of `rates`."""
        channels = [boundary.forward for boundary in self.boundaries]
        values = sum(channel.tally.values for channel in channels)
        return sum(channel.reused_values for channel in channels) / max(1, values)

    def rates(self) -> tuple[float, float]:
        """Bits a value since the last call, forward and backward."""
        return self._rate("forward"), self._rate("backward")

    def changes(self) -> list[tuple[float, int]]:
        """Size and directions of what activations did since the last call, by boundary."""
        found = [
            (each.forward.changes.size, each.forward.changes.directions) for each in self.boundaries
        ]
        for boundary in self.boundaries:
            boundary.forward.changes = Changes()
        return found

    def _rate(self, direction: str) -> float:
        total = Tally()
        for boundary in self.boundaries:
            channel: Channel = getattr(boundary, direction)
            total.bits += channel.tally.bits
            total.values += channel.tally.values
            channel.tally, channel.reused_values = Tally(), 0
        return total.rate


class _Cut(torch.autograd.Function):
    """Activations through the forward channel, gradients through the backward one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cuts: Cuts, boundary: Boundary) -> Tensor:  # noqa: ANN401
        ctx.cuts, ctx.boundary = cuts, boundary
        return cuts.through(boundary.forward, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        # Times the samples in the batch: a sample's gradient is then that of its own mean loss,
        # as with one sample a microbatch. The published quantiser is not scale-free.
        scale = float(len(gradient))
        return ctx.cuts.through(ctx.boundary.backward, gradient, scale), None, None


def _codecs_of(control: QualityControl) -> tuple[str, str]:
    """Return the codecs of changes and of first activations."""
    return forward_codec_of(control.step_size), key_codec_of(control.step_size)


def _boundary_of(config: Config) -> Boundary:
    forward = channel_of(config.fw, config.key, Direction.FORWARD)
    backward = channel_of(config.bw, config.first or config.key, Direction.BACKWARD)
    forward.bits = backward.bits = config.bits
    if config.fill:
        forward.waited_for = _codec(config.fill, Direction.FORWARD)
    if config.drain:
        backward.waited_for, backward.waited_row = _codec(config.drain, Direction.BACKWARD), -1
    if config.reuse:
        forward.reuse = parse_reuse(config.reuse)
    if config.first:
        backward.first = _codec(config.first, Direction.BACKWARD)
    compressed = config.key if forward.is_delta else config.fw
    at_inference = {"compressed": compressed}
    if forward.is_delta:
        at_inference["direct"] = _direct(config.fw)
    channels = {k: channel_of(v, "", Direction.FORWARD) for k, v in at_inference.items()}
    return Boundary(forward, backward, channels, compressed != "none")


def _direct(fw: str) -> str:
    """Return the direct counterpart of a codec of deltas: q2+z of aq2+z, top10 of aqtop10."""
    return fw.replace("aqtop", "top").replace("aq", "q")


def _codec(text: str, direction: Direction) -> AnyCodec:
    return parse_published(text) or parse_former(text) or parse(text, direction)


def channel_of(text: str, key: str, direction: Direction) -> Channel:
    """One direction by its codec, and that of first frames where they build on nothing."""
    is_mixed = text.endswith(MIXED)
    codec = _codec(text.removesuffix(MIXED), direction)
    spec = getattr(codec, "spec", None)
    is_delta = bool(getattr(spec or codec, "is_delta", False))
    first = _codec(key, direction) if is_delta else None
    has_residual = is_mixed or bool(getattr(spec, "has_residual", False))
    return Channel(codec, first, is_delta, has_residual, is_mixed)
