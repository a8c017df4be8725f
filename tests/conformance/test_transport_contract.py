"""The contract of every transport; the in-memory double must agree with gRPC."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from swarm_ft import errors
from swarm_ft.build import UPDATE, described_version
from swarm_ft.identity.certificates import LIFETIME_S
from swarm_ft.identity.keys import name_of, new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.protocol.messages.client import (
    MemberStatus,
    RunPhase,
    RunStatus,
    SampleTokens,
    StatusRequest,
    SwarmStatus,
    WatchRequest,
)
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.transport.allowance import CALLERS_PER_ADDRESS, Allowances, Rates
from swarm_ft.transport.base import Channel, Handler, MessageStream, Method, Server, Transport, call
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.metering import Meter
from swarm_ft.transport.methods import EVENTS, JOIN, STATUS, SUBMIT, WATCH
from swarm_ft.transport.rules import RULES
from swarm_ft.transport.validity import Validity
from tests.doubles.clock import ManualTime
from tests.doubles.memory_transport import MemoryTransport
from tests.members import OneMember
from tests.raw_calls import BYTES, MORE_BYTES, RAW
from tests.specs import run_spec

Stream = MessageStream[Any, Any]
DEADLINE_S = 10.0

pytestmark = pytest.mark.timeout(20)


TRANSPORTS: dict[str, Callable[[Meter | None], Transport]] = {
    "memory": MemoryTransport,
    "grpc": lambda meter: GrpcTransport(meter=meter),
    "grpc with TLS": OneMember,
}


@pytest.fixture(params=TRANSPORTS)
def make_transport(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Meter | None], Transport]:
    for method in RULES:  # who may call what is no matter of transports
        monkeypatch.setitem(RULES, method, frozenset({Role.PEER}))
    return TRANSPORTS[request.param]


@pytest.fixture
def transport(make_transport: Callable[[Meter | None], Transport]) -> Transport:
    return make_transport(None)


@asynccontextmanager
async def serving(
    transport: Transport, handlers: dict[Method[Any, Any], Handler]
) -> AsyncIterator[tuple[Server, Channel]]:
    server = await transport.serve("127.0.0.1", 0, handlers)
    channel = transport.connect(server.endpoint)
    try:
        yield server, channel
    finally:
        await channel.close()
        await server.stop()


async def echo(stream: Stream) -> None:
    while (message := await stream.receive()) is not None:
        await stream.send(message)


async def echo_nothing(stream: Stream) -> None:
    while await stream.receive() is not None:
        pass


async def wait_for_ever(_: Stream) -> None:
    await asyncio.Event().wait()


async def raised_by(awaitable: Awaitable[Any]) -> errors.SwarmError:
    with pytest.raises(errors.SwarmError) as caught:
        await awaitable
    return caught.value


@dataclass
class Witness:
    """Runs a handler's body and keeps how it ended, for the test to await."""

    body: Callable[..., Awaitable[None]]
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[BaseException | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def __call__(self, stream: Stream) -> None:
        self.begun.set()
        try:
            await self.body(stream)
        except BaseException as error:
            self.ended.set_result(error)
            raise
        self.ended.set_result(None)


# ---- messages


async def test_messages_come_back_in_order_both_ways(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        sent = [b"%d" % i for i in range(50)]

        async def send_all() -> None:
            for message in sent:
                await stream.send(message)
            await stream.finish()

        async with asyncio.TaskGroup() as group:
            group.create_task(send_all())
            received = [await stream.receive() for _ in sent]
        assert received == sent
        assert await stream.receive() is None
        assert await stream.receive() is None


async def test_empty_messages_are_messages(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"")
        assert await stream.receive() == b""


async def test_a_unary_call_answers_once(transport: Transport) -> None:
    known_status = SwarmStatus(members=(MemberStatus(peer_id=PeerId("p"), layers=None),), runs=())

    async def status(stream: Stream) -> None:
        assert await stream.receive() == StatusRequest()
        await stream.send(known_status)

    async with serving(transport, {STATUS: status}) as (_, channel):
        assert await call(channel, STATUS, StatusRequest(), timeout_s=5.0) == known_status


def run_status(committed_steps: int) -> RunStatus:
    return RunStatus(
        run_id=RunId("r"),
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=committed_steps,
        spec=run_spec(),
    )


async def test_a_client_may_stream_and_get_one_reply(transport: Transport) -> None:
    async def submit(stream: Stream) -> None:
        count = 0
        while await stream.receive() is not None:
            count += 1
        await stream.send(run_status(count))

    async with serving(transport, {SUBMIT: submit}) as (_, channel):
        stream = channel.open(SUBMIT)
        for sample in range(7):
            await stream.send(SampleTokens(sample=SampleId(sample), token_ids=bytes(4)))
        await stream.finish()
        assert await stream.receive() == run_status(7)
        assert await stream.receive() is None


async def test_a_server_may_stream_after_one_request(transport: Transport) -> None:
    async def watch(stream: Stream) -> None:
        request = await stream.receive()
        assert request == WatchRequest(run_id=RunId("r"))
        for step in range(3):
            await stream.send(run_status(step))

    async with serving(transport, {WATCH: watch}) as (_, channel):
        stream = channel.open(WATCH)
        await stream.send(WatchRequest(run_id=RunId("r")))
        await stream.finish()
        expected = [run_status(step) for step in range(3)]
        assert [await stream.receive() for _ in range(4)] == [*expected, None]


async def test_after_half_close_the_server_still_sends(transport: Transport) -> None:
    async def answer_late(stream: Stream) -> None:
        assert await stream.receive() is None
        await stream.send(b"late")

    async with serving(transport, {BYTES: answer_late}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.finish()
        await stream.finish()
        assert await stream.receive() == b"late"


async def test_sending_after_finish_is_refused(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.finish()
        assert isinstance(await raised_by(stream.send(b"x")), errors.OutOfTurn)


async def test_eight_megabytes_arrive_whole(transport: Transport) -> None:
    data = bytes(range(256)) * (8 << 12)
    async with serving(transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(data)
        assert await stream.receive() == data


async def test_many_tasks_may_send_on_one_stream(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        sent = {b"%d" % i * 1000 for i in range(40)}
        async with asyncio.TaskGroup() as group:
            for data in sent:
                group.create_task(stream.send(data))
            received = {await stream.receive() for _ in sent}
        assert received == sent


async def test_calls_on_one_channel_do_not_mix(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo, STATUS: echo_nothing}) as (_, channel):
        call = channel.open(STATUS)
        await call.send(StatusRequest())

        async def exchange(number: int) -> None:
            stream = channel.open(BYTES)
            for turn in range(5):
                message = b"%d/%d" % (number, turn)
                await stream.send(message)
                assert await stream.receive() == message
            await stream.cancel()

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(exchange(number))


async def test_each_end_names_the_other(transport: Transport) -> None:
    seen = asyncio.get_running_loop().create_future()

    async def look(stream: Stream) -> None:
        seen.set_result(stream.remote)

    async with serving(transport, {BYTES: look}) as (server, channel):
        stream = channel.open(BYTES)
        assert stream.remote == server.endpoint
        assert re.fullmatch(r"127\.0\.0\.1:\d+|client", await seen)


# ---- back-pressure and cancellation


async def test_a_slow_reader_bounds_the_writer(transport: Transport) -> None:
    message, count = b"x" * (1 << 20), 64
    go, stalled = asyncio.Event(), asyncio.Event()
    accepted = 0

    async def read_when_allowed(stream: Stream) -> None:
        await go.wait()
        await echo_count(stream)

    async def echo_count(stream: Stream) -> None:
        read = 0
        while await stream.receive() is not None:
            read += 1
        await stream.send(b"%d" % read)

    async def send_all(stream: Stream) -> None:
        nonlocal accepted
        for _ in range(count):
            # A send that is not through after a while of nobody reading waits for the reader.
            sending = asyncio.ensure_future(stream.send(message))
            done, _ = await asyncio.wait({sending}, timeout=0.3)
            if not done:
                stalled.set()
            await sending
            accepted += 1
        await stream.finish()

    async with serving(transport, {BYTES: read_when_allowed}) as (_, channel):
        stream = channel.open(BYTES)
        sender = asyncio.create_task(send_all(stream))
        await stalled.wait()
        assert accepted < count
        go.set()
        await sender
        assert await stream.receive() == b"%d" % count


async def test_a_cancelled_receive_loses_no_message(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        for _ in range(3):
            impatient = asyncio.create_task(stream.receive())
            await asyncio.sleep(0)
            impatient.cancel()
            await asyncio.wait({impatient})
        await stream.send(b"kept")
        assert await stream.receive() == b"kept"


async def test_a_cancelled_send_leaves_the_call_usable(transport: Transport) -> None:
    go = asyncio.Event()

    async def read_late(stream: Stream) -> None:
        await go.wait()
        await echo(stream)

    async with serving(transport, {BYTES: read_late}) as (_, channel):
        stream = channel.open(BYTES)
        sending = [asyncio.create_task(stream.send(b"x" * (1 << 20))) for _ in range(8)]
        await asyncio.sleep(0)
        for task in sending:
            task.cancel()
        await asyncio.wait(sending)
        go.set()
        last = asyncio.create_task(stream.send(b"last"))
        while (message := await stream.receive()) != b"last":
            assert message == b"x" * (1 << 20)
        await last


# ---- callers that send too much

RATES = Rates(
    messages_per_s=2.0,
    messages_burst=16,
    calls_per_s=1.0,
    calls_burst=2,
    bytes_per_s=1_000.0,
    bytes_burst=4_000,
    replies_per_s=3.0,
    replies_burst=7,
)
"""Small ones; they hold for a key, and sixteen times as much for an address."""
RAW_EVENTS: Method[bytes, bytes] = replace(cast(Method[Any, Any], EVENTS), request=RAW, reply=RAW)


class Flooded:
    """A handler that counts what it reads, and the clock by which it is metered."""

    def __init__(self) -> None:
        self.time = ManualTime()
        self.meter = Meter(Allowances(RATES), self.time, self.time.sleep)
        self.num_read = 0
        self.share = CALLERS_PER_ADDRESS

    async def __call__(self, stream: Stream) -> None:
        self.share = 1 if stream.caller is not None else CALLERS_PER_ADDRESS
        while await stream.receive() is not None:
            self.num_read += 1


async def pour(stream: Stream, message: bytes) -> None:
    with suppress(errors.Unavailable):
        while True:
            await stream.send(message)


async def test_a_flooding_caller_is_read_at_its_rate(
    make_transport: Callable[[Meter | None], Transport],
) -> None:
    flooded = Flooded()
    transport = make_transport(flooded.meter)
    async with serving(transport, {MORE_BYTES: flooded, BYTES: echo}) as (_, channel):
        flood = asyncio.create_task(pour(channel.open(MORE_BYTES), b"x"))
        await flooded.time.until_somebody_sleeps()
        at_once = RATES.messages_burst * flooded.share + 1
        assert flooded.num_read == at_once, "the first one counts as a call"
        for second in range(1, 4):
            await flooded.time.pass_by(1.0)
            await flooded.time.until_somebody_sleeps()
            expected = at_once + second * RATES.messages_per_s * flooded.share
            assert flooded.num_read == expected
        # Calls between peers are not metered: they go on beside it while the clock stands still.
        stream = channel.open(BYTES)
        for number in range(100):
            await stream.send(b"%d" % number)
            assert await stream.receive() == b"%d" % number
        flood.cancel()


async def test_calls_of_one_caller_share_its_allowance(
    make_transport: Callable[[Meter | None], Transport],
) -> None:
    flooded = Flooded()
    transport = make_transport(flooded.meter)
    async with serving(transport, {MORE_BYTES: flooded}) as (server, channel):
        other = transport.connect(server.endpoint)
        calls = [one.open(MORE_BYTES) for one in (channel, channel, other)]
        floods = [asyncio.create_task(pour(one, b"x")) for one in calls]
        await flooded.time.until_somebody_sleeps()
        for _ in range(50):
            await flooded.time.pass_by(1.0)
            await flooded.time.until_somebody_sleeps()
        passed = RATES.messages_burst + 50 * RATES.messages_per_s
        assert flooded.num_read <= passed * flooded.share + len(calls)
        for flood in floods:
            flood.cancel()
        await other.close()


async def test_bytes_count_too(make_transport: Callable[[Meter | None], Transport]) -> None:
    flooded = Flooded()
    async with serving(make_transport(flooded.meter), {MORE_BYTES: flooded}) as (_, channel):
        stream = channel.open(MORE_BYTES)
        await stream.send(b"first")
        flood = asyncio.create_task(pour(stream, bytes(70_000)))
        await flooded.time.until_somebody_sleeps()
        assert flooded.num_read == 1, "64,000 bytes pass at once for an address, 4,000 for a key"
        await flooded.time.pass_by(67.0)
        await flooded.time.until_somebody_sleeps()
        assert flooded.num_read == 2
        flood.cancel()


async def test_replies_of_methods_that_tell_a_lot_are_metered(
    make_transport: Callable[[Meter | None], Transport],
) -> None:
    flooded, num_sent = Flooded(), 0

    async def send_without_end(stream: Stream) -> None:
        nonlocal num_sent
        flooded.share = 1 if stream.caller is not None else CALLERS_PER_ADDRESS
        while True:
            await stream.send(b"event")
            num_sent += 1

    async with serving(make_transport(flooded.meter), {RAW_EVENTS: send_without_end}) as (
        _,
        channel,
    ):
        stream = channel.open(RAW_EVENTS)
        await stream.send(b"")

        async def read_all() -> None:
            while True:
                await stream.receive()

        reading = asyncio.create_task(read_all())
        await flooded.time.until_somebody_sleeps()
        assert num_sent == RATES.replies_burst * flooded.share
        await flooded.time.pass_by(1.0)
        await flooded.time.until_somebody_sleeps()
        assert num_sent == (RATES.replies_burst + RATES.replies_per_s) * flooded.share
        reading.cancel()


async def test_a_call_that_is_kept_back_ends_with_its_client(
    make_transport: Callable[[Meter | None], Transport],
) -> None:
    flooded = Flooded()
    witness = Witness(flooded)
    async with serving(make_transport(flooded.meter), {MORE_BYTES: witness}) as (_, channel):
        stream = channel.open(MORE_BYTES)
        flood = asyncio.create_task(pour(stream, b"x"))
        await flooded.time.until_somebody_sleeps()
        flood.cancel()
        await stream.cancel()
        assert isinstance(await witness.ended, errors.Unavailable)


# ---- callers that are valid no more


def a_caller() -> Caller:
    key = new_key().public_key()
    return Caller(role=Role.PEER, name=name_of(key), key=key)


@dataclass
class Keyed:
    """A transport whose calls are all by one member."""

    transport: Transport
    validity: Validity
    name: str

    @classmethod
    def memory(cls) -> "Keyed":
        transport = MemoryTransport(caller=(caller := a_caller()))
        return cls(transport, transport.validity, caller.name)

    @classmethod
    def tls(cls) -> "Keyed":
        transport = OneMember()
        return cls(transport, transport.validity, transport.name)


@pytest.fixture(params=[Keyed.memory, Keyed.tls], ids=["memory", "grpc with TLS"])
async def keyed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Keyed:
    for method in RULES:
        monkeypatch.setitem(RULES, method, frozenset({Role.PEER}))
    made: Keyed = request.param()
    return made


async def test_open_calls_of_a_revoked_key_end_at_once(keyed: Keyed) -> None:
    witness = Witness(echo)
    async with serving(keyed.transport, {BYTES: witness, STATUS: echo_nothing}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        waiting = asyncio.create_task(stream.receive())
        keyed.validity.revoke({"somebody else"})
        await stream.send(b"y")
        assert await waiting == b"y"
        waiting = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        async with asyncio.timeout(1.0):
            keyed.validity.revoke({keyed.name})
            error = await raised_by(waiting)
        assert isinstance(error, errors.NotAllowed)
        assert "its key was revoked" in error.message
        assert isinstance(await witness.ended, errors.Unavailable)
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert isinstance(error, errors.NotAllowed)


async def test_a_handler_that_waits_for_something_else_ends_with_its_callers_key(
    keyed: Keyed,
) -> None:
    witness = Witness(wait_for_ever)
    async with serving(keyed.transport, {BYTES: witness}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        await witness.begun.wait()
        keyed.validity.revoke({keyed.name})
        assert isinstance(await raised_by(stream.receive()), errors.NotAllowed)
        assert isinstance(await witness.ended, asyncio.CancelledError)


async def test_all_calls_end_when_the_swarms_authority_is_replaced(keyed: Keyed) -> None:
    async with serving(keyed.transport, {BYTES: echo}) as (_, channel):
        streams = [channel.open(BYTES) for _ in range(3)]
        for stream in streams:
            await stream.send(b"x")
            assert await stream.receive() == b"x"
        keyed.validity.void("nobody is a member")
        for stream in streams:
            error = await raised_by(stream.receive())
            assert isinstance(error, errors.NotAllowed)
            assert error.message == "nobody is a member"


async def test_open_calls_end_with_their_callers_newest_certificate(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    monkeypatch.setattr("swarm_ft.transport.open_calls.CHECK_EVERY_S", 0.01)
    keyed.validity.unix_s = lambda: now_s
    async with serving(keyed.transport, {BYTES: echo}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        assert await stream.receive() == b"x"
        first_end_s = now_s + 2 * LIFETIME_S
        keyed.validity.certified(keyed.name, first_end_s)
        keyed.validity.certified(keyed.name, first_end_s - 60.0)  # an older one changes nothing
        now_s = first_end_s - 1.0
        for _ in range(20):
            await asyncio.sleep(0.01)
        await stream.send(b"renewed")
        assert await stream.receive() == b"renewed"
        now_s = first_end_s + 1.0
        error = await raised_by(stream.receive())
        assert isinstance(error, errors.Unavailable), "its client may come again"
        assert "its certificate has expired" in error.message


# ---- errors


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
async def test_a_handlers_error_reaches_the_client_with_code_and_message(
    transport: Transport, code: str
) -> None:
    async def refuse(stream: Stream) -> None:
        await stream.receive()
        raise errors.from_code(code, "größe 12: 期待 24\x1b[31m")

    async with serving(transport, {STATUS: refuse}) as (_, channel):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert type(error) is errors.BY_CODE[code]
        assert error.message.startswith("größe 12: 期待 24")


async def test_an_error_comes_after_the_messages_before_it(transport: Transport) -> None:
    async def three_then_fail(stream: Stream) -> None:
        for _ in range(3):
            await stream.send(b"x")
        raise errors.NonFinite("loss is nan")

    async with serving(transport, {BYTES: three_then_fail}) as (_, channel):
        stream = channel.open(BYTES)
        assert [await stream.receive() for _ in range(3)] == [b"x"] * 3
        for _ in range(2):
            assert isinstance(await raised_by(stream.receive()), errors.NonFinite)


async def test_a_sender_learns_the_error_that_ended_the_call(transport: Transport) -> None:
    async def refuse(_: Stream) -> None:
        raise errors.RunMismatch("other digest")

    async def send_until_refused(stream: Stream) -> None:
        while True:
            await stream.send(b"x" * 1000)

    async with serving(transport, {BYTES: refuse}) as (_, channel):
        error = await raised_by(send_until_refused(channel.open(BYTES)))
        assert isinstance(error, errors.RunMismatch)
        assert error.message == "other digest"


async def test_a_sender_that_has_replies_to_read_learns_the_error(transport: Transport) -> None:
    replies = [b"%d" % number for number in range(3)]

    async def answer_then_refuse(stream: Stream) -> None:
        for reply in replies:
            await stream.send(reply)
        raise errors.RunMismatch("other digest")

    async with serving(transport, {BYTES: answer_then_refuse}) as (_, channel):
        stream = channel.open(BYTES)
        while True:
            try:
                await stream.send(b"x" * 1000)
            except errors.RunMismatch:
                break
        assert [await stream.receive() for _ in replies] == replies
        assert isinstance(await raised_by(stream.receive()), errors.RunMismatch)


async def test_a_refusal_beside_the_first_reply_ends_the_call(transport: Transport) -> None:
    async def refuse_while_sending(stream: Stream) -> None:
        sending = asyncio.ensure_future(stream.send(b"x" * 1000))
        await asyncio.sleep(0)
        sending.cancel()  # the write goes on
        raise errors.RunMismatch("other digest")

    async def receive_all(stream: Stream) -> None:
        while await stream.receive() is not None:
            pass

    async with serving(transport, {BYTES: refuse_while_sending}) as (_, channel):
        error = await raised_by(receive_all(channel.open(BYTES)))
        assert isinstance(error, errors.RunMismatch)


async def test_a_sender_learns_that_the_call_ended_cleanly(transport: Transport) -> None:
    async def leave(_: Stream) -> None:
        return

    async with serving(transport, {BYTES: leave}) as (_, channel):
        stream = channel.open(BYTES)
        assert await stream.receive() is None
        assert isinstance(await raised_by(stream.send(b"x")), errors.Unavailable)


@pytest.mark.parametrize("grouped", [False, True])
async def test_an_unknown_exception_is_logged_and_hidden(
    transport: Transport, grouped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("secret path /home/someone")

    async def buggy(_: Stream) -> None:
        if not grouped:
            await fail()
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async with serving(transport, {STATUS: buggy}) as (_, channel):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert type(error) is errors.InternalError
        assert "secret" not in error.message
        assert "secret" in caplog.text


async def test_a_swarm_error_inside_a_task_group_reaches_the_client(transport: Transport) -> None:
    async def fail() -> None:
        raise errors.BadFrame("too short")

    async def handler(_: Stream) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async with serving(transport, {STATUS: handler}) as (_, channel):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert isinstance(error, errors.BadFrame)


# A client that thinks the rpc's requests are others: what it sends is the hello of a FromPeer.
LYING: Method[bytes, Any] = replace(cast(Method[Any, Any], JOIN), request=RAW)
VERSION = bytes([15 << 3, PROTOCOL_VERSION])


async def greeted_with(transport: Transport, hello: bytes) -> tuple[object, errors.SwarmError]:
    """Return what a server of JOIN received or its error, then the client's error."""
    seen = asyncio.get_running_loop().create_future()

    async def read(stream: Stream) -> None:
        try:
            seen.set_result(await stream.receive())
        except errors.SwarmError as error:
            seen.set_result(error)
            raise

    async with serving(transport, {JOIN: read}) as (_, channel):
        stream = channel.open(LYING)
        await stream.send(hello)
        return await seen, await raised_by(stream.receive())


async def test_bytes_that_are_no_such_message_are_malformed(transport: Transport) -> None:
    seen, greeting = await greeted_with(transport, b"\x08\xff")  # breaks off inside a number
    assert type(seen) is type(greeting) is errors.MalformedMessage


async def test_a_field_out_of_its_bounds_is_malformed_and_names_its_sender(
    transport: Transport,
) -> None:
    seen, greeting = await greeted_with(transport, b"\x0a\x03a/b" + VERSION)
    assert isinstance(seen, errors.MalformedMessage)
    words = (
        r"(client|127\.0\.0\.1:\d+) sent FromPeer\.hello\.peer_id: expected 1 to 64 .* got 'a/b'"
    )
    assert re.fullmatch(words, seen.message)
    assert (type(greeting), greeting.message) == (type(seen), seen.message)


async def test_another_version_is_told_apart_from_what_is_malformed(transport: Transport) -> None:
    seen, greeting = await greeted_with(transport, b"\x0a\x05alice")
    assert type(seen) is type(greeting) is errors.VersionMismatch
    assert greeting.message == (
        f"the coordinator (swarm-ft {described_version()}) has protocol version "
        f"{PROTOCOL_VERSION}, peer alice has an older one: update peer alice ({UPDATE})"
    )


async def test_a_message_that_is_refused_does_not_take_the_next_one_with_it(
    transport: Transport,
) -> None:
    seen: list[Any] = []

    async def read(stream: Stream) -> None:
        while len(seen) < 2:
            try:
                seen.append(await stream.receive())
            except errors.MalformedMessage as error:
                seen.append(error)

    async with serving(transport, {JOIN: read}) as (_, channel):
        stream = channel.open(MORE_BYTES)
        await stream.send(VERSION)
        await stream.send(b"")  # an empty FromPeer
        assert await stream.receive() is None
    assert [type(one) for one in seen] == [errors.MalformedMessage] * 2
    assert "peer_id" in seen[0].message
    assert "expected one of hello, " in seen[1].message


async def test_a_method_that_is_not_served_is_refused(transport: Transport) -> None:
    async with serving(transport, {BYTES: echo}) as (_, channel):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert isinstance(error, errors.InternalError)


async def test_who_is_nowhere_is_unavailable(transport: Transport) -> None:
    with pytest.raises(errors.Unavailable):
        transport.connect("", "somebody")


async def test_an_answer_that_does_not_come_in_time_is_unavailable(transport: Transport) -> None:
    async with serving(transport, {STATUS: wait_for_ever}) as (_, channel):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=0.05))
        assert isinstance(error, errors.Unavailable)


async def test_a_unary_call_without_a_reply_is_malformed(transport: Transport) -> None:
    async def silent(stream: Stream) -> None:
        await stream.receive()

    async with serving(transport, {STATUS: silent}) as (_, channel):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert isinstance(error, errors.MalformedMessage)


# ---- who goes away


async def test_a_handler_that_receives_sees_the_client_cancel(transport: Transport) -> None:
    witness = Witness(echo)
    async with serving(transport, {BYTES: witness}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        await stream.receive()
        await stream.cancel()
        assert isinstance(await witness.ended, errors.Unavailable)
        assert isinstance(await raised_by(stream.receive()), errors.Unavailable)
        assert isinstance(await raised_by(stream.send(b"x")), errors.Unavailable)


async def test_a_client_that_vanishes_is_never_taken_for_one_that_finished(
    transport: Transport,
) -> None:
    for _ in range(25):
        witness = Witness(echo)
        async with serving(transport, {BYTES: witness}) as (_, channel):
            stream = channel.open(BYTES)
            await stream.send(b"x")
            await witness.begun.wait()
            await channel.close()
            assert isinstance(await witness.ended, errors.Unavailable)


async def test_a_handler_that_sends_sees_the_client_cancel(transport: Transport) -> None:
    async def pour(stream: Stream) -> None:
        while True:
            await stream.send(b"x" * 100_000)

    witness = Witness(pour)
    async with serving(transport, {BYTES: witness}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.receive()
        await stream.cancel()
        assert isinstance(await witness.ended, errors.Unavailable)


async def test_a_handler_that_waits_for_something_else_is_cancelled(transport: Transport) -> None:
    witness = Witness(wait_for_ever)
    async with serving(transport, {BYTES: witness}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        await witness.begun.wait()
        await stream.cancel()
        assert isinstance(await witness.ended, asyncio.CancelledError)


async def test_a_handler_may_drop_its_call(transport: Transport) -> None:
    async def drop(stream: Stream) -> None:
        await stream.receive()
        await stream.cancel()
        await stream.receive()

    witness = Witness(drop)
    async with serving(transport, {BYTES: witness}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        assert isinstance(await raised_by(stream.receive()), errors.Unavailable)
        assert isinstance(await witness.ended, errors.Unavailable)


async def test_a_client_sees_the_server_stop(transport: Transport) -> None:
    witness = Witness(echo)
    async with serving(transport, {BYTES: witness}) as (server, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        await stream.receive()
        waiting = asyncio.create_task(stream.receive())
        await server.stop()
        assert isinstance(await raised_by(waiting), errors.Unavailable)
        assert witness.ended.done()
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
        assert isinstance(error, errors.Unavailable)


async def test_a_stop_with_grace_lets_calls_end(transport: Transport) -> None:
    witness = Witness(echo)
    async with serving(transport, {BYTES: witness}) as (server, channel):
        stream = channel.open(BYTES)
        await stream.send(b"x")
        await witness.begun.wait()
        stopping = asyncio.create_task(server.stop(grace_s=DEADLINE_S))
        await stream.finish()
        assert await stream.receive() == b"x"
        assert await stream.receive() is None
        await stopping
        assert await witness.ended is None


async def test_cancelling_an_ended_call_changes_nothing(transport: Transport) -> None:
    witness = Witness(echo)
    async with serving(transport, {BYTES: witness}) as (_, channel):
        stream = channel.open(BYTES)
        await stream.finish()
        assert await stream.receive() is None
        await stream.cancel()
        assert await witness.ended is None
        assert await stream.receive() is None


# ---- addresses


async def test_a_refused_connection_is_unavailable_at_once(transport: Transport) -> None:
    server = await transport.serve("127.0.0.1", 0, {})
    await server.stop()
    channel = transport.connect(server.endpoint)
    async with asyncio.timeout(2.0):
        error = await raised_by(call(channel, STATUS, StatusRequest(), timeout_s=5.0))
    assert isinstance(error, errors.Unavailable)
    assert server.endpoint in error.message
    await channel.close()


async def test_a_taken_port_is_one_clear_line(transport: Transport) -> None:
    server = await transport.serve("127.0.0.1", 0, {})
    error = await raised_by(
        transport.serve("127.0.0.1", int(server.endpoint.rpartition(":")[2]), {})
    )
    assert isinstance(error, errors.PortInUse)
    assert server.endpoint in error.message
    assert "\n" not in error.message
    await server.stop()


async def test_a_port_is_free_again_after_stop(transport: Transport) -> None:
    server = await transport.serve("127.0.0.1", 0, {BYTES: echo})
    port = int(server.endpoint.rpartition(":")[2])
    await server.stop()
    again = await transport.serve("127.0.0.1", port, {BYTES: echo})
    assert again.endpoint == server.endpoint
    await again.stop()


async def test_a_port_of_zero_is_a_free_one_each_time(transport: Transport) -> None:
    servers = [await transport.serve("127.0.0.1", 0, {}) for _ in range(2)]
    assert len({server.endpoint for server in servers}) == 2
    for server in servers:
        await server.stop()
