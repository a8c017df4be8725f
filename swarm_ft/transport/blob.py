"""Runs of bytes in parts over a stream: a header that says what they add up to, then the parts.

Sizes are bounded by what the receiver expects and the digest is checked, so that a torn or
foreign blob is an error and never data.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from google.protobuf.message import Message

from swarm_ft.errors import BadFrame, OutOfTurn
from swarm_ft.ids import Attempt, RunId, StepNumber
from swarm_ft.proto import peer_pb2 as pb
from swarm_ft.protocol.spec.checks import bounded, checked_digest, checked_id
from swarm_ft.protocol.spec.digest import RunningDigest, digest_of
from swarm_ft.transport.base import MessageStream

PART_BYTES = 1 << 20
"""Large enough to be cheap, small enough that a frame on another stream is not held up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobName:
    """What a blob belongs to; attempt and step are 0 where they do not matter."""

    run_id: RunId
    attempt: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """A blob's header."""

    name: BlobName
    total_bytes: int
    digest: bytes


async def send_bytes(
    stream: MessageStream[pb.BlobPart, Message], name: BlobName, data: bytes
) -> None:
    """Send `data` as a blob."""
    await stream.send(_header(name, len(data), digest_of(data)))
    for start in range(0, len(data), PART_BYTES):
        await stream.send(pb.BlobPart(data=data[start : start + PART_BYTES]))


async def send_file(
    stream: MessageStream[pb.BlobPart, Message], name: BlobName, path: Path
) -> None:
    """Send a file as a blob; it is read twice, never held as a whole."""
    total_bytes, digest = await asyncio.to_thread(_measure, path)
    await stream.send(_header(name, total_bytes, digest))
    for part in _pieces(path):
        await stream.send(pb.BlobPart(data=part))


async def receive_header(stream: MessageStream[Never, pb.BlobPart], *, max_bytes: int) -> Blob:
    """The header of the blob that arrives.

    Raises:
        MalformedMessage: it is larger than `max_bytes`, or a field is out of bounds.
        OutOfTurn: something else came first.
    """
    first = await stream.receive()
    if first is None or first.WhichOneof("body") != "header":
        raise OutOfTurn(f"{stream.remote}: expected a blob's header")
    header = first.header
    return Blob(
        name=BlobName(
            run_id=RunId(checked_id("run id", header.run_id)),
            attempt=Attempt(header.attempt),
            step=StepNumber(header.step),
        ),
        total_bytes=bounded("blob", header.total_bytes, 0, max_bytes),
        digest=checked_digest("blob's digest", header.digest),
    )


async def receive_bytes(stream: MessageStream[Never, pb.BlobPart], blob: Blob) -> bytes:
    """The bytes of a blob whose header was received.

    Raises:
        BadFrame: too few or too many bytes, or another digest.
    """
    return b"".join([part async for part in _checked_parts(stream, blob)])


async def receive_file(
    stream: MessageStream[Never, pb.BlobPart],
    blob: Blob,
    path: Path,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a blob whose header was received to `path`; a failure leaves a partial file.

    Raises:
        BadFrame: too few or too many bytes, or another digest.
    """
    with path.open("wb") as file:
        async for part in _checked_parts(stream, blob):
            file.write(part)
            if on_bytes is not None:
                on_bytes(len(part))


async def _checked_parts(
    stream: MessageStream[Never, pb.BlobPart], blob: Blob
) -> AsyncIterator[bytes]:
    running, left = RunningDigest(blob.total_bytes), blob.total_bytes
    while left:
        part = await stream.receive()
        data = part.data if part is not None else b""
        if not 0 < len(data) <= left:
            raise BadFrame(
                f"{stream.remote}: blob of {blob.total_bytes} bytes broke off at -{left}"
            )
        running.update(data)
        left -= len(data)
        yield data
    if running.digest() != blob.digest:
        raise BadFrame(f"{stream.remote}: the blob's bytes are not those of its digest")


def _header(name: BlobName, total_bytes: int, digest: bytes) -> pb.BlobPart:
    return pb.BlobPart(
        header=pb.BlobHeader(
            run_id=name.run_id,
            attempt=name.attempt,
            step=name.step,
            total_bytes=total_bytes,
            digest=digest,
        )
    )


def _measure(path: Path) -> tuple[int, bytes]:
    total_bytes = path.stat().st_size
    running = RunningDigest(total_bytes)
    for part in _pieces(path):
        running.update(part)
    return total_bytes, running.digest()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PART_BYTES):
            yield piece
