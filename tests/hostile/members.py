"""Attacks of members with valid keys on others: floods, places held for ever, false addresses.

By the numbers of benchmarks/reports/security.md. The attackers speak bare gRPC, or bare sockets.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from swarm_ft.identity.roles import Role
from swarm_ft.ids import RunId
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import meeting_pb2
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.reach.sockets import BACK, JOINED, LEG, MAGIC
from tests.hostile.attacker import (
    ANSWER_S,
    COORDINATOR,
    PEER,
    Answer,
    Call,
    Identity,
    calling,
    exchange,
)
from tests.hostile.attacks import expect
from tests.hostile.browser import Page, open_page, raw_request
from tests.hostile.clients import check_discreet, is_taken, new_client, short_job, tokens_for
from tests.hostile.flood import attacking
from tests.hostile.job import of_model, spec_message, with_blocks
from tests.hostile.processes import (
    ATTACKER_HOST,
    CELL_S,
    Processes,
    attack,
    cpu_s,
    descriptors,
    undisturbed,
    varint,
)
from tests.hostile.scene import Broken, hello_of, joined_at

# ---- introductions


class Refused(Exception):
    """The coordinator has ended the conversation."""


class Introduced:
    """A member in its conversation about introductions; it sends what it likes."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.messages: list[meeting_pb2.ToMember] = []
        self._is_over = False
        self._changed = asyncio.Condition()

    async def read(self) -> None:
        """Receive messages until the conversation ends."""
        while not self._is_over:
            data = await self.call.receive()
            async with self._changed:
                self._is_over = data is None
                self.messages += [meeting_pb2.ToMember.FromString(data)] if data else []
                self._changed.notify_all()

    async def received(self, *kinds: str, count: int = 1) -> list[meeting_pb2.ToMember]:
        """The messages of some kinds, once so many came.

        Raises:
            Refused: the conversation ended before.
        """

        def found() -> list[meeting_pb2.ToMember]:
            return [one for one in self.messages if one.WhichOneof("body") in kinds]

        async with asyncio.timeout(ANSWER_S), self._changed:
            await self._changed.wait_for(lambda: self._is_over or len(found()) >= count)
        if len(found()) < count:
            raise Refused
        return found()

    async def meetings_with(self, name: str, count: int = 1) -> list[meeting_pb2.Meet]:
        """Request so many meetings with a member; those that the coordinator grants."""
        want = meeting_pb2.FromMember(want=meeting_pb2.MeetingRequest(name=name))
        await self.call.send(*[want] * count)
        answers = await self.received("meet", "no_meeting", count=count)
        return [one.meet for one in answers if one.WhichOneof("body") == "meet"]


@asynccontextmanager
async def introduced(
    swarm: Processes, identity: Identity, *endpoints: str
) -> AsyncIterator[Introduced]:
    """A member that can be met, and that names these endpoints as its own."""
    async with calling(swarm.at, COORDINATOR + "Introduce", identity) as call:
        reachable = meeting_pb2.Reachable(endpoints=endpoints, protocol_version=PROTOCOL_VERSION)
        await call.send(meeting_pb2.FromMember(reachable=reachable))
        member = Introduced(call)
        reading = asyncio.create_task(member.read())
        try:
            await member.received("relays")
            yield member
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@dataclass
class Listener:
    """A port of a third machine's: it counts who connects to it."""

    port: int
    connections: list[str]


