"""The attacks on a swarm in this process, by their numbers in benchmarks/reports/security.md.

Each is made by whoever could still make it: where keys keep strangers out, by members.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from google.protobuf.message import Message

from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import Unavailable
from swarm_ft.identity.roles import Role
from swarm_ft.proto import boundary_pb2, link_pb2, run_pb2, snapshot_pb2
from swarm_ft.proto import coordinator_pb2 as pb
from swarm_ft.protocol.messages.control import Assign, FromPeer, PlanStep, StepReady, ToPeer
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.stage.base import Engine
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import LIST_CHUNKS
from tests.hostile.attacker import (
    COORDINATOR,
    OK,
    PEER,
    SNAPSHOTS,
    Answer,
    Identity,
    Target,
    calling,
    exchange,
)
from tests.hostile.callers import Kind
from tests.hostile.job import of_model, with_blocks
from tests.hostile.scene import Broken, Scene, hello_of, joined
from tests.hostile.table import check_details, result_name
from tests.hostile.wicked import wicked

Attack = Callable[[Scene], Awaitable[None]]


ATTACKS: dict[str, Attack] = {}
"""By name, in their order."""


def attack(name: str) -> Callable[[Attack], Attack]:
    """List an attack under this name."""

    def listed(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return listed


def expect(answer: Answer, *codes: str) -> None:
    """Refuse any other end of a call."""
    if answer.code not in codes:
        raise Broken(f"expected {' or '.join(codes)}, got {answer}")


# ---- 1, 2, 15, 16: jobs


@asynccontextmanager
async def submitted(scene: Scene, *specs: RunSpec) -> AsyncIterator[list[str]]:
    """Jobs of a client of its own, as far as they are taken; cancelled in the end."""
    client, taken = scene.identity_of(Kind.CLIENT), list[str]()
    for number, spec in enumerate(specs):
        run_id = f"job-{scene.draw():x}-{number}"
        answer = await scene.submit(Kind.CLIENT, spec, run_id)
        taken += [run_id] if answer.code == OK else []
    try:
        yield taken
    finally:
        for run_id in taken:
            await scene.cancel(client, run_id)


@attack("01-small-model")
async def small_model(scene: Scene) -> None:
    async with submitted(scene, with_blocks(scene.honest_client.job.spec, 1)) as taken:
        await tried(scene, taken)
        await scene.honest_client.another_run()


async def tried(scene: Scene, run_ids: list[str]) -> list[pb.RunSummary]:
    """Jobs of the other client, once peers were looked for, or they failed by themselves."""
    if not run_ids:
        raise Broken("the job was refused: it is no attack")
    while True:
        runs = (await scene.status(scene.identity_of(Kind.CLIENT))).runs
        found = [run for run in runs if run.run_id in run_ids]
        if all(run.detail or run.phase == pb.RUN_PHASE_FAILED for run in found):
            return found
        await asyncio.sleep(0.05)


@attack("02-no-such-model")
async def no_such_model(scene: Scene) -> None:
    async with submitted(
        scene, of_model(scene.honest_client.job.spec, "/nonexistent/model")
    ) as taken:
        await until_failed(scene, taken)
        await scene.honest_client.another_run()


async def until_failed(scene: Scene, run_ids: list[str]) -> None:
    """Wait until jobs that nobody can load have failed, and check their reasons."""
    while True:
        found = await tried(scene, run_ids)
        if all(run.phase == pb.RUN_PHASE_FAILED and "not available" in run.detail for run in found):
            return
        await asyncio.sleep(0.05)


@attack("15-jobs-beyond-number")
async def many_jobs(scene: Scene) -> None:
    """Some wait their turn, and the honest client's runs pass them by; the others are refused."""
    huge = with_blocks(scene.honest_client.job.spec, 4096)
    jobs = [huge, *[with_blocks(scene.honest_client.job.spec, 7)] * 59]
    async with submitted(scene, *jobs) as taken:
        if len(taken) > JOBS_OF_A_CLIENT:
            raise Broken(f"{len(taken)} jobs of one client wait")
        await scene.honest_client.another_run()
        size = (await scene.status(scene.honest_client.owner)).ByteSize()
        if size > 1 << 20:
            raise Broken(f"Status is {size} bytes for others")


