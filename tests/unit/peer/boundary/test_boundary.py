"""A boundary's ends on real streams: everything once, after any break and any message."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from swarm_ft.buffers import BufferKey, BufferStore, End
from swarm_ft.codec import side_info_needed
from swarm_ft.codec.basis import Basis, learn_basis
from swarm_ft.codec.side_info import SideInfo
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import (
    BadFrame,
    MalformedMessage,
    NonFinite,
    OutOfTurn,
    ProtocolError,
    SwarmError,
    Unavailable,
)
from swarm_ft.ids import BlockIndex, MicrobatchIndex, RunId, SampleId
from swarm_ft.peer.boundary.coder import FrameCoder
from swarm_ft.peer.boundary.side_info import SideInfoKey, TensorKind
from swarm_ft.peer.boundary.side_info_transfer import LEAST_PART_BYTES
from swarm_ft.peer.links import MAX_ANSWERS, MAX_BROKEN_STREAMS
from swarm_ft.protocol.machines.session import WINDOW_FRAMES, BoundarySession, SessionEffect
from swarm_ft.protocol.messages.boundary import (
    Ack,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
    SessionMessage,
    SideInfoPart,
)
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.spec.run_spec import Codecs, RunSpec
from swarm_ft.protocol.wire.frames import wire_bytes
from swarm_ft.transport.base import Transport
from swarm_ft.transport.methods import LINK
from tests.doubles.faults import FaultyTransport
from tests.unit.peer.conftest import AtWork, MakeEnds, MakeSpec, Site, frame_key
from tests.unit.peer.conftest import End as BoundaryEnd
from tests.unit.peer.hands import Hand

TOKENS, CHANNELS = 6, 8
SAMPLES = (0, 1, 2)
BLOCK = BlockIndex(2)

Moved: TypeAlias = tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]


def tensors(seed: int, samples: Sequence[int] = SAMPLES) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {sample: torch.randn(TOKENS, CHANNELS, generator=generator) for sample in samples}


def forward(sample: int, step: int = 0) -> FrameKey:
    return frame_key(step, sample, Direction.FORWARD)


def backward(sample: int, step: int = 0) -> FrameKey:
    return frame_key(step, sample, Direction.BACKWARD)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.MIN_BACKOFF_S", 0.0)


async def both_ways(
    up: BoundaryEnd, down: BoundaryEnd, step: int, values: Mapping[int, torch.Tensor]
) -> Moved:
    """One step: activations down, gradients up, everything acknowledged; what arrived."""
    for end in (up, down):
        end.begin(step, values)
    up.send(step, values)
    arrived = await down.receive(len(values))
    down.send(step, {sample: -value for sample, value in arrived.items()})
    gradients = await up.receive(len(values))
    await up.boundary.wait_settled()
    await down.boundary.wait_settled()
    for end in (up, down):
        end.store.commit()
        end.bases.commit()
    return arrived, gradients


def forget(end: BoundaryEnd, sample: int) -> None:
    """Lose one sample's buffer, as a disk may."""
    store = BufferStore()
    for other in SAMPLES:
        name = BufferKey(RunId("run"), BLOCK, End.RECEIVED, SampleId(other))
        record = end.store.get(name)
        if record is not None and other != sample:
            store.stage(name, record)
    store.commit()
    end.store.forget()
    for other in SAMPLES:
        name = BufferKey(RunId("run"), BLOCK, End.RECEIVED, SampleId(other))
        record = store.get(name)
        if record is not None:
            end.store.stage(name, record)
    end.store.commit()


def assert_equal_buffers(up: BoundaryEnd, down: BoundaryEnd) -> None:
    for sample in SAMPLES:
        sent = up.store.get(BufferKey(RunId("run"), BLOCK, End.SENT, SampleId(sample)))
        assert sent is not None
        assert sent == down.store.get(
            BufferKey(RunId("run"), BLOCK, End.RECEIVED, SampleId(sample))
        )


# ---- both ways


async def test_a_steps_samples_arrive_both_ways(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec(forward_codec="none", backward_codec="none"))
    async with at_work(down, up) as site, site.dialled(up, transport):
        for step in range(3):
            values = tensors(step)
            arrived, gradients = await both_ways(up, down, step, values)
            for sample, value in values.items():
                assert torch.equal(arrived[sample], value)
                assert torch.equal(gradients[sample], -value)