@asynccontextmanager
async def listening(host: str) -> AsyncIterator[Listener]:
    """A listener at this address of the machine, and any port."""
    found = Listener(0, [])

    async def count(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections.append(writer.get_extra_info("sockname")[0])
        writer.close()

    server = await asyncio.start_server(count, host, 0)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


def addresses_of_others(port: int) -> tuple[str, ...]:
    """Ways to write an address that is not the member's own, or not an address."""
    hosts = (
        *("127.0.0.77", "127.0.0.106", "127.255.255.254", "localhost", "127.1", "127.0.1"),
        *("2130706509", "0x7f00004d", "0", "0.0.0.0"),
    )
    return tuple(f"{host}:{port}" for host in hosts)


CONVERSATIONS = 30
DIALLED_S = 4.0
"""A peer that dials a wrong address does so for three seconds."""
SEEN_FIELD = 3
"""Of the message by which a member of an older version tells how a relay sees it."""


@attack("33-addresses-of-others-dialled")
async def third_address(swarm: Processes) -> None:
    """A client tries 300 ways to have a third address dialled by a peer; no one connects there."""
    client, met = await swarm.member(Role.CLIENT), 0
    async with listening("0.0.0.0") as third, undisturbed(swarm):
        addresses = addresses_of_others(third.port)
        for number in range(CONVERSATIONS):
            with suppress(Refused):
                async with introduced(swarm, client, addresses[number % len(addresses)]) as member:
                    for meet in await member.meetings_with(swarm.peer_at.name):
                        met += 1
                        await member.call.send(*(seen_at(meet, address) for address in addresses))
                        await asyncio.sleep(READ_S)
        await asyncio.sleep(DIALLED_S)
        if third.connections:
            raise Broken(f"{len(third.connections)} connections to {set(third.connections)}")
    if not met:
        raise Broken("the client met no peer: this was no attack")


READ_S = 0.1
"""In which the coordinator reads what was sent before the conversation ends."""


def seen_at(meet: meeting_pb2.Meet, address: str) -> bytes:
    """The word of a member that a relay sees its leg at this address."""
    body = field_bytes(1, meet.meeting) + field_bytes(2, address.encode())
    return field_bytes(SEEN_FIELD, body)


def field_bytes(number: int, value: bytes) -> bytes:
    """A field of text or bytes as protobuf writes it."""
    return varint(number << 3 | 2) + varint(len(value)) + value


@attack("33-endpoint-of-anothers-machine")
async def endpoint_elsewhere(swarm: Processes) -> None:
    """A peer joins, and names a third machine's port as the place where others reach it."""
    peer = await swarm.member(Role.PEER)
    async with listening("0.0.0.0") as third, undisturbed(swarm):
        hello = hello_of(peer.name, (0, 3))
        hello.endpoint = f"127.0.0.77:{third.port}"
        async with (
            introduced(swarm, peer, hello.endpoint),
            calling(swarm.at, COORDINATOR + "Join", peer) as call,
        ):
            await call.send(pb.FromPeer(hello=hello))
            await swarm.honest_client.another_run()
            await asyncio.sleep(DIALLED_S)
        if third.connections:
            raise Broken(f"{len(third.connections)} connections to {set(third.connections)}")


@attack("47-private-addresses-of-a-house")
async def private_addresses(swarm: Processes) -> None:
    """A member at the same public address names the router's port; nobody gets it to dial."""
    one, other = await swarm.member(Role.CLIENT), await swarm.member(Role.CLIENT)
    routers = ("192.168.1.1:80", "10.0.0.1:443", "172.16.0.1:22", "[fd00::1]:80")
    async with (
        undisturbed(swarm),
        introduced(swarm, one, *routers),
        introduced(swarm, other) as asking,
    ):
        (meet,) = await asking.meetings_with(one.name)
    dialled = sorted({*meet.endpoints, *meet.house_endpoints} & set(routers))
    if dialled:
        raise Broken(f"a member is told to dial {dialled}")


# ---- the relay


LINKS_TRIED, LINKS_OF_TWO = 40, 16
JOINED_S = 5.0


@attack("37-links-of-the-relay-held")
async def relay_held(swarm: Processes) -> None:
    """Two members hold as many links of the relay as they get; others still get one."""
    hoarders = [await swarm.member(Role.CLIENT) for _ in range(2)]
    honest = [await swarm.member(Role.CLIENT) for _ in range(2)]
    async with undisturbed(swarm), AsyncExitStack() as stack:
        stack.enter_context(descriptors(8 * LINKS_TRIED + 1024))
        links = await relayed(stack, swarm, hoarders, LINKS_TRIED)
        if links > LINKS_OF_TWO:
            raise Broken(f"two members hold {links} links of the relay")
        if not links:
            raise Broken("no link of two members was joined: this was no attack")
        if not await relayed(stack, swarm, honest, 1):
            raise Broken(f"no link is left for others: two members hold {links}")


async def relayed(
    stack: AsyncExitStack, swarm: Processes, members: Sequence[Identity], count: int
) -> int:
    """Count the links, of so many, that the relay joins for two members; the stack holds them."""
    both = [await stack.enter_async_context(introduced(swarm, member)) for member in members]
    meets = await both[0].meetings_with(members[1].name, count)
    theirs = await both[1].received("meet", count=len(meets))
    meets += [one.meet for one in theirs]
    legs = await asyncio.gather(*(left_leg(stack, meet) for meet in meets))
    return sum(legs) // 2


async def left_leg(stack: AsyncExitStack, meet: meeting_pb2.Meet) -> bool:
    """Leave a leg at the relay; whether the relay joins it with the other side's."""
    host, _, port = meet.relay.rpartition(":")
    try:
        async with asyncio.timeout(JOINED_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.transport.abort)
            writer.write(MAGIC + LEG + bytes([len(meet.ticket)]) + meet.ticket)
            (length,) = await reader.readexactly(1)
            await reader.readexactly(length)
            return await reader.readexactly(1) == JOINED
    except (OSError, EOFError, TimeoutError):
        return False


# ---- places that somebody holds


@attack("35-submissions-that-trickle")
async def trickle(swarm: Processes) -> None:
    """Two clients hold four submissions open; the honest client submits as before."""
    spec = short_job(swarm.honest_client.job.spec, num_samples=1 << 20)
    clients = [await swarm.member(Role.CLIENT) for _ in range(2)]
    async with undisturbed(swarm), AsyncExitStack() as stack:
        for number, client in enumerate(clients * 2):
            header = pb.SubmitHeader(
                spec=spec_message(spec),
                spec_digest=spec.digest(),
                run_id=f"trickle-{number}",
                protocol_version=PROTOCOL_VERSION,
            )
            call = await stack.enter_async_context(
                calling(swarm.at, COORDINATOR + "Submit", client)
            )
            await call.send(pb.SubmitPart(header=header))
            row = pb.SampleTokens(sample=0, token_ids=bytes(96))
            await call.send(pb.SubmitPart(tokens=row))
        await swarm.honest_client.another_run()
        await swarm.honest_client.another_run()


FOLLOWERS = 64


@attack("36-events-that-are-never-read")
async def unread_events(swarm: Processes) -> None:
    """A client holds 64 streams of events; another client, and the owner's page, get theirs."""
    client = await swarm.member(Role.CLIENT)
    request = pb.EventsRequest(since=0, follows=True, protocol_version=PROTOCOL_VERSION)
    async with undisturbed(swarm), AsyncExitStack() as stack:
        for _ in range(FOLLOWERS):
            call = await stack.enter_async_context(
                calling(swarm.at, COORDINATOR + "Events", client)
            )
            await call.send(request)
            await call.close_sending()
        for follows in (False, True):
            events = pb.EventsRequest(follows=follows, protocol_version=PROTOCOL_VERSION)
            path, owner = COORDINATOR + "Events", swarm.honest_client.owner
            expect(await exchange(swarm.at, path, owner, events, limit=1), "ok")
        page = await opened_page(swarm)
        shown = await page.first_bytes("/live")
        if b"data:" not in shown:
            raise Broken(f"the owner's page shows {shown[:80]!a}")


# ---- keys that are taken back


REVOKED_S = 2.0
"""A second, and one more for a machine whose cores are busy."""


@attack("38-revoked-with-open-streams")
async def revoked(swarm: Processes) -> None:
    """All streams of a client end within a second of its revocation, at peers as well."""
    client = await new_client(swarm)
    waiting = with_blocks(swarm.honest_client.job.spec, 99)
    if not is_taken(await client.submit(waiting, "of-a-revoked", tokens_for(waiting))):
        raise Broken("the job was refused: this was no attack")
    version: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION}
    reachable = meeting_pb2.Reachable(**version)
    spec = short_job(swarm.honest_client.job.spec, num_samples=1 << 20)
    header = pb.SubmitHeader(
        spec=spec_message(spec), spec_digest=spec.digest(), run_id="revoked", **version
    )
    calls: dict[str, tuple[object, str, Message | None]] = {
        "Watch": (swarm.at, COORDINATOR, pb.WatchRequest(run_id="of-a-revoked", **version)),
        "Events": (swarm.at, COORDINATOR, pb.EventsRequest(follows=True, **version)),
        "Introduce": (swarm.at, COORDINATOR, meeting_pb2.FromMember(reachable=reachable)),
        "Submit": (swarm.at, COORDINATOR, pb.SubmitPart(header=header)),
        "Generate": (swarm.peer_at, PEER, None),
    }
    async with undisturbed(swarm), AsyncExitStack() as stack:
        ended = dict[str, asyncio.Task[Answer]]()
        for method, (target, service, message) in calls.items():
            calling_it = calling(target, service + method, client.identity)  # type: ignore[arg-type]
            call = await stack.enter_async_context(calling_it)
            await call.send(*([message] if message is not None else []))
            ended[method] = asyncio.create_task(call.receive_all())
            stack.callback(ended[method].cancel)
        await asyncio.sleep(1.0)  # streams that are refused at once were never open
        early = {method: str(task.result()) for method, task in ended.items() if task.done()}
        if early:
            raise Broken(f"streams ended before the revocation: {early}")
        await revoke(swarm, client.identity.name)
        await asyncio.wait(ended.values(), timeout=REVOKED_S)
        standing = [method for method, task in ended.items() if not task.done()]
        if standing:
            raise Broken(f"after {REVOKED_S:g} s these streams still stand: {standing}")


