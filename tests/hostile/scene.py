"""The scene of an attack: the swarm, the honest client's runs, and everybody's keys."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from swarm_ft.coordinator.decide import blame
from swarm_ft.coordinator.plan import lateness
from swarm_ft.errors import RunFailed
from swarm_ft.identity.roles import Role
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.proto import run_pb2
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from tests.hostile.attacker import COORDINATOR, Answer, Call, Identity, Target, calling, exchange
from tests.hostile.callers import Callers, Kind, make_callers
from tests.hostile.honest_client import HonestClient
from tests.hostile.job import Job, make_job, spec_message, with_blocks
from tests.hostile.victim import Victim

ALIVE_S = 0.5


class Broken(Exception):
    """A property does not hold; the message names it."""


@dataclass
class Scene:
    """See the module's docstring.

    Attributes:
        spare_run: one of the owner's, that nobody can host: it may be cancelled.
    """

    victim: Victim
    honest_client: HonestClient
    callers: Callers
    spare_run: str = ""
    work_dir: Path = field(default_factory=Path)

    @staticmethod
    def draw() -> int:
        """Draw a number for a name that nobody had yet."""
        return secrets.randbits(32)

    def identity_of(self, kind: Kind) -> Identity:
        """A caller that has a key."""
        found = self.callers[kind]
        if found is None:
            raise Broken(f"a {kind} has no key")
        return found

    def header_of(self, spec: RunSpec, run_id: str = "") -> pb.SubmitHeader:
        """Return the header of a job, under a name of its own."""
        return pb.SubmitHeader(
            spec=spec_message(spec),
            spec_digest=spec.digest(),
            run_id=run_id or f"run-{self.draw():x}",
            protocol_version=PROTOCOL_VERSION,
        )

    async def submit(
        self,
        kind: Kind,
        spec: RunSpec,
        run_id: str = "",
        samples: Sequence[bytes] | None = None,
    ) -> Answer:
        """Submit a job as this caller; under a name of its own, with the usual data."""
        header = self.header_of(spec, run_id)
        tokens = b"".join(self.honest_client.job.samples if samples is None else samples)
        parts = [pb.SubmitPart(header=header)]
        parts += [pb.SubmitPart(tokens=pb.SampleTokens(sample=0, token_ids=tokens))]
        return await exchange(
            self.victim.coordinator, COORDINATOR + "Submit", self.callers[kind], *parts
        )

    async def cancel(self, caller: Identity, run_id: str) -> Answer:
        """End a run as this caller."""
        request = pb.CancelRequest(run_id=run_id, protocol_version=PROTOCOL_VERSION)
        return await exchange(self.victim.coordinator, COORDINATOR + "Cancel", caller, request)

    async def status(self, caller: Identity) -> pb.SwarmStatus:
        """The swarm as this caller sees it."""
        found = pb.SwarmStatus(num_members=1)
        while (len(found.members), len(found.runs)) < (found.num_members, found.num_runs):
            request = pb.StatusRequest(
                first_member=len(found.members),
                first_run=len(found.runs),
                protocol_version=PROTOCOL_VERSION,
            )
            answer = await exchange(
                self.victim.coordinator, COORDINATOR + "Status", caller, request
            )
            if answer.code != "ok":
                raise Broken(f"Status: {answer}")
            page = pb.SwarmStatus.FromString(answer.replies[0])
            found.MergeFrom(page)
            if not page.members and not page.runs:
                break
        return found

    async def idle_of(self, name: str) -> str:
        """Wait until a member is idle and return the reason that the run's owner reads."""
        while True:
            for member in (await self.status(self.honest_client.owner)).members:
                if member.peer_id == name and member.idle:
                    return member.idle
            await asyncio.sleep(0.05)

    @property
    def is_whole(self) -> bool:
        """Whether swarm and honest runs go on."""
        try:
            self.check_whole()
        except RunFailed:
            return False
        return True

    def check_whole(self) -> None:
        """Refuse to go on with a swarm that is broken.

        Raises:
            RunFailed: a part of it, or the run beside the attacks, has ended.
        """
        self.victim.check_alive()
        self.honest_client.check_alive()

    async def check_members(self) -> None:
        """All honest peers are there, and at work.

        Raises:
            Broken: one is not.
        """
        self.victim.check_alive()
        names = {m.peer_id for m in (await self.status(self.honest_client.owner)).members}
        missing = [p.target.name for p in self.victim.peers if p.target.name not in names]
        if missing:
            raise Broken(f"honest peers are no members any more: {', '.join(missing)}")