JOBS_OF_A_CLIENT = 4


@attack("16-tokens-of-jobs-that-are-over")
async def tokens_go(scene: Scene) -> None:
    async with submitted(scene, *[with_blocks(scene.honest_client.job.spec, 7)] * 5) as taken:
        pass
    async with asyncio.timeout(30):
        while any(t in path.name for path in scene.victim.tokens.iterdir() for t in taken):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@attack("16-more-tokens-than-a-job-may-have")
async def token_quota(scene: Scene) -> None:
    spec = scene.honest_client.job.spec
    large = replace(spec, train=replace(spec.train, num_samples=1 << 24))
    header = pb.SubmitPart(header=scene.header_of(large))
    client = scene.identity_of(Kind.CLIENT)
    async with calling(scene.victim.coordinator, COORDINATOR + "Submit", client) as call:
        hearing = asyncio.create_task(call.receive_all())
        await call.send(header)
        await asyncio.wait({hearing}, timeout=ENDED_SOON_S)
        ended = hearing.result() if hearing.done() else None
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
    if ended is None:
        raise Broken("1.6 GB of tokens are welcome")
    expect(ended, "bad-dataset", "over-quota")


# ---- 3, 4, 12 to 14, 19: members that lie


def failing(code: str) -> Callable[[pb.ToPeer], pb.FromPeer | None]:
    """Answers each assignment with a failure."""

    def reply(message: pb.ToPeer) -> pb.FromPeer | None:
        if message.WhichOneof("body") != "assign":
            return None
        assign = message.assign
        return pb.FromPeer(
            failed=pb.StageFailed(
                run_id=assign.run_id, attempt=assign.attempt, code=code, message="so I say"
            )
        )

    return reply


@attack("03-says-non-finite")
async def reports_non_finite(scene: Scene) -> None:
    peer = await scene.victim.member(Role.PEER)
    async with joined(scene, peer, (4, 6), failing("non-finite")) as member:
        await member.wait_for("assign")
        await scene.honest_client.commits(4)
        await scene.honest_client.another_run()


@attack("04-joins-in-anothers-name")
async def joins_as_another(scene: Scene) -> None:
    member = await scene.victim.member(Role.PEER)
    for peer in scene.victim.peers:
        for name in (peer.target.name, "coordinator"):
            hello = pb.FromPeer(hello=hello_of(name, (0, 2)))
            answer = await exchange(
                scene.victim.coordinator, COORDINATOR + "Join", member, hello, timeout_s=5
            )
            expect(answer, "not-allowed")
    await scene.check_members()


@attack("04-links-in-anothers-name")
async def links_as_another(scene: Scene) -> None:
    peer = await scene.victim.member(Role.PEER)
    for victim, neighbour in ((1, 0), (3, 1)):
        callee, name = (scene.victim.peers[i].target for i in (victim, neighbour))
        expect(await link_in(callee, peer, name.name), "not-allowed")


async def link_in(callee: Target, caller: Identity, name: str) -> Answer:
    """Open a link in some name, for some run."""
    hello = link_pb2.LinkHello(
        peer_id=name, to=callee.name, run_id="run", protocol_version=PROTOCOL_VERSION
    )
    message = link_pb2.LinkMessage(hello=hello)
    return await exchange(callee, PEER + "Link", caller, message, limit=1)


@attack("12-never-ready")
async def never_ready(scene: Scene) -> None:
    peer = await scene.victim.member(Role.PEER)
    async with joined(scene, peer, (2, 4)) as member:
        await member.wait_for("assign")
        await scene.honest_client.commits(4)
        await scene.honest_client.another_run()


@attack("13-takes-nothing-over")
async def false_take_over(scene: Scene) -> None:
    for _ in range(TRIES):
        why = await _idle_after_false_take_over(scene)
        if "copied a state that differs" in why:
            return
    raise Broken(f"it is idle for another reason: {why}")


