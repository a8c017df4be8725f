"""Buffers follow their samples from peer to peer over real gRPC links; what goes wrong costs only
key frames."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarm_ft.buffers import BufferRecord, BufferStore, End
from swarm_ft.codec import buffer_bytes
from swarm_ft.discovery.base import Role
from swarm_ft.discovery.static import Board, StaticDirectory
from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer import buffer_donor
from swarm_ft.peer.buffer_donor import receive_request, serve_buffers
from swarm_ft.peer.buffer_follower import BufferFollower
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.stage_buffers import StageBuffers
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.coordinator_messages import Assign, FollowBuffers, StageAssignment
from swarm_ft.protocol.digest import fingerprint_of
from swarm_ft.protocol.handover_wire import SentBuffer, buffer_to_wire
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.sample_set import SampleSet
from swarm_ft.testing.clock import ManualClock
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import FETCH_BUFFERS
from tests.specs import run_spec

pytestmark = pytest.mark.timeout(60)

RUN, BOUNDARY = RunId("run"), 2
UPSTREAM, DOWNSTREAM = LayerRange(0, 2), LayerRange(2, 4)
SPEC = run_spec(forward_codec="aq4", backward_codec="q4+ef21", buffer_bits=4)
SHAPE = SPEC.train.seq_length, SPEC.model.hidden_size


def payload_of(sample, direction):
    return bytes([sample, direction] * buffer_bytes(*SHAPE, 4))[: buffer_bytes(*SHAPE, 4)]


def record_of(sample, direction):
    payload = payload_of(sample, direction)
    return BufferRecord(fingerprint_of(payload), *SHAPE, payload)


class Peer:
    """A stage's buffers."""

    def __init__(self, layers, samples=(), spec=SPEC):
        self.spec, self.store = spec, BufferStore()
        self.buffers = StageBuffers(spec, RUN, layers, self.store)
        for sample in samples:
            for kept in self.buffers.shared:
                self.store.put(self.buffers.key(kept, sample), record_of(sample, kept.direction))

    def has(self, sample):
        """Which of a sample's buffers are here, all of them right."""
        found = {}
        for kept in self.buffers.shared:
            record = self.store.get(self.buffers.key(kept, sample))
            if record is not None:
                assert record == record_of(sample, kept.direction)
                found[kept.direction] = kept.end
        return found


async def no_frames():
    pass


class Swarm:
    """Donors that are served, and one peer that follows."""

    def __init__(self):
        self.transport, self.said = GrpcTransport(), asyncio.Queue()
        self.directory = StaticDirectory(Board(), ManualClock())
        self.servers, self.asked = [], []
        self.pools = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def donor(self, name, serve):
        server = await self.transport.serve("127.0.0.1", 0, {FETCH_BUFFERS: serve})
        self.servers.append(server)
        await self.directory.announce(Role.PEER, name, server.endpoint)

    async def honest(self, name, peer, frames_sent=no_frames):
        async def serve(stream):
            request = await receive_request(stream)
            self.asked.append((name, request.samples))
            await serve_buffers(
                stream,
                request,
                buffers=peer.buffers,
                store=peer.store,
                spec_digest=peer.spec.digest(),
                frames_sent=frames_sent,
            )

        await self.donor(name, serve)

    def follower(self, peer):
        compute, codecs = self.pools
        context = PeerContext(
            peer_id=PeerId("me"),
            directory=self.directory,
            transport=self.transport,
            clock=ManualClock(),
            compute=compute,
            codecs=codecs,
            say=self.said.put_nowait,
            timeline=Timeline(ManualClock(), self.said.put_nowait),
            memory_bytes=1 << 30,
        )
        assign = Assign(
            run_id=RUN,
            spec=SPEC,
            attempt=1,
            stages=(StageAssignment(peer_id=PeerId("me"), layers=DOWNSTREAM),),
            committed_steps=3,
            fresh=False,
            spec_digest=SPEC.digest(),
        )
        return BufferFollower(context, assign, peer.buffers, peer.store)

    async def followed(self, peer, *orders, begun=()):
        """What the peer says once it has done what it could, in order."""
        follower = self.follower(peer)
        for order in orders:
            follower.follow(order)
        follower.begun(begun)
        # The last order tells that all before it are done with.
        done = Peer(UPSTREAM, [99])
        await self.honest("done", done)
        follower.follow(order_of([99], ["done"]))
        running = asyncio.create_task(follower.run())
        said = []
        while not said or said[-1].samples != (99,):
            said.append(await self.said.get())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [message.samples for message in said[:-1]]


def order_of(samples, sources):
    return FollowBuffers(
        run_id=RUN,
        attempt=1,
        boundary=BOUNDARY,
        samples=tuple(samples),
        sources=tuple(map(PeerId, sources)),
    )


@pytest.fixture
async def swarm():
    swarm = Swarm()
    yield swarm
    for server in swarm.servers:
        await server.stop()
    for pool in swarm.pools:
        pool.shutdown()


@pytest.mark.parametrize("layers", [UPSTREAM, DOWNSTREAM], ids=["the other end", "a replica"])
async def test_buffers_come_from_the_other_end_or_from_a_replica(swarm, layers):
    await swarm.honest("donor", Peer(layers, range(5)))
    me = Peer(DOWNSTREAM)
    assert await swarm.followed(me, order_of([3, 1], ["donor"])) == [(3, 1)]
    ends = {Direction.FORWARD: End.RECEIVED, Direction.BACKWARD: End.SENT}
    assert [me.has(sample) for sample in range(5)] == [{}, ends, {}, ends, {}]


