"""A process that floods a coordinator with all kinds of messages, until it is killed.

`python -m tests.hostile.flood ENDPOINT DIRECTORY`, with keys of a client and of a peer there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from swarm_ft.identity.certificates import from_pem, host_of
from swarm_ft.identity.keys import name_of
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import meeting_pb2
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from tests.hostile.attacker import COORDINATOR
from tests.hostile.pace import NICE
from tests.hostile.scene import hello_of

VERSION: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION}
CALLS = 16
"""Of each short method at a time."""


def channel(endpoint: str, folder: Path, role: str) -> grpc.aio.Channel:
    """A connection with this key, on which all calls of it are made."""
    pem = {name: (folder / name).read_bytes() for name in (f"{role}.pem", f"{role}.key")}
    credentials = grpc.ssl_channel_credentials(
        (folder / "authority.pem").read_bytes(), pem[f"{role}.key"], pem[f"{role}.pem"]
    )
    named = ("grpc.ssl_target_name_override", host_of(COORDINATOR_NAME))
    return grpc.aio.secure_channel(endpoint, credentials, options=[named])


def opened(on: grpc.aio.Channel, method: str) -> Any:
    """A call of a method, both ways open."""
    return on.stream_stream(COORDINATOR + method)()


async def said(call: Any, messages: Iterable[Message]) -> None:
    """Send these; a message for each free moment, when they never end."""
    for message in messages:
        await call.write(message.SerializeToString())


def for_ever(message: Message) -> Iterable[Message]:
    """The same message again and again."""
    while True:
        yield message


async def again(work: Any) -> None:
    """Do it again whenever it ends, however it ends."""
    while True:
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            await work()
        await asyncio.sleep(0.01)


async def short(on: grpc.aio.Channel, method: str, request: Message) -> None:
    """One call, of which all is read."""
    async for _ in on.unary_stream(COORDINATOR + method)(request.SerializeToString()):
        pass


async def wants(on: grpc.aio.Channel) -> None:
    """Request meetings with nobody."""
    call = opened(on, "Introduce")
    await call.write(
        meeting_pb2.FromMember(reachable=meeting_pb2.Reachable(**VERSION)).SerializeToString()
    )
    want = meeting_pb2.FromMember(want=meeting_pb2.Want(name="nobody"))
    reading = asyncio.create_task(all_of(call))
    try:
        await said(call, for_ever(want))
    finally:
        reading.cancel()


async def all_of(call: Any) -> None:
    """Read a call to its end."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


async def alive(on: grpc.aio.Channel, name: str) -> None:
    """A peer that reports that it lives, and failures of runs that are not."""
    call = opened(on, "Join")
    await call.write(pb.FromPeer(hello=hello_of(name, (90, 99))).SerializeToString())
    failed = pb.StageFailed(run_id="no-such-run", attempt=1, code="internal", message="so I say")
    both = pb.FromPeer(alive=pb.PeerAlive()), pb.FromPeer(failed=failed)
    reading = asyncio.create_task(all_of(call))
    try:
        while True:
            await said(call, both)
    finally:
        reading.cancel()


async def flood(endpoint: str, folder: Path) -> None:
    """Everything at once."""
    client, peer = (channel(endpoint, folder, role) for role in ("client", "peer"))
    name = name_of(from_pem((folder / "peer.pem").read_bytes()).public_key())  # type: ignore[arg-type]
    status, events = pb.StatusRequest(**VERSION), pb.EventsRequest(since=0, **VERSION)
    following = pb.EventsRequest(since=0, follows=True, **VERSION)
    async with asyncio.TaskGroup() as group:
        for on in (client, peer):
            group.create_task(again(lambda on=on: wants(on)))
            for _ in range(CALLS):
                group.create_task(again(lambda on=on: short(on, "Status", status)))
                group.create_task(again(lambda on=on: short(on, "Events", events)))
                group.create_task(again(lambda on=on: short(on, "Events", following)))
        group.create_task(again(lambda: alive(peer, name)))
        print("flooding", flush=True)  # noqa: T201 - its parent waits for that


if __name__ == "__main__":
    os.nice(NICE)
    asyncio.run(flood(sys.argv[1], Path(sys.argv[2])))