TRIES = 3
"""Where everything is slow it may be set aside for its links, which nobody has, before it lies."""


async def _idle_after_false_take_over(scene: Scene) -> str:
    peer = await scene.victim.member(Role.PEER)

    def echo(message: pb.ToPeer) -> pb.FromPeer | None:
        if message.WhichOneof("body") == "assign":
            ready = pb.StageReady(run_id=message.assign.run_id, attempt=message.assign.attempt)
            return pb.FromPeer(stage_ready=ready)
        if message.WhichOneof("body") != "catch_up":
            return None
        take = message.catch_up
        return pb.FromPeer(
            caught_up=pb.CaughtUp(
                run_id=take.run_id, attempt=take.attempt, state_bytes=1, proof=take.digest
            )
        )

    async with joined(scene, peer, (0, 2), echo) as member:
        why = await scene.idle_of(peer.name)
        await scene.honest_client.commits(2)
    if any(message.plan.tokens for message in member.messages):
        raise Broken("it was sent tokens")
    return why


@attack("14-fails-always")
async def fails_always(scene: Scene) -> None:
    peer = await scene.victim.member(Role.PEER)
    async with joined(scene, peer, (2, 4), failing("internal")):
        why = await scene.idle_of(peer.name)
        await scene.honest_client.commits(4)
    if "suspended" not in why:
        raise Broken(f"it is idle for another reason: {why}")


@attack("19-joins-beyond-number")
async def many_joins(scene: Scene) -> None:
    peers = [await scene.victim.member(Role.PEER) for _ in range(8)]

    async def join(number: int) -> None:
        name = peers[number % len(peers)].name
        hello = pb.FromPeer(hello=hello_of(name, (2, 4)))
        target, path = scene.victim.coordinator, COORDINATOR + "Join"
        answers.append(await exchange(target, path, peers[number % len(peers)], hello, limit=1))

    answers = list[Answer]()
    for first in range(0, 192, 32):
        await asyncio.gather(*(join(first + i) for i in range(32)))
        await scene.status(scene.honest_client.owner)
    if not any(answer.code == "busy" for answer in answers):
        raise Broken("192 joins of 8 peers were all welcome")
    await scene.honest_client.commits(2)


# ---- 6, 7, 8, 9, 24: what belongs to others


@attack("06-buffers-are-nobodys-to-fetch")
async def buffers(scene: Scene) -> None:
    for kind in (Kind.OUTSIDER, Kind.NEIGHBOUR, Kind.OWNER):
        for service in (PEER, SNAPSHOTS):
            for method in ("FetchBuffers", "Weights", "Boundary"):
                path = service + method
                answer = await exchange(
                    scene.victim.peers[1].target, path, scene.callers[kind], b""
                )
                expect(answer, "UNIMPLEMENTED")


@attack("07-state-of-a-stage")
async def state_of_a_stage(scene: Scene) -> None:
    """Request a stage's state during a takeover, so that there is a state to take."""
    taker = await scene.victim.member(Role.PEER)
    codes = list[str]()
    async with joined(scene, taker, (2, 4)) as member:
        take = (await member.wait_for("catch_up")).catch_up
        for kind in (Kind.OUTSIDER, Kind.CLIENT, Kind.OWNER, Kind.REPLICA, Kind.INSIDER):
            for step in range(scene.honest_client.job.spec.train.num_steps + 1):
                name = result_name(take.run_id, step)
                name.is_result = False
                answer = await exchange(
                    scene.victim.peers[2].target,
                    SNAPSHOTS + "ListChunks",
                    scene.callers[kind],
                    name,
                )
                expect(answer, "not-found", "not-allowed")
                codes.append(answer.code)
    if "not-allowed" not in codes:
        raise Broken("nothing was offered: this was no attack")


@attack("07-paths")
async def paths(scene: Scene) -> None:
    for run_id in ("..", "../../etc/passwd", "a/b", "\0", "%2e%2e", "x" * 5000):
        layers = run_pb2.LayerRange(start=0, stop=2)
        name = snapshot_pb2.ShardName(run_id=run_id, step=0, layers=layers)
        neighbour = scene.callers[Kind.NEIGHBOUR]
        answer = await exchange(
            scene.victim.peers[1].target, SNAPSHOTS + "ListChunks", neighbour, name
        )
        expect(answer, "not-found", "malformed-message")


