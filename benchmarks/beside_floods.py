"""How many steps a second an honest run commits while a client and a peer flood the coordinator.

    python -m benchmarks.beside_floods [--seconds S] [--rounds N] [--floods NAME,...] [--json]

A swarm of real processes on loopback, with keys and TLS: a coordinator, two peers, and an honest
client that trains one job after the other. The attacker is a process of its own: bare gRPC, with
the certificates of one client and one peer. Windows without and with its floods alternate:

    wants         wishes for meetings over one connection, as fast as they are taken
    status        16 calls of Status at a time
    events        16 calls of Events from the beginning at a time
    alive         10,000 PeerAlive a second
    submissions   four jobs of 1 GiB that come in at 16 KiB/s
    followers     64 calls of Events that follow and are never read

It prints, for each kind of window: commits a second, and the processor time of the coordinator and
of the attacker as a share of one core. All processes share this machine's cores, so the attacker
runs at the lowest priority; `idle-attacker` windows show what its own work costs the run. In them
the attacker is busy for as much processor time as its floods took, and sends nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from swarm_ft.identity.certificates import from_pem, to_pem
from swarm_ft.identity.keys import key_pem, parsed_key
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import meeting_pb2
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.protocol.wire import RUN_SPEC
from tests.hostile.attacker import COORDINATOR, Identity, Target, ask, calling
from tests.hostile.job import spec_message
from tests.hostile.pace import NICE, burn, cpu_s
from tests.hostile.processes import Processes, opened

KINDS = ("quiet", "floods", "idle-attacker")
CONCURRENT, FOLLOWERS, SUBMISSIONS = 16, 64, 4
ALIVE_PER_S = 10_000
TRICKLE_BYTES_PER_S = 16 << 10
GIB = 1 << 30


class Attacker:
    """Floods one coordinator until it is stopped."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.at = Target(told["endpoint"], told["name"])
        self.client, self.peer = (_identity(told[role]) for role in ("client", "peer"))
        self.spec = RUN_SPEC.from_bytes(bytes.fromhex(told["spec"]))
        self.counts: dict[str, int] = {}

    def count(self, name: str, number: int = 1) -> None:
        """Note that it was done so often."""
        self.counts[name] = self.counts.get(name, 0) + number

    async def wants(self) -> None:
        """Wish for meetings over one connection, as fast as they are taken."""
        reachable = meeting_pb2.Reachable(protocol_version=PROTOCOL_VERSION)
        want = meeting_pb2.FromMember(want=meeting_pb2.Want(name="nobody")).SerializeToString()
        async with calling(self.at, COORDINATOR + "Introduce", self.client) as call:
            await call.say(meeting_pb2.FromMember(reachable=reachable))
            while True:
                await call.say(want)
                self.count("wants")

    async def status(self) -> None:
        """Ask for the status, 16 times at once."""
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        await self._at_a_time("Status", request)

    async def events(self) -> None:
        """Ask for all events, 16 times at once."""
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
            await call.say(pb.FromPeer(hello=hello))
            while True:
                await call.say(*[alive] * (ALIVE_PER_S // 100))
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
                await call.say(pb.SubmitPart(header=header))
                first, together = 0, max(1, TRICKLE_BYTES_PER_S // train.sample_bytes)
                ended = asyncio.create_task(call.hear())
                while not ended.done():
                    data = bytes(train.sample_bytes * together)
                    tokens = pb.SampleTokens(sample=first, token_ids=data)
                    await call.say(pb.SubmitPart(tokens=tokens))
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
                await call.say(request)
                if await call.hear() is not None:
                    await asyncio.Event().wait()
            self.count("refused followers")
            await asyncio.sleep(1.0)

    async def _at_a_time(self, method: str, request: Message) -> None:
        async def one_after_the_other() -> None:
            while True:
                answer = await ask(self.at, COORDINATOR + method, self.client, request)
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


def attack(told: dict[str, Any]) -> None:
    """The attacker's process; writes what it did as JSON."""
    attacker = Attacker(told)
    print("ready", flush=True)  # noqa: T201
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    if told["burns"]:
        burn(told["burns"], lambda: time.monotonic() - began_s >= told["seconds"])
    else:
        asyncio.run(_flood(attacker, told["floods"], told["seconds"]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    share = used_s / (time.monotonic() - began_s)
    json.dump({"cpu": share, "counts": attacker.counts}, sys.stdout)


def _identity(told: dict[str, str]) -> Identity:
    key = parsed_key(told["key"].encode(), Path("stdin"))
    return Identity(
        key, from_pem(told["certificate"].encode()), from_pem(told["authority"].encode())
    )


def _told(identity: Identity) -> dict[str, str]:
    return {
        "key": key_pem(identity.key).decode(),
        "certificate": to_pem(identity.certificate).decode(),
        "authority": to_pem(identity.authority).decode(),
    }


# ---- the measurement


def _commits(swarm: Processes) -> int:
    return swarm.beside.commits_between(-math.inf, math.inf)


async def window(
    swarm: Processes, seconds: float, floods: list[str], burns: float = 0.0
) -> dict[str, Any]:
    """Commits a second and shares of a core, for so long, beside these floods."""
    told = {
        "endpoint": swarm.at.endpoint,
        "name": swarm.at.name,
        "client": _told(swarm.client),
        "peer": _told(swarm.peer),
        "spec": RUN_SPEC.to_bytes(swarm.beside.job.spec).hex(),
        "floods": floods,
        "burns": burns,
        "seconds": seconds + 1.0,
    }
    process = None
    if floods or burns:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.beside_floods", "--attack"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        if process.stdin is not None and process.stdout is not None:
            process.stdin.write(json.dumps(told).encode())
            process.stdin.close()
            await process.stdout.readline()  # its imports are no flood
    commits, used_s = _commits(swarm), cpu_s(swarm.coordinator.pid)
    began_s = time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    found: dict[str, Any] = {
        "commits_per_s": (_commits(swarm) - commits) / took_s,
        "coordinator_cpu": (cpu_s(swarm.coordinator.pid) - used_s) / took_s,
        "attacker_cpu": 0.0,
    }
    if process is not None:
        answer = json.loads((await process.communicate())[0])
        found |= {"attacker_cpu": answer["cpu"], "counts": answer["counts"]}
    swarm.check_alive()
    return found


async def measure(seconds: float, rounds: int, floods: list[str]) -> dict[str, Any]:
    """Windows of each kind in turns, and their means."""
    with tempfile.TemporaryDirectory() as folder:
        async with opened(Path(folder)) as swarm:
            found: dict[str, list[dict[str, Any]]] = {
                "quiet": [],
                "floods": [],
                "idle-attacker": [],
            }
            for _ in range(rounds):
                found["quiet"].append(await window(swarm, seconds, []))
                found["floods"].append(await window(swarm, seconds, floods))
                burns = min(1.0, found["floods"][-1]["attacker_cpu"])
                found["idle-attacker"].append(await window(swarm, seconds, [], burns))
            means = {kind: _means(windows) for kind, windows in found.items()}
            rate = means["floods"]["commits_per_s"]
            return {
                **means,
                "of_quiet": rate / means["quiet"]["commits_per_s"],
                "of_idle_attacker": rate / means["idle-attacker"]["commits_per_s"],
                "counts": [one["counts"] for one in found["floods"]],
            }


def _means(windows: list[dict[str, Any]]) -> dict[str, float]:
    names = ("commits_per_s", "coordinator_cpu", "attacker_cpu")
    return {name: sum(one[name] for one in windows) / len(windows) for name in names}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floods", default=",".join(FLOODS))
    parser.add_argument("--attack", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.attack:
        os.nice(NICE)
        attack(json.load(sys.stdin))
        return
    found = asyncio.run(measure(asked.seconds, asked.rounds, asked.floods.split(",")))
    if asked.json:
        print(json.dumps(found))  # noqa: T201
        return
    for kind in KINDS:
        print(kind, *(f"{name}={value:.2f}" for name, value in found[kind].items()))  # noqa: T201
    print(f"floods / quiet = {found['of_quiet']:.2f}")  # noqa: T201
    print(f"floods / idle-attacker = {found['of_idle_attacker']:.2f}")  # noqa: T201
    print("attacks:", json.dumps(found["counts"]))  # noqa: T201


if __name__ == "__main__":
    main()
