"""Attacks on real processes: what would end them, or take all their memory, descriptors, or names.

`swarm-ft init`, a coordinator with its DHT, and two peers that came by an invitation.
"""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hivemind.dht.node import DHTNode

from swarm_ft.api.connections import SwarmAddress, join
from swarm_ft.base.private_files import private_folder
from swarm_ft.errors import RunFailed
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.certificates import Certificate, host_of, to_pem
from swarm_ft.identity.invites import parse_invite
from swarm_ft.identity.keys import key_pem, new_key, write_private
from swarm_ft.identity.records import Signer
from swarm_ft.identity.roles import Role
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import link_pb2
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from tests.fault_matrix.processes import Command
from tests.hostile.attacker import (
    ANSWER_S,
    COORDINATOR,
    PEER,
    Answer,
    Identity,
    Target,
    calling,
    coordinator_at,
    enrol,
    exchange,
    low_key,
    newcomer,
)
from tests.hostile.attacks import expect, readable_by_others
from tests.hostile.browser import Page
from tests.hostile.cells import Outcome
from tests.hostile.honest_client import POLL_S, HonestClient
from tests.hostile.hub import Hub, serving_hub
from tests.hostile.job import make_job, of_model, spec_message, with_blocks
from tests.hostile.options import End
from tests.hostile.scene import Broken

CELL_S = 300.0
START_S = 60.0
STAGES = ("0-3", "3-6")
MEMBERS = 64
"""How many members an invitation of the suite lets in."""
STANDSTILL_S = 20.0
"""How long no step of the honest run may commit: a peer is suspended for 30 s at least."""
DESCRIPTORS, CONNECTIONS = 1024, 1300
"""What the coordinator may open, and what is opened to it."""
MB = 1 << 20


@dataclass
class Processes:
    """A swarm of them.

    Attributes:
        called: the peer whose name sorts first; it is at `peer_at`.
        nodes: of its DHT.
        client: some client's key; it owns nothing.
        peer: some peer's key; no assignment names it.
        invitations: by role, each good for many members.
        authority: of the swarm.
        models: a directory that the peers' owners lend to jobs.
        private: a directory on the peers' machine that no owner lends.
        hub: from which the peers fetch models.
        page: of the coordinator, with its one-time token.
        ends: how jobs ended that had one option at one end of its bounds.
        session: of the owner's browser, once it has opened the page.
        metrics: where the coordinator answers Prometheus.
    """

    coordinator: Command
    peers: list[Command]
    called: Command
    at: Target
    peer_at: Target
    nodes: tuple[str, ...]
    prefix: str
    work_dir: Path
    invitations: Mapping[Role, str]
    authority: Certificate
    models: Path
    private: Path
    hub: Hub
    page: str
    metrics: str
    ends: dict[End, RunPhase | None] = field(default_factory=dict)
    session: Page | None = None
    client: Identity = field(init=False)
    peer: Identity = field(init=False)
    honest_client: HonestClient = field(init=False)

    async def member(self, role: Role) -> Identity:
        """Enrol one more member of this role."""
        newcomer_identity = newcomer(
            parse_invite(self.invitations[role]), low_key(self.peer_at.name), self.authority
        )
        async with asyncio.timeout(START_S):  # a new invitation is heeded within a second
            while (identity := (await enrol(self.at, newcomer_identity))[1]) is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        return identity

    def check_alive(self) -> None:
        """Refuse to go on when a process has ended.

        Raises:
            Broken: the text names it.
        """
        for command in (self.coordinator, *self.peers):
            if not command.is_alive:
                raise Broken(f"process {command.name} has ended")
        self.honest_client.check_alive()

    async def is_whole(self) -> bool:
        """Whether the swarm goes on, after an attack that it did not withstand."""
        try:
            self.check_alive()
            async with asyncio.timeout(STANDSTILL_S):
                await self.honest_client.commits(1)
        except (Broken, RunFailed, TimeoutError):
            return False
        return True

    async def answers(self, within_s: float = 10.0) -> None:
        """A member that comes new is answered."""
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        path = COORDINATOR + "Status"
        answer = await exchange(
            self.at, path, self.honest_client.owner, request, timeout_s=within_s
        )
        expect(answer, "ok")