@attack("08-collects-anothers-result")
async def collects(scene: Scene) -> None:
    async with scene.honest_client.finished() as status:
        request = pb.CollectedRequest(run_id=status.run_id, protocol_version=PROTOCOL_VERSION)
        for kind in (Kind.CLIENT, Kind.OUTSIDER):
            answer = await exchange(
                scene.victim.coordinator, COORDINATOR + "Collected", scene.callers[kind], request
            )
            expect(answer, "not-found", "not-allowed")
        if await scene.honest_client.fetched(status) != result_of(scene):
            raise Broken("the owner's result is another one now")


def result_of(scene: Scene) -> tuple[bytes, ...]:
    """Return the result that every run must have."""
    if scene.honest_client.quiet is None:
        raise Broken("there was no quiet run")
    return scene.honest_client.quiet.weights


@attack("09-cancels-whatever-runs")
async def cancels(scene: Scene) -> None:
    other = await scene.victim.member(Role.CLIENT)
    request = pb.CancelRequest(protocol_version=PROTOCOL_VERSION)
    answer = await exchange(scene.victim.coordinator, COORDINATOR + "Cancel", other, request)
    expect(answer, "not-found")
    expect(await scene.cancel(other, scene.honest_client.run_id), "not-found")


@attack("24-details-of-others-runs")
async def details(scene: Scene) -> None:
    other = await scene.victim.member(Role.CLIENT)
    check_details(scene, await scene.status(other), is_owner=False)
    request = pb.WatchRequest(run_id=scene.honest_client.run_id, protocol_version=PROTOCOL_VERSION)
    answer = await exchange(scene.victim.coordinator, COORDINATOR + "Watch", other, request)
    expect(answer, "not-found")


# ---- 10, 11: links


@attack("10-boundary-of-a-stage-that-is-not-mine")
async def boundary(scene: Scene) -> None:
    """A peer outside the attempt keeps its link unserved; one inside is not served either."""
    outsider = await scene.victim.member(Role.PEER)
    for peer, block in ((1, 2), (2, 2), (3, 4)):
        await unserved(scene, scene.victim.peers[peer].target, outsider, block, is_ended=True)
    insider = scene.identity_of(Kind.INSIDER)
    await unserved(scene, scene.victim.peers[3].target, insider, 4, is_ended=False)
    await scene.honest_client.commits(2)


SILENCE_S = 1.0
"""Nothing that came in so long is taken for nothing that comes."""
ENDED_SOON_S = 30.0


async def unserved(
    scene: Scene, callee: Target, caller: Identity, block: int, *, is_ended: bool
) -> None:
    """Open a boundary and send frames; nothing comes back but the link's own hello.

    Args:
        is_ended: whether the link has to be ended, soon, too.
    """
    async with calling(callee, PEER + "Link", caller) as call:
        hello = link_pb2.LinkHello(
            peer_id=caller.name,
            to=callee.name,
            run_id=scene.honest_client.run_id,
            protocol_version=PROTOCOL_VERSION,
        )
        await call.send(link_pb2.LinkMessage(hello=hello))
        if await call.receive() is None:
            raise Broken(f"the link was refused: {await call.receive_all()}")
        hearing = asyncio.create_task(call.receive_all())
        await call.send(*as_neighbour(scene, caller.name, block))
        await asyncio.wait({hearing}, timeout=ENDED_SOON_S if is_ended else SILENCE_S)
        ended = hearing.result() if hearing.done() else None
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        kinds = [link_pb2.LinkMessage.FromString(one).WhichOneof("body") for one in call.messages]
        if kinds != ["hello"]:
            raise Broken(f"it was served: {kinds}")
        if is_ended and (ended is None or "no assignment" not in ended.message):
            raise Broken(f"the link did not end as it should: {ended}")


