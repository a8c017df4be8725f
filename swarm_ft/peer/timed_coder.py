"""A coder that tells the peer's timeline how long each frame took, in the thread that it took."""

from __future__ import annotations

from torch import Tensor

from swarm_ft.buffers import BufferStore
from swarm_ft.ids import BlockIndex, RunId
from swarm_ft.peer.coder import FrameCoder, Refusal
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.frame import Frame, FrameKey
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.timeline import SpanKind


class TimedCoder(FrameCoder):
    """See the module's docstring."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        run_id: RunId,
        boundary: BlockIndex,
        store: BufferStore,
        timeline: Timeline,
    ) -> None:
        super().__init__(spec, run_id=run_id, boundary=boundary, store=store)
        self._timeline = timeline

    def encode(self, key: FrameKey, x: Tensor) -> Frame:
        """See `FrameCoder`."""
        begin_s = self._timeline.now_s()
        return self._took(SpanKind.ENCODE, super().encode(key, x), begin_s)

    def encode_again(self, frame: Frame) -> Frame:
        """See `FrameCoder`."""
        begin_s = self._timeline.now_s()
        return self._took(SpanKind.ENCODE, super().encode_again(frame), begin_s)

    def decode(self, frame: Frame) -> Tensor | Refusal:
        """See `FrameCoder`."""
        begin_s = self._timeline.now_s()
        value = super().decode(frame)
        self._took(SpanKind.DECODE, frame, begin_s)
        return value

    def _took(self, kind: SpanKind, frame: Frame, begin_s: float) -> Frame:
        num_bytes = len(frame.tensor.payload)
        self._timeline.add_frame(kind, frame.key, begin_s, self._boundary, num_bytes)
        return frame
