"""A process that floods a coordinator with all kinds of messages.

It is bare gRPC with the keys of one client and one peer, and reads its order as JSON from stdin:

    wants         wishes for meetings over one connection, as fast as they are taken
    status        16 calls of Status at a time
    events        16 calls of Events from the beginning at a time
    alive         10,000 PeerAlive a second
    submissions   four jobs of 1 GiB that come in at 16 KiB/s
    followers     64 calls of Events that follow and are never read

An attacker has a machine of its own elsewhere. Here it shares the cores with the honest run, so its
own work slows the run as well: an attacker that `burns` as much and sends nothing shows by how
much.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from swarm_ft.identity.certificates import from_pem, to_pem
from swarm_ft.identity.keys import key_pem, parse_key
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import meeting_pb2
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.protocol.wire import RUN_SPEC
from tests.hostile.attacker import COORDINATOR, Identity, Target, calling, exchange
from tests.hostile.job import spec_message
from tests.hostile.scene import Broken

NICE = 19
"""An attacker gives way to the swarm, whose cores it shares."""
SLICE_S = 0.01
"""One that burns works for its share of this time, and sleeps for the rest."""
CONCURRENT, FOLLOWERS, SUBMISSIONS = 16, 64, 4
ALIVE_PER_S = 10_000
TRICKLE_BYTES_PER_S = 16 << 10
GIB = 1 << 30


class Attacker:
    """Floods one coordinator until it is stopped."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.at = Target(order["endpoint"], order["name"])
        self.client, self.peer = (_identity(order[role]) for role in ("client", "peer"))
        self.spec = RUN_SPEC.from_bytes(bytes.fromhex(order["spec"]))
        self.counts: dict[str, int] = {}

    def count(self, name: str, number: int = 1) -> None:
        """Note that it was done so often."""
        self.counts[name] = self.counts.get(name, 0) + number

    async def wants(self) -> None:
        """Wish for meetings over one connection, as fast as they are taken."""
        reachable = meeting_pb2.Reachable(protocol_version=PROTOCOL_VERSION)
        want = meeting_pb2.FromMember(
            want=meeting_pb2.MeetingRequest(name="nobody")
        ).SerializeToString()
        async with calling(self.at, COORDINATOR + "Introduce", self.client) as call:
            await call.send(meeting_pb2.FromMember(reachable=reachable))
            while True:
                await call.send(want)
                self.count("wants")

    async def status(self) -> None:
        """Request the status, 16 times at once."""
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        await self._at_a_time("Status", request)

    async def events(self) -> None:
        """Request all events, 16 times at once."""
        await self._at_a_time("Events", pb.EventsRequest(protocol_version=PROTOCOL_VERSION))

    async def alive(self) -> None:
        """Send 10,000 PeerAlive a second."""
        hello = pb.PeerHello(
            peer_id=self.peer.name,
            endpoint="127.0.0.1:1",
            memory_bytes=1,
            protocol_version=PROTOCOL_VERSION,
        )
        alive = pb.FromPeer(alive=pb.PeerAlive()).SerializeToString()
        async with calling(self.at, COORDINATOR + "Join", self.peer) as call:
            await call.send(pb.FromPeer(hello=hello))
            while True:
                await call.send(*[alive] * (ALIVE_PER_S // 100))
                self.count("alive", ALIVE_PER_S // 100)
                await asyncio.sleep(0.01)

    async def submissions(self) -> None:
        """Submit four jobs of 1 GiB at 16 KiB/s each."""
        await asyncio.gather(*(self._trickle(number) for number in range(SUBMISSIONS)))

    async def _trickle(self, number: int) -> None:
        train = self.spec.train
        num_samples = GIB // train.sample_bytes
        spec: RunSpec = replace(self.spec, train=replace(train, num_samples=num_samples))
        while True:
            header = pb.SubmitHeader(
                spec=spec_message(spec),
                spec_digest=spec.digest(),
                run_id=f"trickle-{number}-{time.monotonic_ns()}",
                protocol_version=PROTOCOL_VERSION,
            )
            async with calling(self.at, COORDINATOR + "Submit", self.client) as call:
                await call.send(pb.SubmitPart(header=header))
                first, together = 0, max(1, TRICKLE_BYTES_PER_S // train.sample_bytes)
                ended = asyncio.create_task(call.receive())
                while not ended.done():
                    data = bytes(train.sample_bytes * together)
                    tokens = pb.SampleTokens(sample=first, token_ids=data)
                    await call.send(pb.SubmitPart(tokens=tokens))
                    first += together
                    await asyncio.wait({ended}, timeout=1.0)
                self.count("refused submissions")
            await asyncio.sleep(1.0)

    async def followers(self) -> None:
        """Follow the events 64 times and read nothing."""
        await asyncio.gather(*(self._follow() for _ in range(FOLLOWERS)))

    async def _follow(self) -> None:
        request = pb.EventsRequest(follows=True, protocol_version=PROTOCOL_VERSION)
        while True:
            async with calling(self.at, COORDINATOR + "Events", self.client) as call:
                await call.send(request)
                if await call.receive() is not None:
                    await asyncio.Event().wait()
            self.count("refused followers")
            await asyncio.sleep(1.0)

    async def _at_a_time(self, method: str, request: Message) -> None:
        async def one_after_the_other() -> None:
            while True:
                answer = await exchange(self.at, COORDINATOR + method, self.client, request)
                self.count(f"{method} {answer.code}")

        await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENT)))


FLOODS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    "wants": Attacker.wants,
    "status": Attacker.status,
    "events": Attacker.events,
    "alive": Attacker.alive,
    "submissions": Attacker.submissions,
    "followers": Attacker.followers,
}