@asynccontextmanager
async def opened(work_dir: Path) -> AsyncIterator[Scene]:
    """A swarm with a run under way, of which the quiet run is known."""
    job = make_job(work_dir)
    with hasty():
        async with _scene(job, work_dir) as scene:
            yield scene


@contextmanager
def hasty() -> Iterator[None]:
    """The swarm's own patience, shortened: what it waits for comes in milliseconds here."""
    with (
        patch.object(blame, "RETRY_S", 0.1),
        patch.object(lateness, "LOAD_S", 15.0),
    ):
        yield


@asynccontextmanager
async def _scene(job: Job, work_dir: Path) -> AsyncIterator[Scene]:
    async with Victim(work_dir / "swarm") as victim:
        owner = await victim.member(Role.CLIENT)
        honest_client = HonestClient(victim.directory, owner, job, len(victim.peers), work_dir)
        try:
            await honest_client.open()
            scene = Scene(victim, honest_client, await make_callers(victim, owner))
            scene.work_dir = work_dir
            scene.spare_run = await _spare_run(scene)
            yield scene
        finally:
            await honest_client.close()


async def _spare_run(scene: Scene) -> str:
    run_id = "a-spare-run"
    answer = await scene.submit(Kind.OWNER, with_blocks(scene.honest_client.job.spec, 99), run_id)
    if answer.code != "ok":
        raise Broken(f"the owner's own job was refused: {answer}")
    await scene.cancel(scene.honest_client.owner, run_id)
    return run_id


# ---- members that a test drives

ReplyTo = Callable[[pb.ToPeer], "pb.FromPeer | None"]


class Member:
    """A member that has joined, and sends any message.

    Attributes:
        messages: all messages of the coordinator.
    """

    def __init__(self, call: Call) -> None:
        self.messages: list[pb.ToPeer] = []
        self._call = call
        self._changed = asyncio.Condition()

    async def receive(self, reply_to: ReplyTo) -> None:
        """Receive all messages of the coordinator and reply to each."""
        while (data := await self._call.receive()) is not None:
            message = pb.ToPeer.FromString(data)
            async with self._changed:
                self.messages.append(message)
                self._changed.notify_all()
            reply = reply_to(message)
            if reply is not None:
                await self._call.send(reply)

    async def live(self) -> None:
        """Send heartbeats for ever."""
        while True:
            await self._call.send(pb.FromPeer(alive=pb.PeerAlive()))
            await asyncio.sleep(ALIVE_S)

    async def wait_for(self, kind: str) -> pb.ToPeer:
        """The first message of this kind, once it came."""

        def found() -> pb.ToPeer | None:
            return next((m for m in self.messages if m.WhichOneof("body") == kind), None)

        async with self._changed:
            await self._changed.wait_for(lambda: found() is not None)
        message = found()
        if message is None:
            raise Broken(f"no {kind} came")
        return message


@asynccontextmanager
async def joined(
    scene: Scene, identity: Identity, layers: tuple[int, int], reply_to: ReplyTo = lambda _: None
) -> AsyncIterator[Member]:
    """A member that offers these layers, serves no port, and answers as it likes."""
    async with joined_at(scene.victim.coordinator, identity, layers, reply_to) as member:
        yield member


@asynccontextmanager
async def joined_at(
    coordinator: Target,
    identity: Identity,
    layers: tuple[int, int],
    reply_to: ReplyTo = lambda _: None,
) -> AsyncIterator[Member]:
    """Join like `joined`, at any coordinator."""
    async with calling(coordinator, COORDINATOR + "Join", identity) as call:
        await call.send(pb.FromPeer(hello=hello_of(identity.name, layers)))
        member = Member(call)
        tasks = [asyncio.create_task(member.receive(reply_to)), asyncio.create_task(member.live())]
        try:
            yield member
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def hello_of(name: str, layers: tuple[int, int]) -> pb.PeerHello:
    """Return a peer's first message."""
    return pb.PeerHello(
        peer_id=name,
        endpoint="127.0.0.1:1",
        layers=run_pb2.LayerRange(start=layers[0], stop=layers[1]),
        memory_bytes=1 << 33,
        protocol_version=PROTOCOL_VERSION,
    )
