"""Gives this peer's buffers to peers that its samples pass next. Knows calls; computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from swarm_ft.buffers import BufferKey, BufferStore
from swarm_ft.errors import MalformedMessage, RunMismatch
from swarm_ft.peer.stage_buffers import KeptEnd, StageBuffers
from swarm_ft.proto import peer_pb2 as pb
from swarm_ft.protocol.handover_wire import (
    BuffersRequest,
    SentBuffer,
    buffer_to_wire,
    request_from_wire,
)
from swarm_ft.transport.base import MessageStream

BufferStream = MessageStream[pb.BufferRecord, pb.BuffersRequest]
MAX_WAIT_S = 1.0
"""How long a buffer waits at most for frames to go first: training must not starve it for ever."""

FramesSent = Callable[[], Awaitable[object]]
"""Waits until no frame waits to be sent."""


async def receive_request(stream: BufferStream) -> BuffersRequest:
    """What a peer asks for.

    Raises:
        MalformedMessage: nothing, or nothing there could be.
    """
    request = await stream.receive()
    if request is None:
        raise MalformedMessage(f"{stream.remote}: expected a request for buffers")
    return request_from_wire(request)


async def serve_buffers(
    stream: BufferStream,
    request: BuffersRequest,
    *,
    buffers: StageBuffers,
    store: BufferStore,
    spec_digest: bytes,
    frames_sent: FramesSent,
) -> None:
    """Send what is here of a request, one after the other, each once the link is idle.

    Raises:
        RunMismatch: the other side works by another RunSpec.
    """
    if request.spec_digest != spec_digest:
        raise RunMismatch(
            f"run {request.run_id}: RunSpec digest {spec_digest.hex()} here, "
            f"{request.spec_digest.hex()} at {stream.remote}"
        )
    for sample in request.samples:
        for kept in buffers.at(request.boundary):
            found = await asyncio.to_thread(_read, store, buffers.key(kept, sample), kept)
            if found is not None:
                await _let_frames_go(frames_sent)
                await stream.send(buffer_to_wire(found))


async def _let_frames_go(frames_sent: FramesSent) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MAX_WAIT_S):
            await frames_sent()


def _read(store: BufferStore, key: BufferKey, kept: KeptEnd) -> SentBuffer | None:
    record = store.peek(key)
    if record is None:
        return None
    return SentBuffer(
        sample=key.sample,
        direction=kept.direction,
        digest=record.digest,
        payload=bytes(record.payload),
    )
