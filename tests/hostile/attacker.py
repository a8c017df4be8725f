"""The attacker: bare gRPC, the project's messages, and any keys and certificates it obtained.

Nothing here goes through the project's own transport or client: what it refuses to send, others
would. Messages are protobuf or bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc
from google.protobuf.message import Message

from swarm_ft.identity.certificates import Certificate, from_der, host_of, to_pem
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import PrivateKey, key_pem, name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME
from swarm_ft.proto import coordinator_pb2
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION

COORDINATOR, PEER, SNAPSHOTS = (
    f"/swarm_ft.v1.{service}/" for service in ("Coordinator", "Peer", "Snapshots")
)
ANSWER_S = 30.0
"""How long anything may take to be answered, on a busy machine."""
ERROR_KEY = "swarm-error-bin"
OK = "ok"
SILENT = "silent"
"""The code of a call that was not answered in time."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address and the expected name of a callee."""

    endpoint: str
    name: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller's key and certificate, and the authority that it trusts."""

    key: PrivateKey
    certificate: Certificate
    authority: Certificate

    @property
    def name(self) -> str:
        """Return the name of its key."""
        return name_of(self.key.public_key())

    def credentials(self) -> Any:
        """Return the credentials for gRPC."""
        shown = to_pem(self.certificate)
        return grpc.ssl_channel_credentials(to_pem(self.authority), key_pem(self.key), shown)


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a call.

    Attributes:
        code: `ok`; the project's own code of an error; or gRPC's, in capitals, where the other
            side did not answer at all.
        replies: what came before.
    """

    code: str
    message: str = ""
    replies: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        return f"{self.code} ({self.message})" if self.message else self.code


NOT_RECEIVED = Answer("INTERNAL", "Internal error from Core")
"""What gRPC's client puts in the place of the other side's words if these came while it wrote."""


class Call:
    """One call under way, see `calling`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages: list[bytes] = []

    @property
    def messages(self) -> tuple[bytes, ...]:
        """All messages until now."""
        return tuple(self._messages)

    async def send(self, *messages: Message | bytes) -> None:
        """Send these, as far as the other side takes them."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await self._call.wait_for_connection()
            for message in messages:
                if self._call.done():
                    return
                data = message if isinstance(message, bytes) else message.SerializeToString()
                # Not by `write`: when that fails it puts its own words in the place of the other
                # side's, if these have not been read yet.
                await self._call._cython_call.send_serialized_message(data)  # noqa: SLF001

    async def close_sending(self) -> None:
        """Nothing follows."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def receive(self) -> bytes | None:
        """The next message; None at the end, whatever it is."""
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError:
            return None
        if data is grpc.aio.EOF:
            return None
        self._messages.append(data)
        return bytes(data)

    async def receive_all(self, limit: int = 1 << 20) -> Answer:
        """Receive at most `limit` messages, or all."""
        while len(self._messages) < limit and await self.receive() is not None:
            pass
        if len(self._messages) >= limit:
            return Answer(OK, replies=tuple(self._messages))
        return await self._ended()

    async def _ended(self) -> Answer:
        status = await self._call.code()
        replies = tuple(self._messages)
        if status is grpc.StatusCode.OK:
            return Answer(OK, replies=replies)
        for key, value in await self._call.trailing_metadata() or ():
            if key == ERROR_KEY:
                code, _, message = value.decode("utf-8", "replace").partition("\n")
                return Answer(code, message, replies)
        return Answer(status.name, await self._call.details() or "", replies)


@asynccontextmanager
async def calling(target: Target, path: str, caller: Identity | None) -> AsyncIterator[Call]:
    """A call on a connection of its own; None for `who` is plaintext."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_retries", 0),
    ]
    if caller is None:
        channel = grpc.aio.insecure_channel(target.endpoint, options=options)
    else:
        named = ("grpc.ssl_target_name_override", host_of(target.name))
        channel = grpc.aio.secure_channel(
            target.endpoint, caller.credentials(), options=[*options, named]
        )
    try:
        yield Call(channel.stream_stream(path)())
    finally:
        await channel.close()


async def exchange(
    target: Target,
    path: str,
    caller: Identity | None,
    *messages: Message | bytes,
    limit: int = 1 << 20,
    timeout_s: float = ANSWER_S,
) -> Answer:
    """Send all messages at once, and receive at most `limit` replies, or all."""
    try:
        async with asyncio.timeout(timeout_s):
            while (
                answer := await _exchange_once(target, path, caller, messages, limit)
            ) == NOT_RECEIVED:
                pass
            return answer
    except TimeoutError:
        return Answer(SILENT, f"no answer within {timeout_s:g} s")


async def _exchange_once(
    target: Target,
    path: str,
    caller: Identity | None,
    messages: Iterable[Message | bytes],
    limit: int,
) -> Answer:
    async with calling(target, path, caller) as call:
        await call.send(*messages)
        await call.close_sending()
        return await call.receive_all(limit)


# ---- how a stranger becomes somebody


def low_key(below: str) -> PrivateKey:
    """A key whose name sorts before another: who has it is the one to call."""
    while True:
        key = new_key()
        if name_of(key.public_key()) < below:
            return key


def newcomer(invite: Invite, key: PrivateKey, authority: Certificate) -> Identity:
    """Return the identity of a bearer of an invitation before its enrolment."""
    return Identity(
        key, invite.newcomer_certificate(key.public_key(), datetime.now(UTC)), authority
    )


async def enrol(coordinator: Target, identity: Identity) -> tuple[Answer, Identity | None]:
    """Have one's key certified."""
    request = coordinator_pb2.EnrolRequest(protocol_version=PROTOCOL_VERSION)
    answer = await exchange(coordinator, COORDINATOR + "Enrol", identity, request)
    if answer.code != OK or not answer.replies:
        return answer, None
    enrolled = coordinator_pb2.Enrolled.FromString(answer.replies[0])
    certificate = from_der(enrolled.certificate)
    return answer, Identity(identity.key, certificate, identity.authority)


def coordinator_at(endpoint: str) -> Target:
    """The coordinator there."""
    return Target(endpoint, COORDINATOR_NAME)