async def test_what_one_source_lacks_the_next_is_asked_for(swarm):
    await swarm.honest("some", Peer(UPSTREAM, [1]))
    await swarm.honest("all", Peer(UPSTREAM, [1, 2, 3]))
    me = Peer(DOWNSTREAM)
    assert await swarm.followed(me, order_of([1, 2, 3], ["some", "all"])) == [(1, 2, 3)]
    assert swarm.asked[:2] == [("some", (1, 2, 3)), ("all", (2, 3))]


async def test_what_nobody_has_is_not_reported(swarm):
    await swarm.honest("donor", Peer(UPSTREAM, [1]))
    assert await swarm.followed(Peer(DOWNSTREAM), order_of([1, 2], ["donor"])) == [(1,)]


async def test_a_peer_that_cannot_be_found_costs_nothing_else(swarm):
    await swarm.honest("donor", Peer(UPSTREAM, [1, 2]))
    orders = order_of([1], ["nobody"]), order_of([2], ["nobody", "donor"])
    assert await swarm.followed(Peer(DOWNSTREAM), *orders) == [(2,)]


async def test_an_older_buffer_is_replaced(swarm):
    await swarm.honest("donor", Peer(UPSTREAM, [1]))
    me = Peer(DOWNSTREAM)
    for kept in me.buffers.shared:
        me.store.put(me.buffers.key(kept, 1), BufferRecord(bytes(16), *SHAPE, b"older"))
    assert await swarm.followed(me, order_of([1], ["donor"])) == [(1,)]
    assert len(me.has(1)) == 2


async def test_what_comes_after_its_step_began_is_too_late(swarm):
    await swarm.honest("donor", Peer(UPSTREAM, [1, 2]))
    me = Peer(DOWNSTREAM)
    assert await swarm.followed(me, order_of([1, 2], ["donor"]), begun=[1]) == [(2,)]
    assert me.has(1) == {}
    assert swarm.asked[0] == ("donor", (2,))


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": b"short", "digest": fingerprint_of(b"short")},
        {"digest": bytes(16)},
        {"sample": 7},
        {"sample": 0},
    ],
    ids=["size", "digest", "sample", "no-sample"],
)
async def test_a_donor_that_lies_is_left(swarm, changes, caplog):
    true = {
        "sample": 1,
        "direction": Direction.FORWARD,
        "digest": record_of(1, Direction.FORWARD).digest,
        "payload": payload_of(1, Direction.FORWARD),
    }

    async def lie(stream):
        await receive_request(stream)
        await stream.send(buffer_to_wire(SentBuffer(**true | changes)))

    await swarm.donor("liar", lie)
    await swarm.honest("donor", Peer(UPSTREAM, [1]))
    me = Peer(DOWNSTREAM)
    assert await swarm.followed(me, order_of([1], ["liar", "donor"])) == [(1,)]
    assert len(me.has(1)) == 2
    assert "buffers of peer liar" in caplog.text


async def test_a_donor_of_another_run_spec_refuses(swarm, caplog):
    await swarm.honest("other", Peer(UPSTREAM, [1], spec=run_spec(seed=9)))
    assert await swarm.followed(Peer(DOWNSTREAM), order_of([1], ["other"])) == []
    assert "RunSpec digest" in caplog.text


async def test_frames_go_before_buffers(swarm, monkeypatch):
    monkeypatch.setattr(buffer_donor, "MAX_WAIT_S", 30.0)
    gate, waits = asyncio.Event(), asyncio.Queue()

    async def frames_sent():
        waits.put_nowait(None)
        await gate.wait()

    await swarm.honest("donor", Peer(UPSTREAM, [1]), frames_sent)
    me = Peer(DOWNSTREAM)
    following = asyncio.create_task(swarm.followed(me, order_of([1], ["donor"])))
    await waits.get()
    assert me.has(1) == {}
    gate.set()
    assert await following == [(1,)]


async def test_but_not_for_ever(swarm, monkeypatch):
    monkeypatch.setattr(buffer_donor, "MAX_WAIT_S", 0.0)
    await swarm.honest("donor", Peer(UPSTREAM, [1]), asyncio.Event().wait)
    assert await swarm.followed(Peer(DOWNSTREAM), order_of([1], ["donor"])) == [(1,)]


# ---- what is told of them


def test_only_samples_of_which_all_is_here_count_as_held():
    peer = Peer(DOWNSTREAM, [1, 4])
    forward = next(k for k in peer.buffers.shared if k.direction is Direction.FORWARD)
    peer.store.put(peer.buffers.key(forward, 2), record_of(2, Direction.FORWARD))
    held = HeldBuffers(boundary=BOUNDARY, samples=SampleSet.of([1, 4]))
    assert peer.buffers.held() == (held,)


def test_a_stage_in_the_middle_tells_of_both_boundaries():
    peer = Peer(LayerRange(1, 3), [5])
    assert [held.boundary for held in peer.buffers.held()] == [1, 3]


def test_counts_are_told_once():
    peer = Peer(DOWNSTREAM, [1])
    assert peer.has(1)
    assert peer.has(2) == {}
    size = 2 * buffer_bytes(*SHAPE, 4)
    first = BufferCounts(boundary=BOUNDARY, samples=1, memory_bytes=size, memory_hits=2, misses=2)
    assert peer.buffers.take_counts() == (first,)
    assert peer.buffers.take_counts() == (
        BufferCounts(boundary=BOUNDARY, samples=1, memory_bytes=size),
    )


def test_a_run_without_buffers_has_nothing_to_tell():
    peer = Peer(DOWNSTREAM, spec=run_spec(forward_codec="q4", backward_codec="q8"))
    assert (peer.buffers.held(), peer.buffers.take_counts(), peer.buffers.take_lost()) == (
        (),
        (),
        (),
    )