async def revoke(swarm: Processes, name: str) -> None:
    """Take a member's key back, as the swarm's owner does."""
    journal = str(swarm.work_dir / "journal.db")
    command = ("keys", "revoke", name, "--journal", journal)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_ft", *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    words, _ = await process.communicate()
    if process.returncode:
        raise Broken(f"swarm-ft keys revoke: {words.decode()}")


# ---- floods


WINDOW_S, KEPT_SHARE, TRIES = 12.0, 0.8, 3


@attack("39-all-floods-at-once")
async def floods(swarm: Processes) -> None:
    """The honest run keeps at least 0.8 of its commits a second beside all floods at once.

    The attacker shares the machine's cores, so the floods are compared with a process that takes as
    much processor time and sends nothing. The pace varies on a machine with other work, so up to
    three windows of each count together.
    """
    beside_floods, beside_silence = list[int](), list[int]()
    client, peer = await swarm.member(Role.CLIENT), await swarm.member(Role.PEER)
    order = swarm.at, client, peer, swarm.honest_client.job.spec, CELL_S
    for _ in range(TRIES):
        async with undisturbed(swarm), attacking(*order) as flood:
            used_s = cpu_s(flood.pid)
            beside_floods.append(await commits_in(swarm, WINDOW_S))
            cpu_share = (cpu_s(flood.pid) - used_s) / WINDOW_S
            if flood.returncode is not None:
                raise Broken("the flood ended by itself: this was no attack")
        async with attacking(*order, burns=cpu_share):
            beside_silence.append(await commits_in(swarm, WINDOW_S))
        if sum(beside_floods) >= KEPT_SHARE * sum(beside_silence):
            return
    raise Broken(f"{beside_floods} commits beside floods, {beside_silence} beside a silent process")