async def test_traffic_is_counted_where_it_is_sent(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site, site.dialled(up, transport):
        await both_ways(up, down, 0, tensors(0))
        first = up.boundary.take_traffic(), down.boundary.take_traffic()
        await both_ways(up, down, 1, tensors(1))
        second = up.boundary.take_traffic()
    plain = 4 * TOKENS * CHANNELS * len(SAMPLES)
    assert (first[0].key_frames, first[0].delta_frames) == (3, 0)
    assert (second.key_frames, second.delta_frames) == (0, 3)
    assert second.forward_bytes < first[0].forward_bytes < plain + 3 * 100
    assert first[0].forward_uncompressed_bytes == second.forward_uncompressed_bytes == plain
    assert first[0].backward_bytes == first[0].backward_uncompressed_bytes == 0
    assert first[1].backward_uncompressed_bytes == plain
    assert first[1].forward_bytes == first[1].key_frames == 0
    assert up.boundary.take_traffic() == Traffic(boundary=BLOCK)


async def test_what_goes_over_a_relay_is_counted_as_such(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site, site.dialled(up, transport):
        await both_ways(up, down, 0, tensors(0))
        direct = up.boundary.take_traffic()
        site.channel.is_relayed = True
        await both_ways(up, down, 1, tensors(1))
        relayed = up.boundary.take_traffic()
        other = down.boundary.take_traffic()
    assert direct.relayed_bytes == other.relayed_bytes == 0
    assert relayed.relayed_bytes == relayed.forward_bytes > 0


async def test_what_is_sent_before_a_stream_is_up_waits_for_it(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        for end in (up, down):
            end.begin(0, SAMPLES)
        up.send(0, tensors(0))
        settled = asyncio.create_task(up.boundary.wait_settled())
        async with site.dialled(up, transport):
            assert len(await down.receive(3)) == 3
            await settled


async def test_a_new_step_drops_what_the_last_one_left(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        up.begin(0, SAMPLES)
        up.send(0, tensors(0))
        up.begin(1, (1,))
        await up.boundary.wait_settled()
        async with site.dialled(up, transport):
            down.begin(1, (1,))
            up.send(1, tensors(1, samples=(1,)))
            assert set(await down.receive(1)) == {1}
            await up.boundary.wait_settled()


async def test_a_lost_buffer_costs_one_key_frame(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site, site.dialled(up, transport):
        await both_ways(up, down, 0, tensors(0))
        up.boundary.take_traffic()
        forget(down, 1)
        await both_ways(up, down, 1, tensors(1))
        traffic = up.boundary.take_traffic()
        assert (traffic.key_frames, traffic.delta_frames) == (1, 3)
        assert_equal_buffers(up, down)
        await both_ways(up, down, 2, tensors(2))
        assert up.boundary.take_traffic().key_frames == 0


# ---- broken streams


async def run_with_faults(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport, **cuts: int
) -> tuple[Moved, int]:
    """Two steps and a lost buffer in between; what arrived in the second, and cuts made."""
    script: Any = {name: {LINK: [at]} for name, at in cuts.items()}
    faulty = FaultyTransport(transport, **script)
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site, site.dialled(up, faulty):
        await both_ways(up, down, 0, tensors(0))
        forget(down, 1)
        made = await both_ways(up, down, 1, tensors(1))
    assert_equal_buffers(up, down)
    return made, faulty.num_cuts


def assert_same(got: Moved, quiet: Moved) -> None:
    for values, expected in zip(got, quiet, strict=True):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[sample], expected[sample]) for sample in values)


@pytest.mark.parametrize("cut", ["cut_sends", "cut_receives"])
async def test_a_break_at_any_message_changes_nothing(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport, cut: str
) -> None:
    async def run(**cuts: int) -> tuple[Moved, int]:
        return await run_with_faults(make_spec, make_ends, at_work, transport, **cuts)

    quiet, _ = await run()
    num_messages = 0
    while True:
        got, num_cuts = await run(**{cut: num_messages + 1})
        assert_same(got, quiet)
        if not num_cuts:
            break
        num_messages += 1
    # A hello, a frame and an ack for each sample in both steps; a key frame or its request.
    assert num_messages >= 1 + 2 * 2 * len(SAMPLES)


async def test_every_byte_counts_also_those_sent_again(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(up, down) as site:
        up.begin(0, SAMPLES)
        up.send(0, tensors(0))
        num_bytes = 0
        for _ in range(3):
            hand = await site.call()
            for _ in SAMPLES:
                num_bytes += wire_bytes(await hand.expect(Frame))
        for sample in SAMPLES:
            await hand.send(Ack(forward(sample)))
        await up.boundary.wait_settled()
        traffic = up.boundary.take_traffic()
    assert traffic.forward_bytes == num_bytes
    assert (traffic.key_frames, traffic.delta_frames) == (9, 0)


async def test_only_what_the_other_side_lacks_is_sent_again(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(up, down) as site:
        up.begin(0, SAMPLES)
        up.send(0, tensors(0))
        hand = await site.call()
        assert {(await hand.expect(Frame)).key for _ in SAMPLES} == {forward(i) for i in SAMPLES}
        hand = await site.call(received=[forward(0), forward(2)])
        assert (await hand.expect(Frame)).key == forward(1)
        await hand.send(Ack(forward(1)))
        await up.boundary.wait_settled()


async def test_what_the_other_side_has_makes_its_buffer_here_and_is_not_sent(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    """The other side was done with a microbatch when an attempt ended, and this one was not."""
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site, site.dialled(up, transport):
        await both_ways(up, down, 0, tensors(0))
        up.begin(1, SAMPLES)
        down.begin(1, SAMPLES)
        up.send(1, tensors(1))
        await down.receive(len(SAMPLES))
        await up.boundary.wait_settled()
        sent = dict(up.boundary.sent())
        up.store.rollback()
        up.boundary.take_traffic()
        up.begin(1, SAMPLES)
        for sample, value in tensors(1).items():
            up.boundary.mark_delivered(forward(sample, 1), value)
        await up.boundary.wait_settled()
        assert dict(up.boundary.sent()) == sent, "the same frames, for who takes a place later"
        assert up.boundary.take_traffic().forward_bytes == 0
        for end in (up, down):
            end.store.commit()
        assert_equal_buffers(up, down)


async def test_settled_waits_for_every_ack(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(up, down) as site:
        up.begin(0, SAMPLES)
        up.send(0, tensors(0))
        settled = asyncio.create_task(up.boundary.wait_settled())
        hand = await site.call()
        for sample in SAMPLES:
            assert (await hand.expect(Frame)).key == forward(sample)
            assert not settled.done()
        for sample in SAMPLES:
            assert not settled.done()
            await hand.send(Ack(forward(sample)))
        await settled


async def test_settled_waits_for_a_refused_frame_to_come_as_a_key_frame(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(up, down) as site:
        hand = await site.call()
        for step, kind in enumerate([FrameKind.KEY, FrameKind.DELTA]):
            up.begin(step, (0,))
            up.send(step, tensors(step, samples=(0,)))
            assert (await hand.expect(Frame)).kind is kind
            if kind is FrameKind.KEY:
                await hand.send(Ack(forward(0, step)))
                await up.boundary.wait_settled()
                up.store.commit()
        settled = asyncio.create_task(up.boundary.wait_settled())
        await hand.send(KeyFrameRequest(forward(0, 1), "lost"))
        assert (await hand.expect(Frame)).kind is FrameKind.KEY
        assert not settled.done()
        await hand.send(Ack(forward(0, 1)))
        await settled


async def test_a_newer_stream_replaces_the_older(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(up, down) as site:
        old = await site.call()
        new = await site.call()
        with pytest.raises(Unavailable, match="a newer stream replaced it"):
            await old.fails()
        up.begin(0, SAMPLES)
        up.send(0, tensors(0))
        assert (await new.expect(Frame)).key == forward(0)


# ---- hostile neighbours


@pytest.fixture
def coder(make_spec: MakeSpec) -> FrameCoder:
    """Return the coder of a neighbour that follows the protocol."""
    return FrameCoder(make_spec(), run_id=RunId("run"), boundary=BLOCK, store=BufferStore())


async def assert_unharmed(
    up: BoundaryEnd, down: BoundaryEnd, transport: Transport, site: Site
) -> None:
    """After an attack, a well-behaved neighbour trains as ever."""
    async with site.dialled(up, transport):
        arrived, _ = await both_ways(up, down, 7, tensors(7))
        assert arrived.keys() == set(SAMPLES)
    assert_equal_buffers(up, down)
    assert not site.running.done()


def noise(frame: Frame, byte: bytes) -> Frame:
    return replace(frame, tensor=replace(frame.tensor, payload=byte * len(frame.tensor.payload)))


DIRECT = Frame(
    backward(0),
    FrameKind.DIRECT,
    EncodedTensor(
        parse_codec_spec("q8", Direction.BACKWARD),
        TOKENS,
        CHANNELS,
        b"\1" * TOKENS * (2 + CHANNELS),
    ),
)
ATTACKS = {
    "a frame that no plan has": (lambda f: [replace(f, key=forward(9))], BadFrame, "plan"),
    "a frame of another microbatch": (
        lambda f: [replace(f, key=f.key._replace(microbatch=MicrobatchIndex(5)))],
        BadFrame,
        "plan",
    ),
    "fewer tokens than the plan has": (
        lambda f: [replace(f, tensor=replace(f.tensor, tokens=TOKENS - 1, payload=b"x"))],
        BadFrame,
        f"expected {TOKENS} tokens, got {TOKENS - 1}",
    ),
    "more tokens than a run's samples have": (
        lambda f: [replace(f, tensor=replace(f.tensor, tokens=TOKENS + 1))],
        BadFrame,
        f"expected 1 to {TOKENS} tokens",
    ),
    "a payload of noise": (lambda f: [noise(f, b"\x5a")], BadFrame, "half"),
    "a payload of another size": (
        lambda f: [replace(f, tensor=replace(f.tensor, payload=b"x"))],
        BadFrame,
        "takes 98 bytes, got 1",
    ),
    "a payload beyond any": (
        lambda f: [replace(f, tensor=replace(f.tensor, payload=bytes(99)))],
        BadFrame,
        "expected at most 98 bytes, got 99",
    ),
    "another shape": (
        lambda f: [replace(f, tensor=replace(f.tensor, tokens=99))],
        BadFrame,
        "99 x 8",
    ),
    "a result that it does not make": (
        lambda f: [replace(f, result_digest=bytes(16))],
        BadFrame,
        "key frame",
    ),
    "a frame of its own receiving side": (lambda f: [DIRECT], OutOfTurn, "BACKWARD"),
    "a frame far ahead": (lambda f: [replace(f, key=forward(0, step=99))], OutOfTurn, "step 99"),
    "more early frames than the window": (
        lambda f: [replace(f, key=forward(i, step=1)) for i in range(WINDOW_FRAMES + 1)],
        OutOfTurn,
        "before their step",
    ),
}


@pytest.mark.parametrize(("frames", "error", "match"), ATTACKS.values(), ids=ATTACKS)
async def test_a_bad_frame_costs_its_stream_and_harms_nothing(
    make_spec: MakeSpec,
    make_ends: MakeEnds,
    at_work: AtWork,
    transport: Transport,
    coder: FrameCoder,
    frames: Callable[[Frame], list[Frame]],
    error: type[SwarmError],
    match: str,
) -> None:
    up, down = make_ends(make_spec())
    frame = coder.encode(forward(0), torch.ones(TOKENS, CHANNELS))
    async with at_work(down, up) as site:
        down.begin(0, SAMPLES)
        hand = await site.call()
        with pytest.raises(error, match=match):
            await hand.fails(*frames(frame))
        assert down.arrivals.empty()
        await assert_unharmed(up, down, transport, site)


async def test_a_second_hello_costs_the_stream(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        hand = await site.call()
        await hand.send(site.hello)
        with pytest.raises(OutOfTurn, match="caller sent its hello twice"):
            await hand.fails()
        await assert_unharmed(up, down, transport, site)


@pytest.mark.parametrize("nonsense", [b"\x08\xff", b""], ids=["torn", "empty"])
async def test_bytes_that_are_no_message_cost_the_stream(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport, nonsense: bytes
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        with pytest.raises(MalformedMessage):
            await site.caller.fails(nonsense)
        await assert_unharmed(up, down, transport, site)


async def send_early(
    hand: Hand,
    down: BoundaryEnd,
    coder: FrameCoder,
    samples: Sequence[int],
    other: FrameCoder | None = None,
) -> None:
    """Frames of step 1, by `other`, while step 0 lasts; returns once the other side has them."""
    x = torch.ones(TOKENS, CHANNELS)
    probe = coder.encode(forward(0), x)
    down.begin(0, (0,))
    await hand.send(probe)
    assert await hand.receive() == Ack(forward(0))
    await down.receive(1)
    for sample in samples:
        await hand.send((other or coder).encode(forward(sample, step=1), x))
    await hand.send(probe)
    assert await hand.receive() == Ack(forward(0))


async def test_frames_that_come_before_their_step_are_kept_for_it(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, coder: FrameCoder
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        hand = await site.call()
        await send_early(hand, down, coder, (1, 2))
        down.begin(1, SAMPLES)
        assert set(await down.receive(2)) == {1, 2}
        assert {(await hand.expect(Ack)).key for _ in range(2)} == {forward(1, 1), forward(2, 1)}


@pytest.fixture
def by_other_codecs(make_spec: MakeSpec) -> tuple[RunSpec, FrameCoder, FrameCoder]:
    """A run without buffers, who makes its frames, and who makes them by other codecs."""
    spec = make_spec(forward_codec="q4")
    coders = [
        FrameCoder(one, run_id=RunId("run"), boundary=BLOCK, store=BufferStore())
        for one in (spec, make_spec(forward_codec="q2"))
    ]
    return spec, coders[0], coders[1]


async def test_frames_by_other_codecs_may_come_before_the_plan_that_names_them(
    make_ends: MakeEnds,
    at_work: AtWork,
    by_other_codecs: tuple[RunSpec, FrameCoder, FrameCoder],
) -> None:
    spec, before, after = by_other_codecs
    up, down = make_ends(spec)
    async with at_work(down, up) as site:
        hand = await site.call()
        await send_early(hand, down, before, (1, 2), after)
        down.begin(1, SAMPLES, Codecs("q2", "q8"))
        got = await down.receive(2)
        assert {(await hand.expect(Ack)).key for _ in range(2)} == {forward(1, 1), forward(2, 1)}
        x = torch.ones(TOKENS, CHANNELS)
        with pytest.raises(BadFrame, match="DIRECT of q4tc in a step whose forward codec is q2tc"):
            await hand.fails(before.encode(forward(0, 1), x))
    assert set(got) == {1, 2}


async def test_a_frame_that_came_early_is_held_to_its_plan(
    make_ends: MakeEnds,
    at_work: AtWork,
    by_other_codecs: tuple[RunSpec, FrameCoder, FrameCoder],
) -> None:
    spec, before, after = by_other_codecs
    up, down = make_ends(spec)
    async with at_work(down, up) as site:
        hand = await site.call()
        await send_early(hand, down, before, (1,), after)
        down.begin(1, SAMPLES, Codecs("q3", "q8"))
        with pytest.raises(BadFrame, match="DIRECT of q2tc in a step whose forward codec is q3tc"):
            await hand.fails()
        assert down.arrivals.empty()


async def test_an_unplanned_frame_that_came_early_does_not_fail_the_step(
    make_spec: MakeSpec,
    make_ends: MakeEnds,
    at_work: AtWork,
    transport: Transport,
    coder: FrameCoder,
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        hand = await site.call()
        await send_early(hand, down, coder, (9, 1))
        down.begin(1, SAMPLES)
        assert set(await down.receive(1)) == {1}
        with pytest.raises(BadFrame, match="not part of the step's plan"):
            await hand.fails()
        await assert_unharmed(up, down, transport, site)


async def test_an_ack_ahead_of_its_frame_and_a_key_frame_request_after_it(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = make_ends(make_spec())
    is_requested, receive = asyncio.Event(), BoundarySession.receive

    def receive_and_notify(
        session: BoundarySession, message: SessionMessage
    ) -> list[SessionEffect]:
        effects = receive(session, message)
        if isinstance(message, KeyFrameRequest):
            is_requested.set()
        return effects

    monkeypatch.setattr(BoundarySession, "receive", receive_and_notify)
    async with at_work(up, down) as site:
        hand = await site.call()
        up.begin(0, (0,))
        up.send(0, tensors(0, samples=(0,)))
        assert (await hand.expect(Frame)).kind is FrameKind.KEY
        await hand.send(Ack(forward(0)))
        await up.boundary.wait_settled()
        up.store.commit()

        up.begin(1, (0,))
        await hand.send(Ack(forward(0, 1)))
        await hand.send(KeyFrameRequest(forward(0, 1), "too early"))
        await is_requested.wait()
        up.send(1, tensors(1, samples=(0,)))
        assert (await hand.expect(Frame)).kind is FrameKind.DELTA
        await hand.send(KeyFrameRequest(forward(0, 1), "really"))
        assert (await hand.expect(Frame)).kind is FrameKind.KEY
        await hand.send(Ack(forward(0, 1)))
        await up.boundary.wait_settled()
        assert not site.running.done()


async def test_a_key_frame_asked_for_in_place_of_a_gradient_is_out_of_turn(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        down.begin(0, (0,))
        down.send(0, tensors(0, samples=(0,)))
        hand = await site.call()
        assert (await hand.expect(Frame)).kind is FrameKind.DIRECT
        await hand.send(KeyFrameRequest(backward(0), "why not"))
        with pytest.raises(OutOfTurn, match="why not"):
            await hand.fails()


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
async def test_one_who_sends_and_never_reads_is_dropped(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, coder: FrameCoder
) -> None:
    up, down = make_ends(make_spec())
    frame = coder.encode(forward(0), torch.ones(TOKENS, CHANNELS))
    async with at_work(down, up) as site:
        down.begin(0, (0,))
        hand = await site.call()
        await hand.send(frame)
        await down.receive(1)
        with pytest.raises(OutOfTurn, match="does not read"):
            await hand.send(*[frame] * 2 * MAX_ANSWERS)


async def break_a_stream(site: Site) -> None:
    hand = await site.call()
    with suppress(SwarmError):
        await hand.send(site.hello)
        await hand.fails()


async def test_a_neighbour_that_breaks_stream_after_stream_fails_the_attempt(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        for _ in range(MAX_BROKEN_STREAMS):
            assert not site.running.done()
            await break_a_stream(site)
        with pytest.raises(ExceptionGroup) as caught:
            await site.running
        (error,) = caught.value.exceptions
        assert type(error) is ProtocolError
        assert "3 streams failed, the last with out-of-turn: caller sent its hello" in str(error)


async def test_streams_that_only_get_lost_are_no_reason_to_give_up(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(down, up) as site:
        for _ in range(2 * MAX_BROKEN_STREAMS):
            hand = await site.call()
            await hand.stream.cancel()
        await assert_unharmed(up, down, transport, site)


async def test_a_tensor_that_is_not_finite_ends_the_attempt(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(make_spec())
    async with at_work(up, down) as site:
        up.begin(0, (0,))
        up.send(0, {0: torch.full((TOKENS, CHANNELS), float("nan"))})
        with pytest.raises(ExceptionGroup) as caught:
            await site.running
        assert isinstance(caught.value.exceptions[0], NonFinite)


# ---- held-out samples


async def test_a_held_out_sample_is_acknowledged_once_it_was_computed_with(
    make_spec: MakeSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    spec = make_spec(num_eval_samples=2)
    up, down = make_ends(spec)
    held_out = spec.train.num_samples
    x = tensors(0)[0]
    async with at_work(down, up) as site:
        up.begin(0, ())
        down.begin(0, (held_out,))
        async with site.dialled(up, transport):
            up.send(0, {held_out: x})
            arrived = await down.receive(1)
        assert torch.equal(arrived[held_out], x), "uncompressed"
        # Sent again over the next stream, it is not delivered again.
        async with site.dialled(up, transport):
            await up.boundary.is_connected.wait()
            assert not up.boundary.is_acknowledged
            assert up.taken.empty()
            down.boundary.acknowledge_consumed(forward(held_out))
            await up.boundary.wait_settled()
            assert await up.taken.get() == forward(held_out)
    assert down.arrivals.empty()
    assert list(up.boundary.sent()) == [], "nobody is sent it again"
    for end in (up, down):
        end.store.commit()
        assert len(end.store) == 0, "it leaves no buffer"
    traffic = up.boundary.take_traffic()
    assert traffic.evaluation_bytes > traffic.evaluation_uncompressed_bytes
    assert traffic.evaluation_uncompressed_bytes == 2 * 4 * x.numel(), "it was sent twice"
    assert traffic.of_training == Traffic(boundary=traffic.boundary), "it counts as nothing else"


# ---- bases that frames are coded along


@pytest.fixture
def along(make_spec: MakeSpec) -> RunSpec:
    return make_spec(forward_codec="aqk0.5", key_codec="qk0.5")


def shared_basis(seed: int) -> SideInfoPart:
    """Some basis of the run's channels."""
    generator = torch.Generator().manual_seed(seed)
    basis = learn_basis([torch.randn(64, CHANNELS, generator=generator)], 0.1)
    assert basis is not None
    return SideInfoPart(basis.data)


GRADIENTS = SideInfoKey(BLOCK, TensorKind.GRADIENT)
TAUGHT = 5


def name_of(basis: SideInfoPart) -> bytes:
    return Basis.from_bytes(basis.data, CHANNELS).name


async def taught(up: BoundaryEnd, down: BoundaryEnd, steps: int = 3) -> None:
    """Both ends after some steps: of first activations and of changes a basis is known."""
    for step in range(steps):
        await both_ways(up, down, step, tensors(step))


async def receive_step(
    hand: Hand, up: BoundaryEnd, step: int, *, learns_at_once: bool = False
) -> list[Frame | SideInfoPart]:
    """Return the sender's messages of a step in order; acknowledge and commit it.

    The next bases are learned as the step begins, or only when they are sent.
    """
    if learns_at_once:
        up.bases.learn()
    up.begin(step, SAMPLES)
    up.send(step, tensors(step))
    received: list[Frame | SideInfoPart] = []
    while sum(isinstance(message, Frame) for message in received) < len(SAMPLES):
        message = await hand.receive()
        assert isinstance(message, Frame | SideInfoPart), message
        received.append(message)
        if isinstance(message, Frame):
            await hand.send(Ack(message.key))
    await up.boundary.wait_settled()
    names = {name_of(message) for message in received if isinstance(message, SideInfoPart)}
    for basis in coming(up):
        if basis.name in names:
            continue
        message = await hand.receive()
        assert isinstance(message, SideInfoPart)
        assert name_of(message) == basis.name
        received.append(message)
    up.store.commit()
    up.bases.commit()
    return received


def coming(up: BoundaryEnd) -> list[SideInfo]:
    """Return the bases that activations use only from the next step on."""
    found = [
        up.bases.next_info(SideInfoKey(BLOCK, kind))
        for kind in (TensorKind.FIRST, TensorKind.CHANGE)
    ]
    return [basis for basis in found if basis is not None]


def assert_sent_before_needed(messages: Sequence[Frame | SideInfoPart]) -> list[bytes]:
    """Return the names that were sent, once each, and before the first frame that needs them."""
    names: list[bytes] = []
    for message in messages:
        if isinstance(message, SideInfoPart):
            names.append(name_of(message))
        elif side_info_needed(message.tensor):
            assert side_info_needed(message.tensor) in names
    assert len(names) == len(set(names))
    return names


async def test_a_basis_is_said_once_a_connection_before_the_first_frame_that_needs_it(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        messages = [message for step in range(7) for message in await receive_step(hand, up, step)]
        names = assert_sent_before_needed(messages)
        # After the first and the second, fourth step of changes; first activations have no more.
        assert len(names) == 3
        hand = await site.call()
        again = await receive_step(hand, up, 7)
        assert assert_sent_before_needed(again) == names[-1:], "over a new connection anew"


async def test_a_new_basis_is_said_before_there_is_a_frame_that_needs_it(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    """All boundaries of a pipeline send theirs at once, though frames come one after the other."""
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        for step in range(2):  # of first activations, and of changes for the first time
            await receive_step(hand, up, step)
        up.begin(2, SAMPLES)
        message = await hand.receive()
        assert isinstance(message, SideInfoPart)
        up.send(2, tensors(2))
        frames = [await hand.receive() for _ in SAMPLES]
        assert all(
            isinstance(one, Frame) and side_info_needed(one.tensor) == name_of(message)
            for one in frames
        )


async def test_a_basis_of_the_next_step_is_said_behind_the_last_frame_of_this_one(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    """The pipeline drains then and links idle; before the first frame nothing is sent."""
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        steps = [await receive_step(hand, up, step) for step in range(5)]
        *frames, last = steps[3]
        assert all(isinstance(message, Frame) for message in frames)
        assert isinstance(last, SideInfoPart)
        needed = [side_info_needed(one.tensor) for one in steps[4] if isinstance(one, Frame)]
        assert needed == [name_of(last)] * len(steps[4])


async def test_a_basis_that_is_learned_by_then_is_said_between_the_frames_of_this_step(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    """Links have room between frames, as long as the basis is smaller than a part."""
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        steps = [await receive_step(hand, up, step, learns_at_once=True) for step in range(5)]
        assert [type(message) for message in steps[3][:3]] == [Frame, SideInfoPart, Frame]
        assert_sent_before_needed([message for step in steps for message in step])
        assert all(isinstance(message, Frame) for message in steps[4])


async def test_a_basis_that_was_said_for_the_next_step_is_said_anew_over_another_stream(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        for step in range(4):
            messages = await receive_step(hand, up, step)
        hand = await site.call()
        again = await receive_step(hand, up, 4)
        assert again[0] == messages[-1]
        assert len(again) == 1 + len(SAMPLES)


async def test_frames_sent_again_over_a_new_stream_come_behind_their_basis(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        for step in range(4):
            await receive_step(hand, up, step)
        up.begin(4, SAMPLES)  # with which none comes
        up.send(4, tensors(4))
        for received in ([], [forward(0, 4)], [forward(0, 4), forward(2, 4)]):
            hand = await site.call(received=received)
            messages = [await hand.receive() for _ in range(1 + len(SAMPLES) - len(received))]
            frames = [message for message in messages if isinstance(message, Frame)]
            assert isinstance(messages[0], SideInfoPart)
            assert {side_info_needed(frame.tensor) for frame in frames} == {name_of(messages[0])}
        await hand.send(Ack(forward(1, 4)))
        await up.boundary.wait_settled()


@pytest.mark.thorough
async def test_a_break_at_any_message_changes_nothing_along_a_basis(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    async def run(**cuts: int) -> tuple[Moved, int]:
        script: Any = {name: {LINK: [at]} for name, at in cuts.items()}
        faulty = FaultyTransport(transport, **script)
        up, down = make_ends(along)
        async with at_work(down, up) as site, site.dialled(up, faulty):
            await taught(up, down)
            forget(down, 1)
            moved = await both_ways(up, down, 3, tensors(3))
        assert_equal_buffers(up, down)
        return moved, faulty.num_cuts

    quiet, _ = await run()
    for cut in ("cut_sends", "cut_receives"):
        num_messages = 0
        while True:
            got, num_cuts = await run(**{cut: num_messages + 1})
            assert_same(got, quiet)
            if not num_cuts:
                break
            num_messages += 1
        assert num_messages >= 1 + 4 * len(SAMPLES)


async def test_the_bytes_of_a_basis_are_counted(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        messages = [message for step in range(5) for message in await receive_step(hand, up, step)]
        traffic = up.boundary.take_traffic()
    bases = [message for message in messages if isinstance(message, SideInfoPart)]
    assert len(bases) == 2
    assert traffic.forward_bytes == sum(map(wire_bytes, messages))
    assert traffic.relayed_bytes == 0
    assert (
        traffic.key_frames + traffic.delta_frames == len(messages) - len(bases) == 5 * len(SAMPLES)
    )


async def test_a_basis_that_goes_over_a_relay_is_counted_as_such(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(along)
    async with at_work(down, up) as site, site.dialled(up, transport):
        site.channel.is_relayed = True
        await taught(up, down)
        traffic = up.boundary.take_traffic()
    assert traffic.relayed_bytes == traffic.forward_bytes > 0


async def test_a_basis_that_outlives_others_is_still_there_when_it_is_needed(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    """Many bases of changes follow each other while one of first activations stays."""
    up, down = make_ends(along)
    async with at_work(down, up) as site, site.dialled(up, transport):
        for step in range(18):  # in which five bases of changes are made
            if step in (2, 3):
                forget(down, 1)  # what comes instead goes along that of first activations
            await both_ways(up, down, step, tensors(step))
        forget(down, 1)
        up.boundary.take_traffic()
        await both_ways(up, down, 18, tensors(18))
        traffic = up.boundary.take_traffic()
        assert (traffic.key_frames, traffic.delta_frames) == (1, 3), "nothing was broken off"
    assert_equal_buffers(up, down)


# ---- codebooks of gradients: the same the other way


@pytest.fixture
def book_spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec(forward_codec="q4", backward_codec="q2+z+book")


async def test_a_codebook_goes_up_before_the_first_gradient_that_needs_it_and_is_counted(
    book_spec: RunSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(book_spec)
    async with at_work(down, up) as site, site.dialled(up, transport):
        sizes = []
        for step in range(12):
            await both_ways(up, down, step, tensors(step))
            assert up.boundary.take_traffic().backward_bytes == 0
            sizes.append(down.boundary.take_traffic())
        basis = down.bases.get(GRADIENTS)
        assert basis is not None
        assert up.bases.get(GRADIENTS) is None, "it is the sender's"
    assert all(traffic.forward_bytes == 0 for traffic in sizes)
    basis_bytes = max(traffic.backward_bytes for traffic in sizes) - sizes[0].backward_bytes
    assert basis_bytes > len(basis.data) / 2


@pytest.mark.thorough
async def test_a_break_at_any_message_changes_nothing_beside_a_codebook(
    book_spec: RunSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    async def run(**cuts: int) -> tuple[Moved, int]:
        script: Any = {name: {LINK: [at]} for name, at in cuts.items()}
        faulty = FaultyTransport(transport, **script)
        up, down = make_ends(book_spec)
        async with at_work(down, up) as site, site.dialled(up, faulty):
            await taught(up, down, steps=TAUGHT)
            assert down.bases.get(GRADIENTS) is not None
            moved = await both_ways(up, down, TAUGHT, tensors(TAUGHT))
        return moved, faulty.num_cuts

    quiet, _ = await run()
    for cut in ("cut_sends", "cut_receives"):
        at, num_cuts = 1, 1
        while num_cuts:
            got, num_cuts = await run(**{cut: at})
            assert_same(got, quiet)
            at += 5
        assert at > TAUGHT * len(SAMPLES)


async def test_who_computes_gradients_may_say_no_more_codebooks_than_two_steps_need(
    book_spec: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(book_spec)
    async with at_work(down, up) as site:
        down.begin(0, SAMPLES)
        hand = await site.call()
        with pytest.raises(OutOfTurn, match="4 pieces in a step, got 5"):
            await hand.fails(*(shared_basis(seed) for seed in range(5)))


HOSTILE_BASES: dict[str, tuple[Callable[[], list[SideInfoPart]], type[SwarmError], str]] = {
    "no bytes": (lambda: [SideInfoPart(b"")], BadFrame, "or more, got 0"),
    "crumbs": (lambda: [SideInfoPart(b"\x5a", 500)], BadFrame, "or more, got 1"),
    "one too large to be any": (
        lambda: [SideInfoPart(bytes(LEAST_PART_BYTES), 1 << 31)],
        BadFrame,
        "expected at most",
    ),
    "parts that do not fit": (
        lambda: [SideInfoPart(bytes(LEAST_PART_BYTES), 700), SideInfoPart(bytes(500), 0)],
        BadFrame,
        "expected 700 bytes more, got 500 and 0",
    ),
    "noise": (lambda: [SideInfoPart(b"\x5a" * 500)], BadFrame, "basis"),
    "a basis cut short": (
        lambda: [SideInfoPart(shared_basis(1).data[:-1])],
        BadFrame,
        "frame|basis",
    ),
    "one of other channels": (
        lambda: [SideInfoPart((1).to_bytes(2, "little") + bytes([9, 0, 0, 0, 0]))],
        BadFrame,
        "over 8 channels, got 1 over 9",
    ),
    "directions without end": (
        lambda: [SideInfoPart(b"\xff\xff" + bytes([CHANNELS, 0, 0, 0, 0]))],
        BadFrame,
        "got 65535 over",
    ),
    "bases without end": (
        lambda: [shared_basis(seed) for seed in range(5)],
        OutOfTurn,
        "expected at most 4 pieces in a step, got 5",
    ),
}


@pytest.mark.parametrize(("bases", "error", "match"), HOSTILE_BASES.values(), ids=HOSTILE_BASES)
async def test_a_hostile_basis_costs_its_stream_and_harms_nothing(
    along: RunSpec,
    make_ends: MakeEnds,
    at_work: AtWork,
    transport: Transport,
    bases: Callable[[], list[SideInfoPart]],
    error: type[SwarmError],
    match: str,
) -> None:
    up, down = make_ends(along)
    async with at_work(down, up) as site:
        down.begin(0, SAMPLES)
        hand = await site.call()
        with pytest.raises(error, match=match):
            await hand.fails(*bases())
        await assert_unharmed(up, down, transport, site)


async def test_who_sends_gradients_has_no_basis_to_say(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(along)
    async with at_work(up, down) as site:
        hand = await site.call()
        with pytest.raises(OutOfTurn, match="expected no side information"):
            await hand.fails(shared_basis(1))


async def test_a_frame_along_a_basis_that_was_not_said_costs_its_stream(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork, transport: Transport
) -> None:
    up, down = make_ends(along)
    coder = FrameCoder(along, run_id=RunId("run"), boundary=BLOCK, store=BufferStore())
    frame = coder.encode(forward(0), torch.ones(TOKENS, CHANNELS))
    named = name_of(shared_basis(1)) + frame.tensor.payload[4:]
    async with at_work(down, up) as site:
        down.begin(0, SAMPLES)
        hand = await site.call()
        await hand.send(shared_basis(2))
        with pytest.raises(BadFrame, match="which this end does not have"):
            await hand.fails(replace(frame, tensor=replace(frame.tensor, payload=named)))
        assert down.arrivals.empty()
        await assert_unharmed(up, down, transport, site)


async def test_as_many_bases_as_two_steps_need_are_taken_in_every_step(
    along: RunSpec, make_ends: MakeEnds, at_work: AtWork
) -> None:
    up, down = make_ends(along)
    async with at_work(down, up) as site:
        hand = await site.call()
        coder = FrameCoder(along, run_id=RunId("run"), boundary=BLOCK, store=BufferStore())
        for step in range(3):
            down.begin(step, (0,))
            await hand.send(*(shared_basis(10 * step + seed) for seed in range(4)))
            await hand.send(coder.encode(forward(0, step), torch.ones(TOKENS, CHANNELS)))
            await down.receive(1)
            assert await hand.receive() == Ack(forward(0, step))
            down.store.commit()
            coder = FrameCoder(along, run_id=RunId("run"), boundary=BLOCK, store=BufferStore())