def as_neighbour(scene: Scene, name: str, block: int) -> Iterator[Message]:
    """Yield messages of the stage before a block: hellos of possible attempts, bases, frames."""
    status, codec = scene.honest_client.status, parse_codec_spec("none", Direction.FORWARD)
    zeros = EncodedTensor(codec, tokens=24, channels=32, payload=bytes(4 * 24 * 32))
    for attempt in range(1, (status.attempt if status else 0) + 3):
        yield link_pb2.LinkMessage(
            boundary_hello=boundary_pb2.BoundaryHello(
                run_id=scene.honest_client.run_id,
                spec_digest=scene.honest_client.job.spec.digest(),
                boundary=block,
                peer_id=name,
                attempt=attempt,
                window_frames=256,
            )
        )
        for directions in range(1, 9):
            bases = directions.to_bytes(2, "little") + bytes([32, 0, 0, 0, 0]) + bytes(1000)
            yield link_pb2.LinkMessage(basis=boundary_pb2.SharedBasis(basis=bases))
        for sample in range(8):
            key = boundary_pb2.FrameKey(
                attempt=attempt, sample=sample, direction=boundary_pb2.DIRECTION_FORWARD
            )
            frame = boundary_pb2.Frame(
                key=key, kind=boundary_pb2.FRAME_KIND_DIRECT, tensor=zeros.to_bytes()
            )
            yield link_pb2.LinkMessage(frame=frame)


@attack("10-links-of-members-beyond-number")
async def many_links(scene: Scene) -> None:
    """Each of a key of its own: bounded, and all of them ended soon."""
    callee = scene.victim.peers[1].target
    peers = [scene.victim.certified(Role.PEER) for _ in range(80)]

    async def hold(one: Identity) -> Answer:
        hello = link_pb2.LinkHello(
            peer_id=one.name,
            to=callee.name,
            run_id=scene.honest_client.run_id,
            protocol_version=PROTOCOL_VERSION,
        )
        async with calling(callee, PEER + "Link", one) as call, asyncio.timeout(60):
            await call.send(link_pb2.LinkMessage(hello=hello))
            return await call.receive_all()

    answers = await asyncio.gather(*map(hold, peers))
    for answer in answers:
        expect(answer, "unavailable")
    if not any("unknown callers" in answer.message for answer in answers):
        raise Broken("80 members were all kept waiting")
    await scene.honest_client.commits(2)


@attack("11-malformed-again-and-again")
async def malformed(scene: Scene) -> None:
    member, rng = await scene.victim.member(Role.PEER), Random(1)
    before = await attempt_of(scene)
    for peer in scene.victim.peers:
        for path in (PEER + "Link", SNAPSHOTS + "ListChunks", SNAPSHOTS + "FetchChunks"):
            for size in (0, 1, 30, 3000):
                noise = [rng.randbytes(size) for _ in range(3)]
                answer = await exchange(peer.target, path, member, *noise)
                expect(answer, "malformed-message", "out-of-turn", "version-mismatch", "not-found")
    for method in ("Join", "Status", "Enrol"):
        for size in (1, 30, 3000):
            noise = [rng.randbytes(size)]
            answer = await exchange(scene.victim.coordinator, COORDINATOR + method, member, *noise)
            expect(answer, OK, "malformed-message", "out-of-turn", "version-mismatch")
    await scene.honest_client.commits(1)
    after = await attempt_of(scene)
    if before[0] == after[0] and before[1] != after[1]:
        raise Broken(f"attempt {before[1]} became {after[1]}")


async def attempt_of(scene: Scene) -> tuple[str, int]:
    """Return the id and attempt of the owner's newest run."""
    run = (await scene.status(scene.honest_client.owner)).runs[-1]
    return run.run_id, run.attempt


# ---- 21: a peer's place taken