def cpu_s(pid: int) -> float:
    """Processor time of a process until now, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Attack = Callable[[Processes], Awaitable[None]]


ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    """List an attack under this name."""

    def listed(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return listed


# ---- the swarm


@asynccontextmanager
async def opened(work_dir: Path) -> AsyncIterator[Processes]:
    """All of it, with a run under way of which the quiet one is known."""
    job, home = make_job(work_dir), work_dir / "swarm"
    models, private = work_dir / "models", work_dir / "private"
    private_folder(home)
    models.mkdir()
    private.mkdir()
    journal = ("--journal", str(home / "journal.db"))
    async with AsyncExitStack() as stack:

        async def start(name: str, *arguments: str) -> Command:
            command = await Command.start(name, (*arguments, "--json"), work_dir)
            stack.push_async_callback(command.kill)
            return command

        async def invite(role: str, uses: int) -> str:
            options = ("--role", role, "--uses", str(uses), *journal)
            return str((await (await start("invite", "invite", *options)).first_words())["invite"])

        await (await start("init", "init", *journal)).first_words()
        with descriptors(DESCRIPTORS):
            coordinator = await start(
                "coordinator", "coordinator", *journal, "--metrics", "127.0.0.1:0"
            )
        words = await coordinator.first_words()
        at = coordinator_at(str(words["endpoint"]))
        word = await invite("peer", MEMBERS)
        resources = lending(work_dir / "model", models)
        hub = stack.enter_context(serving_hub(work_dir / "model"))
        with patch.dict(os.environ, hub.environment(work_dir / "hub-cache")):
            peers = [
                await start(f"peer-{i}", *serving(word, layers, home / f"peer-{i}"), *resources)
                for i, layers in enumerate(STAGES)
            ]
        greetings = [await peer.first_words() for peer in peers]
        called = min(range(len(greetings)), key=lambda i: str(greetings[i]["peer"]))
        peer_at = Target(str(greetings[called]["endpoint"]), str(greetings[called]["peer"]))
        client_word = await invite("client", MEMBERS)
        way = SwarmAddress(invite=parse_invite(client_word), initial_peers=(), dht_prefix="")
        joined_swarm = await stack.enter_async_context(join(way))
        swarm = Processes(
            coordinator=coordinator,
            peers=peers,
            called=peers[called],
            at=at,
            peer_at=peer_at,
            nodes=tuple(map(str, words["addresses"])),  # type: ignore[call-overload]
            prefix="swarm-ft",
            work_dir=home,
            invitations={Role.CLIENT: client_word, Role.PEER: word},
            authority=Authority.open(home / "journal.db.keys").certificate,
            models=models,
            private=private,
            hub=hub,
            page=str(words["page"]),
            metrics=str(words["metrics"]),
        )
        swarm.client, swarm.peer = await swarm.member(Role.CLIENT), await swarm.member(Role.PEER)
        owner = await swarm.member(Role.CLIENT)
        swarm.honest_client = HonestClient(
            joined_swarm.directory, owner, job, len(STAGES), work_dir
        )
        stack.push_async_callback(swarm.honest_client.close)
        await swarm.honest_client.open()
        yield swarm


def lending(*directories: Path) -> tuple[str, ...]:
    """Return a volunteer's options for the directories from which jobs may take models."""
    return tuple(word for directory in directories for word in ("--models", str(directory)))


@asynccontextmanager
async def undisturbed(swarm: Processes) -> AsyncIterator[None]:
    """The honest run commits steps all the time, and no process ends.

    Raises:
        Broken: no step committed for `STANDSTILL_S`, or a process ended.
    """
    began_s = time.monotonic()
    yield
    swarm.check_alive()
    await swarm.honest_client.commits(1)
    pause_s = swarm.honest_client.longest_pause_s(began_s)
    if pause_s > STANDSTILL_S:
        raise Broken(f"the honest run committed no step for {pause_s:.0f} s")


def serving(word: str, layers: str, folder: Path) -> tuple[str, ...]:
    """Return the command that starts a volunteer."""
    return ("serve-stage", word, "--layers", layers, "--buffer-dir", str(folder))


async def run_cells(cells: Sequence[str], work_dir: Path) -> AsyncGenerator[Outcome, None]:
    """Outcomes in the order of the cells, then that of the runs beside them."""
    remaining, number, problem, num_runs = list(cells), 0, "", 0
    began_s = time.monotonic()
    while remaining:
        async with opened(work_dir / f"swarm-{number}") as swarm:
            number += 1
            is_whole = True
            while remaining and is_whole:
                outcome = await _one(swarm, remaining.pop(0))
                is_whole = not outcome.problem or await swarm.is_whole()
                yield outcome
            if is_whole:
                try:
                    num_runs += await swarm.honest_client.concluded()
                except Exception as error:  # noqa: BLE001 - it is the runs' outcome
                    problem = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began_s
    yield Outcome(cell="runs-of-processes-as-the-quiet-one", problem=problem, seconds=seconds)