async def commits_in(swarm: Processes, seconds: float) -> int:
    """Count the honest run's commits within so many seconds from now."""
    began_s = time.monotonic()
    await asyncio.sleep(seconds)
    return swarm.honest_client.commits_between(began_s, began_s + seconds)


# ---- HTTP


def session_request(body: bytes) -> bytes:
    """A request for a session, with this body."""
    head = b"POST /session HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: {host}\r\nCookie: swarm-ft-{port}=\xff\xfe\x80\r\n\r\n",
    b"GET /live HTTP/1.1\r\nHost: {host}\r\nCookie: swarm-ft-{port}=\xed\xa0\x80\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: {host}\r\nX-Swarm-FT: \xff\xff\r\nAuthorization: \xff\r\n\r\n",
    b"GET /?token=%ff%fe HTTP/1.1\r\nHost: {host}\r\n\r\n",
    b"GET /?token=\xff HTTP/1.1\r\nHost: {host}\r\n\r\n",
    b"GET /?token=\xe8\xaa\x9e HTTP/1.1\r\nHost: {host}\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: {host}\r\n\r\n",
    b"\x00\x01\x02\x03\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: \xff\xff\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 9000 + b"\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\x00: \x00\r\n\r\n",
    session_request(b'{"token": "\\ud800"}'),
    session_request(b'{"token": ["' + b"[" * 5000 + b'"]}'),
    session_request(b"[" * 9000),
    session_request(b"\xff\xfe"),
)
REQUESTS = 300
LINE_CHARS = 300


