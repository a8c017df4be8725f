"""Fetches buffers whose samples are about to pass this peer, from those that have them.

All of it is help: what does not come in time, or at all, costs a key frame, so that no fault here
is worth more than a line in the log.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from swarm_ft.buffers import BufferRecord, BufferStore
from swarm_ft.codec import buffer_bytes
from swarm_ft.errors import BadFrame, MalformedMessage, SwarmError, Unavailable
from swarm_ft.ids import PeerId, SampleId
from swarm_ft.log import get_logger
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.dialling import find_peer
from swarm_ft.peer.stage_buffers import KeptEnd, StageBuffers
from swarm_ft.proto import peer_pb2 as pb
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.coordinator_messages import Assign, FollowBuffers
from swarm_ft.protocol.handover_wire import (
    BuffersRequest,
    SentBuffer,
    buffer_from_wire,
    request_to_wire,
)
from swarm_ft.protocol.peer_messages import BuffersFollowed
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.methods import FETCH_BUFFERS

logger = get_logger(__name__)

SILENCE_S = 10.0
"""A peer that sends nothing for so long is not waited for."""


class BufferFollower:
    """See the module's docstring; lives as long as an attempt.

    Args:
        buffers: what this stage keeps.
        store: where it is kept.
    """

    def __init__(
        self, context: PeerContext, assign: Assign, buffers: StageBuffers, store: BufferStore
    ) -> None:
        self._context = context
        self._assign = assign
        self._buffers = buffers
        self._store = store
        self._orders: asyncio.Queue[FollowBuffers] = asyncio.Queue()
        self._awaited: set[SampleId] = set()

    def follow(self, order: FollowBuffers) -> None:
        """Fetch these, after those that were ordered before."""
        self._awaited.update(order.samples)
        self._orders.put_nowait(order)

    def begun(self, samples: Iterable[SampleId]) -> None:
        """A step began with these: what has not come by now is too late."""
        self._awaited.difference_update(samples)

    async def run(self) -> None:
        """Fetch until cancelled."""
        while True:
            order = await self._orders.get()
            came = await self._fetch(order)
            missing = len(order.samples) - len(came)
            if missing:
                logger.info(
                    "boundary %d: buffers of %d of %d samples did not follow; key frames will do",
                    order.boundary,
                    missing,
                    len(order.samples),
                )
            if came:
                self._context.say(
                    BuffersFollowed(
                        run_id=order.run_id,
                        attempt=order.attempt,
                        boundary=order.boundary,
                        samples=came,
                    )
                )

    async def _fetch(self, order: FollowBuffers) -> tuple[SampleId, ...]:
        """The samples that are complete here now, in the order of need."""
        kept = {k.direction: k for k in self._buffers.at(order.boundary)}
        fetch = _Fetch(order, kept)
        for source in order.sources:
            wanted = [sample for sample in fetch.missing if sample in self._awaited]
            if not wanted or not kept:
                break
            try:
                await self._draw(source, fetch, wanted)
            except SwarmError as error:
                logger.warning("buffers of peer %s: %s", source, error.message)
        return tuple(sample for sample in order.samples if fetch.is_complete(sample))

    async def _draw(self, source: PeerId, fetch: _Fetch, wanted: Sequence[SampleId]) -> None:
        channel = self._context.transport.connect(await find_peer(self._context.directory, source))
        stream = channel.open(FETCH_BUFFERS)
        request = BuffersRequest(
            run_id=fetch.order.run_id,
            spec_digest=self._assign.spec_digest,
            boundary=fetch.order.boundary,
            samples=tuple(wanted),
        )
        try:
            await stream.send(request_to_wire(request))
            await stream.finish()
            while (message := await _next(stream)) is not None:
                # In a thread, since it digests the payload.
                await self._keep(fetch, await asyncio.to_thread(buffer_from_wire, message))
        finally:
            await stream.cancel()
            await channel.close()

    async def _keep(self, fetch: _Fetch, buffer: SentBuffer) -> None:
        kept = fetch.expects(buffer)
        train, model = self._assign.spec.train, self._assign.spec.model
        shape = train.seq_length, model.hidden_size
        expected = buffer_bytes(*shape, train.buffer_bits)
        if len(buffer.payload) != expected:
            raise BadFrame(f"buffer: expected {expected} bytes, got {len(buffer.payload)}")
        if buffer.sample not in self._awaited:
            return
        key = self._buffers.key(kept, buffer.sample)
        record = BufferRecord(buffer.digest, *shape, buffer.payload)
        # What is here, if anything, is older: the sample went past other peers since.
        await asyncio.to_thread(self._store.put, key, record, replace=True)
        fetch.came(buffer)


class _Fetch:
    """One order under way."""

    def __init__(self, order: FollowBuffers, kept: dict[Direction, KeptEnd]) -> None:
        self.order = order
        self._kept = kept
        self._asked = frozenset(order.samples)
        self._came: defaultdict[SampleId, set[Direction]] = defaultdict(set)

    @property
    def missing(self) -> list[SampleId]:
        """Samples that lack something, in the order of need."""
        return [sample for sample in self.order.samples if not self.is_complete(sample)]

    def is_complete(self, sample: SampleId) -> bool:
        """Whether all of a sample's buffers came."""
        return bool(self._kept) and self._came[sample] >= self._kept.keys()

    def expects(self, buffer: SentBuffer) -> KeptEnd:
        """Where a buffer belongs.

        Raises:
            MalformedMessage: it was not asked for.
        """
        kept = self._kept.get(buffer.direction)
        if kept is None or buffer.sample not in self._asked:
            raise MalformedMessage(
                f"buffer of sample {buffer.sample}, {buffer.direction.name.lower()}: not asked for"
            )
        return kept

    def came(self, buffer: SentBuffer) -> None:
        """It is kept."""
        self._came[buffer.sample].add(buffer.direction)


async def _next(
    stream: MessageStream[pb.BuffersRequest, pb.BufferRecord],
) -> pb.BufferRecord | None:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await stream.receive()
    except TimeoutError:
        raise Unavailable(f"sent nothing for {SILENCE_S:g} s") from None