async def _flood(attacker: Attacker, floods: list[str], seconds: float) -> None:
    async def again(name: str) -> None:
        while True:
            with suppress(Exception):  # whatever ends a flood, it begins anew
                await FLOODS[name](attacker)
            attacker.count(f"{name} ended")
            await asyncio.sleep(0.1)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*map(again, floods))


def attack(order: dict[str, Any]) -> None:
    """Follow the order, and write the counts of sent messages as JSON."""
    attacker = Attacker(order)
    print("ready", flush=True)  # noqa: T201 - its parent waits for that: imports are no flood
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    if order["burns"]:
        burn(order["burns"], lambda: time.monotonic() - began_s >= order["seconds"])
    else:
        asyncio.run(_flood(attacker, order["floods"], order["seconds"]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    share = used_s / (time.monotonic() - began_s)
    json.dump({"cpu": share, "counts": attacker.counts}, sys.stdout)


def burn(cpu_share: float, is_over: Callable[[], bool]) -> None:
    """Take this share of one core until it is over, and send nothing."""
    began_s, used_s = time.monotonic(), time.process_time()
    while not is_over():
        wanted_s = cpu_share * (time.monotonic() - began_s)
        while time.process_time() - used_s < wanted_s and not is_over():
            pass
        time.sleep(SLICE_S * max(0.0, 1 - cpu_share))


def _identity(fields: dict[str, str]) -> Identity:
    key = parse_key(fields["key"].encode(), Path("stdin"))
    return Identity(
        key, from_pem(fields["certificate"].encode()), from_pem(fields["authority"].encode())
    )


def _fields(identity: Identity) -> dict[str, str]:
    return {
        "key": key_pem(identity.key).decode(),
        "certificate": to_pem(identity.certificate).decode(),
        "authority": to_pem(identity.authority).decode(),
    }


# ---- its parent


@asynccontextmanager
async def attacking(
    at: Target,
    client: Identity,
    peer: Identity,
    spec: RunSpec,
    seconds: float,
    *,
    floods: Collection[str] = tuple(FLOODS),
    burns: float = 0.0,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an attacker; the context begins when it does.

    Args:
        at: the coordinator.
        client, peer: whose keys it has.
        spec: of the jobs that it submits.
        seconds: after which it ends and writes JSON: its share of a core, and what it sent.
        floods: their names.
        burns: it takes this share of a core instead, and sends nothing.
    """
    order = {
        "endpoint": at.endpoint,
        "name": at.name,
        "client": _fields(client),
        "peer": _fields(peer),
        "spec": RUN_SPEC.to_bytes(spec).hex(),
        "floods": list(floods),
        "burns": burns,
        "seconds": seconds,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile.flood"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise Broken("the attacker has no pipes")
        process.stdin.write(json.dumps(order).encode())
        process.stdin.close()
        if await process.stdout.readline() != b"ready\n":
            raise Broken("the attacker did not begin")
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    os.nice(NICE)
    attack(json.load(sys.stdin))