async def _one(swarm: Processes, name: str) -> Outcome:
    began_s, problem = time.monotonic(), ""
    try:
        async with asyncio.timeout(CELL_S):
            await ATTACKS[name](swarm)
            swarm.check_alive()
            await swarm.honest_client.commits(1)
            swarm.check_alive()
    except TimeoutError:
        problem = f"not over after {CELL_S:.0f} s"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's
        problem = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began_s
    return Outcome(cell=name, problem=problem, seconds=seconds)


# ---- 1 and 2: what ended volunteers' processes


@attack("01-processes-of-volunteers")
async def volunteers(swarm: Processes) -> None:
    spec = swarm.honest_client.job.spec
    for number, job in enumerate((of_model(spec, "/nonexistent/model"), with_blocks(spec, 1))):
        header = pb.SubmitHeader(
            spec=spec_message(job),
            spec_digest=job.digest(),
            run_id=f"job-{number}",
            protocol_version=PROTOCOL_VERSION,
        )
        tokens = pb.SampleTokens(sample=0, token_ids=b"".join(swarm.honest_client.job.samples))
        parts = pb.SubmitPart(header=header), pb.SubmitPart(tokens=tokens)
        expect(await exchange(swarm.at, COORDINATOR + "Submit", swarm.client, *parts), "ok")
    await swarm.honest_client.another_run()
    request = pb.CancelRequest(run_id="job-1", protocol_version=PROTOCOL_VERSION)
    await exchange(swarm.at, COORDINATOR + "Cancel", swarm.client, request)


# ---- 5 and 20: the DHT


@asynccontextmanager
async def dht_node(swarm: Processes) -> AsyncIterator[DHTNode]:
    """A stranger's, of other software."""
    node = await DHTNode.create(initial_peers=list(swarm.nodes))
    try:
        yield node
    finally:
        await node.shutdown()


@attack("05-records-of-the-coordinator")
async def false_records(swarm: Processes) -> None:
    authority = Authority.open(swarm.work_dir / "journal.db.keys").signer.name
    stranger, later = Signer(new_key()), round(time.time()) + 100
    signed = stranger.signed(Role.COORDINATOR, "127.0.0.1:6666", later)
    async with dht_node(swarm) as node:
        for value in ("127.0.0.1:6666", "", signed):
            for name in ("coordinator", authority):
                await node.store(f"{swarm.prefix}.coordinator", value, later, subkey=name)
            found = await swarm.honest_client.directory.find(Role.COORDINATOR)
            if found != {"coordinator": swarm.at.endpoint}:
                raise Broken(f"the coordinator is found at {found}")
    await swarm.honest_client.another_run()


@attack("20-records-beyond-number")
async def flood(swarm: Processes) -> None:
    soon = round(time.time()) + 60
    async with dht_node(swarm) as node:
        for _ in range(20):
            signers = [Signer(new_key()) for _ in range(50)]
            names = [one.name for one in signers]
            values = [one.signed(Role.PEER, "127.0.0.1:1", soon) for one in signers]
            key = [f"{swarm.prefix}.peer"] * len(names)
            await node.store_many(key, values, [soon] * len(names), subkeys=names)
        async with asyncio.timeout(30):
            found = await swarm.honest_client.directory.find(Role.PEER)
    if swarm.peer_at.name not in found:
        raise Broken(f"a peer is not found among {len(found)} records")
    await swarm.honest_client.another_run()


# ---- 19: many handshakes at once


@attack("19-handshakes-at-once")
async def handshakes(swarm: Processes) -> None:
    """They crashed gRPC where a server named its certificates anew in each of them."""
    request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
    for target in (swarm.at, swarm.peer_at):
        for _ in range(8):
            calls = (
                exchange(target, COORDINATOR + "Status", swarm.peer, request) for _ in range(32)
            )
            await asyncio.gather(*calls)
    await swarm.answers()


# ---- 18: memory