@attack("21-result-from-another")
async def false_result(scene: Scene) -> None:
    """A member serves zeros at the address that a peer's record has for the result."""
    member, victim = await scene.victim.member(Role.PEER), scene.victim.peers[2]
    is_requested = asyncio.Event()

    async def serve(stream: MessageStream[object, object]) -> None:
        is_requested.set()
        await stream.receive()

    own = Credentials(member.key, member.certificate, member.authority)
    false = await GrpcTransport(GrpcOptions(credentials=own)).serve(
        "127.0.0.1", 0, {LIST_CHUNKS: serve}
    )
    directory, name = scene.victim.directory, victim.target.name
    folder = scene.work_dir / f"taken-{scene.draw():x}"
    folder.mkdir()
    async with scene.honest_client.finished() as status:
        replicas = scene.victim.peers[1:3]
        for peer in replicas:
            await directory.announce(Role.PEER, peer.target.name, false.endpoint)
        try:
            await scene.honest_client.client.fetch_shards(status, folder)
            raise Broken("a result was fetched from another peer")
        except Unavailable:
            pass
        finally:
            for peer in replicas:
                await directory.announce(Role.PEER, peer.target.name, peer.target.endpoint)
        if is_requested.is_set():
            raise Broken(f"the client asked somebody else for what {name} has")
        if await scene.honest_client.fetched(status) != result_of(scene):
            raise Broken("the owner's result is another one now")
    await false.stop()


# ---- 22, 23, 25 to 27: peers that take part, and lie or lack something


@attack("22-says-it-is-fast")
async def claims_to_be_fast(scene: Scene) -> None:
    spec = scene.honest_client.job.spec
    train = replace(spec.train, batch_size=16, micro_batch_size=1, num_steps=8)
    name, shares, index = "", list[tuple[int, int]](), [0]

    def claim(message: FromPeer) -> FromPeer:
        return replace(message, compute_s=0.0) if isinstance(message, StepReady) else message

    def note(message: ToPeer) -> None:
        if isinstance(message, Assign):
            stage = [s.peer_id for s in message.assignments if s.layers == LayerRange(2, 4)]
            index[0] = stage.index(peer.target.name) if peer.target.name in stage else -1  # type: ignore[arg-type]
        if isinstance(message, PlanStep) and len(message.microbatches) == 16:
            mine = sum(b.route[1:2] == (index[0],) for b in message.microbatches)
            shares.append((mine, len(message.microbatches)))

    async with wicked(scene, edit=claim, overhear=note) as peer:
        name = peer.target.name
        await member_is_there(scene, name)
        async with submitted(scene, replace(spec, train=train)) as (run_id,):
            await over(scene, scene.identity_of(Kind.CLIENT), run_id)
    if not shares:
        raise Broken("it took no part: this was no attack")
    if any(mine == whole for mine, whole in shares[2:]):
        raise Broken(f"it got all microbatches: {shares}")


async def member_is_there(scene: Scene, name: str) -> None:
    """Wait until somebody is a member."""
    while name not in {m.peer_id for m in (await scene.status(scene.honest_client.owner)).members}:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def over(scene: Scene, client: Identity, run_id: str) -> None:
    """Wait until a run is trained."""
    while True:
        run = next(run for run in (await scene.status(client)).runs if run.run_id == run_id)
        if run.phase == pb.RUN_PHASE_FAILED:
            raise Broken(f"the run failed: {run.detail}")
        if run.phase == pb.RUN_PHASE_FINISHED:
            return
        await asyncio.sleep(0.05)


@attack("23-lies-of-its-norm")
async def lies_of_its_norm(scene: Scene) -> None:
    def lie(message: FromPeer) -> FromPeer:
        if isinstance(message, StepReady):
            return replace(message, squared_grad_norm=1e29)
        return message

    async with wicked(scene, edit=lie) as peer:
        why = await scene.idle_of(peer.target.name)
        await scene.honest_client.commits(2)
    if "a gradient norm that differs" not in why:
        raise Broken(f"it is idle for another reason: {why}")


@attack("25-cannot-load")
async def cannot_load(scene: Scene) -> None:
    def no_memory(spec: RunSpec, layers: LayerRange) -> Engine:
        raise RuntimeError("can't start new thread")

    async with wicked(scene, make_engine=no_memory) as peer:
        why = await scene.idle_of(peer.target.name)
        await scene.honest_client.commits(4)
    if "suspended" not in why:
        raise Broken(f"it is idle for another reason: {why}")