@attack("40-requests-of-garbage")
async def garbage(swarm: Processes) -> None:
    """Requests of strangers to the page and the metrics cost a short line a second at most."""
    places = (swarm.page.split("//")[1].partition("/")[0], swarm.metrics)
    began_s = time.monotonic()
    async with undisturbed(swarm):
        for number in range(REQUESTS):
            place = places[number % 2]
            text = GARBAGE[number // 2 % len(GARBAGE)]
            port = place.rpartition(":")[2]
            text = text.replace(b"{host}", place.encode()).replace(b"{port}", port.encode())
            status = await raw_request(place, text)
            if b" 500 " in status:
                raise Broken(f"{text[:60]!a} is answered by {status!a}")
        await asyncio.sleep(1.0)  # the last second's line is to be written
    lines = [e.item for e in swarm.coordinator.log.entries if e.at_s >= began_s]
    own = [line for line in lines if not is_of_the_swarm(line)]
    took_s = time.monotonic() - began_s
    if len(own) > took_s + 1 or any(len(line) > LINE_CHARS for line in own):
        raise Broken(f"{len(own)} lines in {took_s:.0f} s, as {own[0][:200]!a}")


def is_of_the_swarm(line: str) -> bool:
    """Whether a line of the coordinator's log is about runs and members."""
    return any(word in line for word in (" run ", " runs ", "peer ", "enrolled", "relay "))


async def opened_page(swarm: Processes) -> Page:
    """The owner's page; its one-time address is used once."""
    swarm.session = swarm.session or await open_page(swarm.page)
    return swarm.session


@attack("45-page-and-metrics-by-other-names")
async def other_names(swarm: Processes) -> None:
    """Metrics answer only to their own name; the page's session is for this server alone."""
    own = f"GET /metrics HTTP/1.1\r\nHost: {swarm.metrics}\r\nConnection: close\r\n\r\n"
    if b" 200 " not in await raw_request(swarm.metrics, own.encode()):
        raise Broken("metrics do not answer to their own name")
    for host in ("rebound.evil.example", f"rebound.evil.example:{swarm.metrics.split(':')[1]}"):
        text = own.replace(f"Host: {swarm.metrics}", f"Host: {host}")
        status = await raw_request(swarm.metrics, text.encode())
        if b" 200 " in status:
            raise Broken(f"metrics answer to {host}")
    page = await opened_page(swarm)
    if b"data:" not in await page.first_bytes("/live"):
        raise Broken("the owner's page shows nothing")
    shown = [e.item for e in swarm.coordinator.log.entries if "?token=" in e.item]
    if shown:
        raise Broken(f"the log has an address that opens the page: {shown[-1]!a}")


# ---- what others read


READS = 20
SECRET_WORDS = "model '/home/alice/acme': its block 2 has digest 9a3f17c2d45b, the run's 00000000"


@attack("42-reasons-of-others-runs")
async def reasons(swarm: Processes) -> None:
    """A client with a waiting job reads nothing of why a peer cannot host another's."""
    alice, mallory = await new_client(swarm), await new_client(swarm)
    peer, failed = await swarm.member(Role.PEER), asyncio.Event()
    jobs = {
        "alices-run": (
            alice,
            with_blocks(of_model(swarm.honest_client.job.spec, "alices-model"), 7),
        ),
        "mallorys-run": (mallory, with_blocks(swarm.honest_client.job.spec, 5)),
    }

    def fail(message: pb.ToPeer) -> pb.FromPeer | None:
        if message.WhichOneof("body") != "assign":
            return None
        failed.set()
        assign = message.assign
        own: dict[str, Any] = {"run_id": assign.run_id, "attempt": assign.attempt}
        failure = pb.StageFailed(**own, code="bad-model", message=SECRET_WORDS)
        return pb.FromPeer(failed=failure)

    async with undisturbed(swarm), joined_at(swarm.at, peer, (0, 7), fail):
        for name, (client, spec) in jobs.items():
            if not is_taken(await client.submit(spec, name, tokens_for(spec))):
                raise Broken(f"{name} was refused: this was no attack")
        async with asyncio.timeout(ANSWER_S):
            await failed.wait()
        for _ in range(READS):
            await read_by(swarm, mallory.identity, peer.name)
            await asyncio.sleep(0.25)
    for name, (client, _) in jobs.items():
        await client.calls.cancel(RunId(name))


async def read_by(swarm: Processes, reader: Identity, peer: str) -> None:
    """Refuse a status in which a stranger reads of others' runs why a peer is idle.

    Raises:
        Broken: it holds a name, a path or a digest.
    """
    request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
    answer = await exchange(swarm.at, COORDINATOR + "Status", reader, request)
    expect(answer, "ok")
    status = pb.SwarmStatus.FromString(answer.replies[0])
    for member in status.members:
        text = str(member).replace("mallorys-run", "")
        if member.peer_id == peer and any(w in text for w in ("alice", "acme", "9a3f", "digest")):
            raise Broken(f"another client reads {text!a:.300}")
    others = [run for run in status.runs if run.run_id == "alices-run"]
    for run in others:
        check_discreet(run.detail, "acme", "9a3f", "digest")


@attack("43-invitation-in-the-command-line")
async def invitation(swarm: Processes) -> None:
    """Once a peer is up no local user reads its invitation; `invite` prints `@FILE` first."""
    for peer in swarm.peers:
        if swarm.invitations[Role.PEER].encode() in command_line(peer.pid):
            raise Broken("ps shows an invitation")
    journal = str(swarm.work_dir / "journal.db")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm_ft", "invite", "--journal", journal),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, advice = await process.communicate()
    shown = [line.strip() for line in advice.decode().splitlines() if "serve-stage" in line]
    if not shown or "swarm1" in shown[0]:
        raise Broken(f"'swarm-ft invite' advises {shown}")


def command_line(pid: int) -> bytes:
    """A process's arguments, as any local user reads them."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# ---- strangers that have others dialled


BACK_S, BACKS = 3.0, 200


@attack("46-dial-back-as-a-scan")
async def dial_back(swarm: Processes) -> None:
    """A stranger requests 200 checks that a port of its address can be dialled."""
    async with listening(ATTACKER_HOST) as third, undisturbed(swarm):
        began_s = time.monotonic()
        await asyncio.gather(*(request_dial_back(swarm, third.port) for _ in range(BACKS)))
        took_s = time.monotonic() - began_s
        if len(third.connections) > took_s + 2:
            raise Broken(f"{len(third.connections)} ports were dialled in {took_s:.1f} s")


async def request_dial_back(swarm: Processes, port: int) -> None:
    """Request from `ATTACKER_HOST` that the coordinator dials this port of the stranger's."""
    host, _, number = swarm.at.endpoint.rpartition(":")
    with suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(BACK_S):
            reader, writer = await asyncio.open_connection(
                host, int(number), local_addr=(ATTACKER_HOST, 0)
            )
            try:
                writer.write(MAGIC + BACK + port.to_bytes(2, "big"))
                await reader.readexactly(1)
            finally:
                writer.transport.abort()