def resident_mb(process: Command) -> float:
    """Return the peak memory of a process in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


async def grows(process: Command, attack: Awaitable[object], at_most_mb: float) -> None:
    """Attack, and see how much memory it takes."""
    before = resident_mb(process)
    await attack
    after = resident_mb(process)
    if after - before > at_most_mb:
        raise Broken(f"{process.name} grew from {before:.0f} to {after:.0f} MB")


@attack("18-large-requests")
async def large_requests(swarm: Processes) -> None:
    """48 MB of empty digests, and other messages that nobody needs so large."""
    empty = b"\x42\x00" * (24 << 20)
    header = b"\x0a" + varint(len(empty)) + empty  # RunSpec.model.block_digests

    async def send() -> None:
        for method in ("Submit", "Status", "Watch", "Enrol"):
            answer = await exchange(swarm.at, COORDINATOR + method, swarm.client, header)
            expect(answer, "RESOURCE_EXHAUSTED")
        answer = await exchange(swarm.at, COORDINATOR + "Join", swarm.peer, header)
        expect(answer, "RESOURCE_EXHAUSTED")

    await grows(swarm.coordinator, send(), 100)


def varint(value: int) -> bytes:
    """Encode a length as protobuf does."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


@attack("18-half-sent-jobs")
async def half_sent(swarm: Processes) -> None:
    """Jobs that stop half-way lie on the disk, and not in memory; they are deleted."""
    spec = swarm.honest_client.job.spec
    large = replace(spec, train=replace(spec.train, num_samples=1 << 20))
    header = pb.SubmitHeader(
        spec=spec_message(large),
        spec_digest=large.digest(),
        run_id="half-sent",
        protocol_version=PROTOCOL_VERSION,
    )

    async def send() -> None:
        async with calling(swarm.at, COORDINATOR + "Submit", swarm.client) as call:
            await call.send(pb.SubmitPart(header=header))
            samples_each = MB // 96
            for part in range(80):
                tokens = pb.SampleTokens(
                    sample=part * samples_each, token_ids=bytes(samples_each * 96)
                )
                await call.send(pb.SubmitPart(tokens=tokens))
            await swarm.answers()

    await grows(swarm.coordinator, send(), 60)
    folder = swarm.work_dir / "journal.db.tokens"
    async with asyncio.timeout(60):
        while any(path.stat().st_size > MB for path in folder.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@attack("18-large-link-messages")
async def large_link_messages(swarm: Processes) -> None:
    hello = link_pb2.LinkHello(
        peer_id=swarm.peer.name,
        to=swarm.peer_at.name,
        run_id="run",
        protocol_version=PROTOCOL_VERSION,
    )

    async def send() -> Answer:
        first = link_pb2.LinkMessage(hello=hello)
        return await exchange(swarm.peer_at, PEER + "Link", swarm.peer, first, bytes(100 * MB))

    await grows(swarm.called, send(), 50)


# ---- 28: files


@attack("28-files-of-processes")
async def files(swarm: Processes) -> None:
    open_ones = list(readable_by_others(swarm.work_dir))
    if open_ones:
        raise Broken(f"others may read {', '.join(open_ones[:5])}")


# ---- 17: descriptors


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """This process, and what is started meanwhile, has so many at first, as after `ulimit -Sn`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def connections_held_open(
    swarm: Processes, count: int, **secured: Any
) -> AsyncIterator[None]:
    """Hold so many connections from an attacker's address open, each after a first message."""
    host, _, port = swarm.at.endpoint.rpartition(":")
    writers = list[asyncio.StreamWriter]()

    async def hold() -> None:
        with suppress(OSError):
            opening = asyncio.open_connection(
                host, int(port), local_addr=(ATTACKER_HOST, 0), **secured
            )
            _, writer = await asyncio.wait_for(opening, ANSWER_S)
            writers.append(writer)
            if secured:
                writer.write(PREFACE)

    with descriptors(2 * count):
        try:
            await asyncio.gather(*(hold() for _ in range(count)))
            yield
        finally:
            for writer in writers:
                writer.transport.abort()


ATTACKER_HOST = "127.0.0.9"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How HTTP/2 begins: its magic words, and settings without any."""


@attack("17-connections-that-say-nothing")
async def silent_connections(swarm: Processes) -> None:
    async with connections_held_open(swarm, CONNECTIONS):
        await swarm.answers()
        await swarm.honest_client.another_run()


@attack("17-connections-of-a-member")
async def member_connections(swarm: Processes) -> None:
    """They finish TLS with a member's certificate, speak HTTP/2, and call nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=to_pem(swarm.client.authority).decode())
    certificate, key = swarm.work_dir / "attacker.pem", swarm.work_dir / "attacker.key"
    write_private(certificate, to_pem(swarm.client.certificate))
    write_private(key, key_pem(swarm.client.key))
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    secured = {"ssl": context, "server_hostname": host_of(swarm.at.name)}
    async with connections_held_open(swarm, CONNECTIONS, **secured):
        await swarm.answers()
        await swarm.honest_client.another_run()