@attack("26-no-room-for-the-result")
async def no_room(scene: Scene) -> None:
    async with wicked(scene) as peer:
        folder = scene.victim.work_dir / peer.target.name
        shutil.rmtree(folder)
        folder.write_text("no folder, so nothing can be written there")
        await member_is_there(scene, peer.target.name)
        await scene.honest_client.another_run()
        await scene.honest_client.another_run()
    folder.unlink()


@attack("27-text-goes-to-the-ends-alone")
async def text(scene: Scene) -> None:
    plans = list[PlanStep]()

    def note(message: ToPeer) -> None:
        if isinstance(message, PlanStep):
            plans.append(message)

    async with wicked(scene, overhear=note) as peer:
        await member_is_there(scene, peer.target.name)
        await scene.honest_client.another_run()
        await scene.honest_client.commits(4)
    if not plans:
        raise Broken("it took no part: this was no attack")
    if any(plan.tokens for plan in plans):
        raise Broken("a stage between was sent tokens")


@attack("27-ends-that-were-not-granted")
async def trusted_ends(scene: Scene) -> None:
    """A peer whose invitation hides text hosts neither the first stage nor the last."""
    for layers in ((0, 2), (4, 6)):
        peer = await scene.victim.member(Role.PEER, grant=Grant(sees_tokens=False))
        async with joined(scene, peer, layers) as member:
            why = await scene.idle_of(peer.name)
            await scene.honest_client.another_run()
        kinds = {message.WhichOneof("body") for message in member.messages}
        if kinds & {"assign", "plan", "catch_up"}:
            raise Broken(f"it took part in layers {layers}: {sorted(map(str, kinds))}")
        if "token" not in why and "text" not in why:
            raise Broken(f"it is idle for another reason: {why}")


# ---- 28, 29: files


@attack("28-files-others-can-read")
async def files(scene: Scene) -> None:
    open_ones = list(readable_by_others(scene.victim.work_dir))
    if open_ones:
        raise Broken(f"others may read {', '.join(open_ones[:5])}")


def readable_by_others(folder: Path) -> Iterator[str]:
    """Files below a folder that more than their owner may open."""
    for path in sorted(folder.rglob("*")):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if mode & 0o077 and not stat.S_ISDIR(mode) and not private_above(path, folder):
            yield f"{path.relative_to(folder)} ({stat.S_IMODE(mode):o})"


def private_above(path: Path, folder: Path) -> bool:
    """Whether a folder on the way to it lets nobody else in."""
    between = [p for p in path.parents if folder in p.parents]
    return any(not os.stat(p).st_mode & 0o077 for p in between if p.exists())


PINNED = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==\S+")


@attack("29-packages-are-pinned")
async def packages(scene: Scene) -> None:
    loose = [line for line in constraints() if not PINNED.match(line)]
    if loose:
        raise Broken(f"not pinned: {', '.join(loose)}")


@attack("29-packages-by-their-hashes")
async def package_hashes(scene: Scene) -> None:
    text = "".join((ROOT / "deploy" / name).read_text() for name in LOCKED)
    hashed = {line.split()[0] for line in text.splitlines() if "==" in line and line[-1] == "\\"}
    loose = sorted(set(constraints()) - hashed)
    if loose:
        raise Broken(f"known by version alone: {', '.join(loose)}")
    for name in ("Makefile", "Dockerfile"):
        if "--require-hashes" not in (ROOT / name).read_text():
            raise Broken(f"{name} asks for no hashes")


ROOT = Path(__file__).parents[2]
LOCKED = ("locked.txt", "locked-client.txt", "locked-tools.txt", "locked-docs.txt")


def constraints() -> list[str]:
    """Return the pinned packages, line by line."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


async def run_attack(scene: Scene, name: str) -> None:
    """Attack, and see that the swarm is as it was.

    Raises:
        Broken: something that must hold does not.
    """
    await ATTACKS[name](scene)
    await scene.check_members()
