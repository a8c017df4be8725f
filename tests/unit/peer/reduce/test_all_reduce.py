"""Replicas on real streams: the same bits everywhere, after any break and any message."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

import pytest
import torch

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.sizes import ROW_VALUES
from swarm_ft.codec.spec import parse_dp_spec
from swarm_ft.errors import (
    BadFrame,
    MalformedMessage,
    NonFinite,
    OutOfTurn,
    ProtocolError,
    RunMismatch,
    SwarmError,
    Unavailable,
)
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.peer.links import MAX_ANSWERS, MAX_BROKEN_STREAMS, LinkChannel, Links
from swarm_ft.peer.reduce.all_reduce import GradientReducer
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.protocol.machines.all_reduce import WINDOW_PIECES, AllReduce, ReduceEffect
from swarm_ft.protocol.messages.reduction import (
    Division,
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    PieceMessage,
    PieceSpan,
    ReduceHello,
)
from swarm_ft.protocol.messages.reports import GradientTraffic
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire.frames import wire_bytes
from swarm_ft.transport.base import Transport
from swarm_ft.transport.methods import LINK
from tests.doubles.faults import FaultyTransport
from tests.unit.peer.conftest import MakeSpec, links_of
from tests.unit.peer.hands import Caller, Hand

N = 5 * ROW_VALUES + 21
ROW_BYTES = 4 * ROW_VALUES
LAYERS = LayerRange(0, 2)

AtWork: TypeAlias = "Callable[..., AbstractAsyncContextManager[Group]]"
P = ParamSpec("P")
R = TypeVar("R")
UntilReceived: TypeAlias = Callable[[int], asyncio.Event]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row each, so that a small gradient has many."""
    monkeypatch.setattr("swarm_ft.protocol.messages.reduction.PIECE_ROWS", 1)


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.MIN_BACKOFF_S", 0.0)


def gradients(count: int, seed: int = 0, n: int = N) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) for _ in range(count)]


def plain_sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def channels(
    links: Links, own: PeerId, endpoints: Mapping[PeerId, str]
) -> dict[PeerId, LinkChannel]:
    """The ways from a member to all others."""
    return {name: links.channel(name, at) for name, at in endpoints.items() if name != own}


def hello_of(name: PeerId, spec: RunSpec, attempt: int = 1, *, num_values: int = N) -> ReduceHello:
    """Return a member's first message."""
    return ReduceHello(
        run_id=RunId("run"),
        spec_digest=spec.digest(),
        attempt=Attempt(attempt),
        peer_id=name,
        layers=LAYERS,
        num_values=num_values,
    )


class Group:
    """Replicas at work; each is served under its own name."""

    def __init__(
        self,
        spec: RunSpec,
        names: tuple[PeerId, ...],
        pool: Executor,
        links: Mapping[PeerId, Links],
        endpoints: Mapping[PeerId, str],
        residuals: list[Residuals] | None,
        attempt: int,
        listeners: Iterable[str],
    ) -> None:
        self.residuals = residuals or [Residuals() for _ in names]
        first = channels(links[names[0]], names[0], endpoints)
        self.channels = [first.get(name) for name in names]
        """Of the first member."""
        self.reducers = [
            GradientReducer(
                hello_of(name, spec, attempt, num_values=0 if name in listeners else N),
                names,
                first if name == names[0] else channels(links[name], name, endpoints),
                codec=spec.train.reduction_codec,
                residuals=own,
                pool=pool,
            )
            for name, own in zip(names, self.residuals, strict=True)
        ]

    async def connected(self) -> None:
        await asyncio.gather(*(reducer.is_connected.wait() for reducer in self.reducers))

    async def reduce(self, step: int, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """All members' results, which are checked to be one."""
        pairs = zip(self.reducers, values, strict=True)
        results = await asyncio.gather(*(r.reduce(StepNumber(step), value) for r, value in pairs))
        for result in results[1:]:
            assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
        return results[0]

    async def reduce_among(
        self, step: int, values: Sequence[torch.Tensor], listeners: str, codec: PieceCodec
    ) -> torch.Tensor:
        """Reduce while some members listen; decode and check their sums, too."""

        away = {PeerId(name) for name in listeners}

        async def work(reducer: GradientReducer, value: torch.Tensor) -> torch.Tensor:
            if reducer.hello.peer_id in listeners:
                return (await reducer.listen(StepNumber(step), away)).decoded(codec)
            return await reducer.reduce(StepNumber(step), value, away)

        await self.connected()
        pairs = zip(self.reducers, values, strict=True)
        results = await asyncio.gather(*(work(*pair) for pair in pairs))
        for result in results[1:]:
            assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))
        return results[0]

    def commit(self) -> None:
        for residuals in self.residuals:
            residuals.commit()


@pytest.fixture
def at_work(make_spec: MakeSpec, pool: Executor, transport: Transport) -> AtWork:
    """`async with at_work("abc", dp="q4")`: a member a letter."""

    @asynccontextmanager
    async def start(
        names: str,
        *,
        dp: str = "none",
        dialling: Transport = transport,
        residuals: list[Residuals] | None = None,
        attempt: int = 1,
        listeners: Iterable[str] = (),
    ) -> AsyncIterator[Group]:
        members = tuple(PeerId(name) for name in names)
        spec = make_spec(dp_codec=dp)
        links = {name: links_of(name, dialling) for name in members}
        servers = {
            name: await transport.serve("127.0.0.1", 0, {LINK: links[name].answer})
            for name in members
        }
        endpoints = {name: server.endpoint for name, server in servers.items()}
        group = Group(spec, members, pool, links, endpoints, residuals, attempt, listeners)
        running = [asyncio.create_task(reducer.run()) for reducer in group.reducers]
        try:
            yield group
        finally:
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
            for name in members:
                await links[name].close()
                await servers[name].stop()
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended

    return start


# ---- a step


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
async def test_uncompressed_the_sum_is_exact_and_in_the_members_order(
    at_work: AtWork, names: str
) -> None:
    async with at_work(names) as group:
        await group.connected()
        for step in range(3):
            values = gradients(len(names), seed=step)
            assert torch.equal(await group.reduce(step, values), plain_sum(values))


@pytest.mark.parametrize(
    ("dp", "bound"), {"fp16": 1e-3, "q8": 0.02, "q4": 0.25, "q4+z": 0.4}.items()
)
async def test_compressed_all_members_still_hold_the_same_bits(
    at_work: AtWork, dp: str, bound: float
) -> None:
    async with at_work("abc", dp=dp) as group:
        for step in range(3):
            values = gradients(3, seed=step)
            assert 0 < error(await group.reduce(step, values), plain_sum(values)) < bound
            group.commit()


@pytest.mark.parametrize("n", [1, 7, 257])
async def test_a_gradient_of_few_values_is_summed_by_some_of_the_members(
    at_work: AtWork, n: int
) -> None:
    async with at_work("abcd") as group:
        values = gradients(4, n=n)
        assert torch.equal(await group.reduce(0, values), plain_sum(values))


async def test_a_gradient_of_many_pieces_and_windows_goes_through(at_work: AtWork) -> None:
    n = (2 * WINDOW_PIECES + 9) * 2 * ROW_VALUES + 1
    async with at_work("ab", dp="q8") as group:
        values = gradients(2, n=n)
        assert error(await group.reduce(0, values), plain_sum(values)) < 0.02


async def test_a_single_member_gets_back_what_it_gave(at_work: AtWork) -> None:
    async with at_work("a", dp="q4") as group:
        await group.connected()
        (value,) = gradients(1)
        assert await group.reduce(0, [value]) is value
        assert group.reducers[0].take_traffic() == GradientTraffic()


async def test_gradients_of_1e_minus_30_are_summed(at_work: AtWork) -> None:
    async with at_work("abc", dp="q4") as group:
        values = [1e-30 * value for value in gradients(3)]
        total = await group.reduce(0, values)
        assert error(1e30 * total, 1e30 * plain_sum(values)) < 0.25


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
async def test_with_feedback_twenty_steps_err_an_order_less_than_one(at_work: AtWork) -> None:
    """Errors of workers and of the servers are both made good."""
    sent, wanted = torch.zeros(N), torch.zeros(N)
    async with at_work("abc", dp="q4") as group:
        for step in range(20):
            noise = gradients(3, seed=1 + step)
            values = [g + 0.3 * n for g, n in zip(gradients(3), noise, strict=True)]
            total = await group.reduce(step, values)
            group.commit()
            if step == 0:
                single = error(total, plain_sum(values))
            sent += total
            wanted += plain_sum(values)
    assert single > 0.05
    assert error(sent, wanted) < single / 10


async def test_a_step_that_is_redone_in_another_attempt_gives_the_same_bits(
    at_work: AtWork,
) -> None:
    values = gradients(3)
    async with at_work("abc", dp="q4") as group:
        await group.reduce(0, values)
        group.commit()
        first = await group.reduce(1, values)
        residuals = group.residuals
    async with at_work("abc", dp="q4", residuals=residuals, attempt=2) as group:
        again = await group.reduce(1, values)
        group.commit()
        other = await group.reduce(2, values)
    assert torch.equal(first, again)
    assert not torch.equal(first, other), "residuals have moved with the commit"


async def test_members_may_come_and_go_between_attempts(at_work: AtWork) -> None:
    """The members that stay make up for what is owed, with the others."""
    values, residuals = gradients(3), [Residuals() for _ in range(3)]
    sent, step = torch.zeros(N), 0
    for attempt, names in enumerate(["abc", "ab", "abc"]):
        own = [residuals["abc".index(name)] for name in names]
        async with at_work(names, dp="q4", residuals=own, attempt=attempt) as group:
            for _ in range(4):
                total = await group.reduce(step, values[: len(names)])
                sent, step = sent + total, step + 1
                group.commit()
    wanted = 8 * plain_sum(values) + 4 * plain_sum(values[:2])
    assert error(sent, wanted) < 0.04


async def test_traffic_is_what_was_sent_and_what_it_would_be_in_float32(at_work: AtWork) -> None:
    async with at_work("abc") as group:
        await group.reduce(0, gradients(3))
        plain = [reducer.take_traffic() for reducer in group.reducers]
        assert group.reducers[0].take_traffic() == GradientTraffic()
    async with at_work("abc", dp="q4") as group:
        await group.reduce(0, gradients(3))
        coded = [reducer.take_traffic() for reducer in group.reducers]
    division = Division(N, 3)
    for member, (one, other) in enumerate(zip(plain, coded, strict=True)):
        start, stop = division.shard(member)
        # The shares of the others' shards, and the sums of its own to each of the two.
        expected = 4 * ((N - (stop - start)) + 2 * (stop - start))
        assert one.uncompressed_bytes == other.uncompressed_bytes == expected
        assert one.uncompressed_bytes < one.sent_bytes
        assert other.sent_bytes < 0.3 * one.sent_bytes


async def test_what_goes_over_a_relay_is_counted_as_such(at_work: AtWork) -> None:
    async with at_work("abr") as group:
        await group.reduce(0, gradients(3))
        traffic = [reducer.take_traffic() for reducer in group.reducers]
    a, b, r = [one.relayed_bytes / one.sent_bytes for one in traffic]
    assert a == pytest.approx(0.5, abs=0.05)
    assert b == pytest.approx(0.5, abs=0.05)
    assert r == 0, "its own way to the others is none"


@pytest.mark.parametrize(
    "bad", [torch.zeros(3, 3), torch.zeros(3).double(), torch.zeros(0)], ids=str
)
async def test_a_gradient_of_another_shape_is_refused(at_work: AtWork, bad: torch.Tensor) -> None:
    async with at_work("a") as group:
        with pytest.raises(MalformedMessage, match=r"expected float32 \[n\], got"):
            await group.reducers[0].reduce(StepNumber(0), bad)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 1e31])
async def test_a_gradient_that_is_not_finite_fails_the_step_at_its_member(
    at_work: AtWork, bad: float
) -> None:
    async with at_work("ab") as group:
        one, other = gradients(2)
        other[N - 1] = bad
        waiting = asyncio.create_task(group.reducers[0].reduce(StepNumber(4), one))
        with pytest.raises(NonFinite, match="step 4: a gradient is larger than 1e"):
            await group.reducers[1].reduce(StepNumber(4), other)
        waiting.cancel()


@pytest.fixture
def until_received(monkeypatch: pytest.MonkeyPatch) -> UntilReceived:
    """`until_heard(n)`: an event, set once n pieces more have arrived anywhere."""

    def start(num_pieces: int) -> asyncio.Event:
        has_received, receive, pieces = asyncio.Event(), AllReduce.receive, []

        def receive_and_notify(
            machine: AllReduce, member: int, message: PieceMessage
        ) -> list[ReduceEffect]:
            effects = receive(machine, member, message)
            if isinstance(message, GradientPiece):
                pieces.append(message)
            if len(pieces) == num_pieces:
                has_received.set()
            return effects

        monkeypatch.setattr(AllReduce, "receive", receive_and_notify)
        return has_received

    return start


async def test_a_step_may_begin_at_one_member_long_before_another(
    at_work: AtWork, until_received: UntilReceived
) -> None:
    async with at_work("abc") as group:
        await group.reduce(0, gradients(3))
        values = gradients(3, seed=1)
        has_received = until_received(
            2 * 2 + 2 * 2
        )  # two from each to c, and two each way between a and b
        early = [
            asyncio.create_task(group.reducers[i].reduce(StepNumber(1), values[i])) for i in (0, 1)
        ]
        await has_received.wait()
        assert not any(task.done() for task in early)
        late = await group.reducers[2].reduce(StepNumber(1), values[2])
        for task in early:
            assert torch.equal(await task, late)
        assert torch.equal(late, plain_sum(values))


# ---- broken streams


async def two_steps(
    at_work: AtWork, transport: Transport, **cuts: Iterable[int]
) -> tuple[torch.Tensor, int]:
    script: Any = {name: {LINK: at} for name, at in cuts.items()}
    faulty = FaultyTransport(transport, **script)
    async with at_work("abc", dp="q4", dialling=faulty) as group:
        results = []
        for step in range(2):
            results.append(await group.reduce(step, gradients(3, seed=step)))
            group.commit()
    return torch.stack(results), faulty.num_cuts


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
@pytest.mark.parametrize("cut", ["cut_sends", "cut_receives"])
@pytest.mark.thorough
async def test_a_break_at_any_message_changes_nothing(
    at_work: AtWork, transport: Transport, cut: str
) -> None:
    quiet, _ = await two_steps(at_work, transport)
    num_messages = 0
    while True:
        results, num_cuts = await two_steps(at_work, transport, **{cut: [num_messages + 1]})
        assert torch.equal(results, quiet)
        if not num_cuts:
            break
        num_messages += 1
    # Of every pair, one dials: its hello, and two shares, two sums and their acks in both steps.
    assert num_messages >= 3 * (1 + 2 * 4)


@pytest.mark.parametrize("transport", ["grpc"], indirect=True)
async def test_breaks_in_the_middle_of_grpc_streams_change_nothing(
    at_work: AtWork, transport: Transport
) -> None:
    quiet, _ = await two_steps(at_work, transport)
    for cuts in ({"cut_sends": [4, 9, 17]}, {"cut_receives": [5, 8, 21]}):
        results, num_cuts = await two_steps(at_work, transport, **cuts)
        assert num_cuts == 3
        assert torch.equal(results, quiet)


async def test_connected_tells_whether_all_streams_are_up(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with at_work("abc") as group:
        await group.connected()
        first = group.reducers[0]
        down = asyncio.Event()
        clear = first.is_connected.clear

        def clear_and_notify() -> None:
            clear()
            down.set()

        monkeypatch.setattr(first.is_connected, "clear", clear_and_notify)
        channel = group.channels[2]
        assert channel is not None
        channel.break_off(Unavailable("a test"))
        await down.wait()
        await group.connected()
        values = gradients(3)
        assert torch.equal(await group.reduce(0, values), plain_sum(values))


# ---- a member driven by hand


class Site:
    """Member b of a and b at work; `call` gives an a that is driven by hand."""

    def __init__(
        self,
        spec: RunSpec,
        pool: Executor,
        transport: Transport,
        *,
        own_pool: Executor | None = None,
    ) -> None:
        self.links = {name: links_of(name, transport) for name in "ab"}
        self.caller = Caller(transport, "a", "b")
        self.codec = PieceCodec(spec.train.reduction_codec)
        self.reducer = self.member("b", "a", spec, own_pool or pool, "")
        self.make_peer = partial(self.member, "a", "b", spec, pool)
        self.hello = self.make_peer("").hello
        self.running = asyncio.create_task(self.reducer.run())

    def member(
        self, own: str, other: str, spec: RunSpec, pool: Executor, endpoint: str
    ) -> GradientReducer:
        return GradientReducer(
            hello_of(PeerId(own), spec),
            (PeerId("a"), PeerId("b")),
            {PeerId(other): self.links[own].channel(PeerId(other), endpoint)},
            codec=spec.train.reduction_codec,
            residuals=Residuals(),
            pool=pool,
        )

    async def call(self, hello: ReduceHello | None = None) -> Hand:
        """An a that has exchanged hellos."""
        hand, greeting = await self.caller.greet(hello or self.hello)
        assert greeting == [replace(self.hello, peer_id=PeerId("b"))]
        return hand

    async def assert_unharmed(self, step: int) -> None:
        """After an attack, an a that plays by the rules sums as ever."""
        peer = self.make_peer(self.caller.endpoint)
        running = asyncio.create_task(peer.run())
        values = gradients(2, seed=step)
        results = await asyncio.gather(
            peer.reduce(StepNumber(step), values[0]),
            self.reducer.reduce(StepNumber(step), values[1]),
        )
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for result in results:
            assert torch.equal(result, plain_sum(values))
        assert not self.running.done()


@asynccontextmanager
async def served(site: Site, transport: Transport) -> AsyncIterator[Site]:
    server = await transport.serve("127.0.0.1", 0, {LINK: site.links["b"].answer})
    site.caller.endpoint = server.endpoint
    yield site
    await site.caller.close()
    site.running.cancel()
    await asyncio.gather(site.running, return_exceptions=True)
    for links in site.links.values():
        await links.close()
    await server.stop()


@pytest.fixture
async def site(make_spec: MakeSpec, pool: Executor, transport: Transport) -> AsyncIterator[Site]:
    async with served(Site(make_spec(), pool, transport), transport) as site:
        yield site


PLAIN, Q4 = (PieceCodec(parse_dp_spec(text)) for text in ("none", "q4"))


@pytest.fixture
def division() -> Division:
    """Divide N values among a and b, a row a piece: a sums 0 to 2, b 3 to 5."""
    division = Division(N, 2)
    assert [span.owner for span in division.spans] == [0, 0, 0, 1, 1, 1]
    return division


def piece_key(step: int, phase: Phase, index: int) -> PieceKey:
    return PieceKey(Attempt(1), StepNumber(step), phase, index)


def piece(
    phase: Phase, span: PieceSpan, values: torch.Tensor, step: int = 0, codec: PieceCodec = PLAIN
) -> GradientPiece:
    part = values[span.start : span.stop]
    return GradientPiece(piece_key(step, phase, span.index), codec.encode(part).tensor)


async def test_pieces_are_acknowledged_and_sent_again_only_if_they_are_not(
    site: Site, division: Division
) -> None:
    one, other = gradients(2)
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), other))
    hand = await site.call()
    shares = [await hand.expect(GradientPiece) for _ in range(3)]
    expected = [piece(Phase.SHARE, span, other) for span in division.spans[:3]]
    assert sorted(shares, key=lambda share: share.key) == expected
    await hand.send(PieceAck(shares[1].key))

    await hand.send(piece(Phase.SHARE, division.spans[4], one))
    ack, total = await hand.receive(), await hand.expect(GradientPiece)
    assert ack == PieceAck(piece_key(0, Phase.SHARE, 4))
    assert total == piece(Phase.SUM, division.spans[4], one + other)

    hand = await site.call()
    again = [await hand.expect(GradientPiece) for _ in range(3)]
    assert sorted(m.key for m in again) == sorted(m.key for m in (shares[0], shares[2], total))
    await hand.send(*(PieceAck(m.key) for m in again))
    for span in (division.spans[5], division.spans[3]):
        await hand.send(piece(Phase.SHARE, span, one))
        assert await hand.receive() == PieceAck(piece_key(0, Phase.SHARE, span.index))
        assert (await hand.expect(GradientPiece)).key == piece_key(0, Phase.SUM, span.index)
        await hand.send(PieceAck(piece_key(0, Phase.SUM, span.index)))
    for span in division.spans[:3]:
        assert not summing.done()
        await hand.send(piece(Phase.SUM, span, one + other))
        assert await hand.receive() == PieceAck(piece_key(0, Phase.SUM, span.index))
    assert torch.equal(await summing, one + other)


async def test_every_byte_counts_also_those_sent_again(site: Site) -> None:
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), gradients(2)[1]))
    num_bytes = 0
    for _ in range(3):
        hand = await site.call()
        for _ in range(3):
            num_bytes += wire_bytes(await hand.expect(GradientPiece))
    summing.cancel()
    traffic = site.reducer.take_traffic()
    assert traffic == GradientTraffic(sent_bytes=num_bytes, uncompressed_bytes=3 * 3 * ROW_BYTES)


async def test_a_second_arrival_changes_nothing(site: Site, division: Division) -> None:
    one, other = gradients(2)
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), other))
    hand = await site.call()
    twice = [piece(Phase.SHARE, span, one) for span in division.spans[3:] for _ in range(2)]
    shares = {(await hand.expect(GradientPiece)).key for _ in range(3)}
    await hand.send(*twice, *(PieceAck(key) for key in shares))
    for span in division.spans[:3]:
        total = piece(Phase.SUM, span, one + other)
        await hand.send(total, total, piece(Phase.SHARE, division.spans[3], 2 * one))
    acks: set[PieceKey] = set()
    sums: set[PieceKey] = set()
    while len(acks) < 3 + 3 or len(sums) < 3:
        match await hand.receive():
            case PieceAck(key):
                acks.add(key)
            case GradientPiece(key):
                sums.add(key)
                await hand.send(PieceAck(key))
    assert torch.equal(await summing, one + other)


@pytest.mark.parametrize("phase", Phase)
async def test_a_piece_that_could_not_be_read_may_come_again_over_the_next_stream(
    site: Site, division: Division, phase: Phase
) -> None:
    one, other = gradients(2)
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), other))
    shares = [piece(Phase.SHARE, span, one) for span in division.spans[3:]]
    sums = [piece(Phase.SUM, span, one + other) for span in division.spans[:3]]
    good = shares[0] if phase is Phase.SHARE else sums[0]
    hand = await site.call()
    for _ in range(3):
        await hand.receive()
    with pytest.raises(BadFrame):
        await hand.fails(replace(good, tensor=replace(good.tensor, payload=b"short")))
    hand = await site.call()
    for _ in range(3):
        await hand.send(PieceAck((await hand.expect(GradientPiece)).key))
    await hand.send(*shares, *sums)
    for _ in range(3 + 3 + 3):
        if isinstance(message := await hand.receive(), GradientPiece):
            await hand.send(PieceAck(message.key))
    assert torch.equal(await summing, one + other)


class GatedPool(ThreadPoolExecutor):
    """Computes nothing before the gate is open."""

    def __init__(self) -> None:
        super().__init__(4)
        self.gate = threading.Event()
        self.entered = asyncio.Event()

    def submit(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        self.entered.set()

        def gated() -> R:
            self.gate.wait()
            return work(*args, **kwargs)

        return super().submit(gated)


async def test_what_was_computed_for_a_step_that_was_given_up_does_not_reach_the_next(
    make_spec: MakeSpec, pool: Executor, transport: Transport
) -> None:
    with GatedPool() as gated:
        made = Site(make_spec(), pool, transport, own_pool=gated)
        async with served(made, transport) as site:
            summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), torch.ones(N)))
            await gated.entered.wait()
            summing.cancel()
            after = asyncio.create_task(site.assert_unharmed(step=1))
            await site.reducer.is_connected.wait()
            gated.gate.set()
            await after


# ---- hostile members


def share_of(
    division: Division, index: int, values: torch.Tensor | None = None, **changes: Any
) -> GradientPiece:
    span = division.spans[index]
    made = piece(Phase.SHARE, span, torch.ones(N) if values is None else values)
    return replace(made, tensor=replace(made.tensor, **changes))


ATTACKS = {
    "a share outside b's shard": (lambda d: [share_of(d, 0)], OutOfTurn, "expected 3 to 5"),
    "a share beyond the division": (
        lambda d: [
            GradientPiece(piece_key(0, Phase.SHARE, 6), share_of(d, 3).tensor),
        ],
        OutOfTurn,
        "SHARE of piece 6",
    ),
    "a sum of b's own shard": (
        lambda d: [piece(Phase.SUM, d.spans[3], torch.ones(N))],
        OutOfTurn,
        "SUM of piece 3: expected 0 to 2",
    ),
    "another codec": (
        lambda d: [piece(Phase.SHARE, d.spans[3], torch.ones(N), codec=Q4)],
        BadFrame,
        "expected none, the run's --dp, got q4t",
    ),
    "another shape": (
        lambda d: [share_of(d, 3, tokens=2, payload=bytes(2 * ROW_BYTES))],
        BadFrame,
        "expected 1 x 128 values, got 2 x 128",
    ),
    "more values than any piece": (
        lambda d: [share_of(d, 3, tokens=1 << 17)],
        BadFrame,
        "at most 2048 x 128",
    ),
    "too many bytes": (
        lambda d: [share_of(d, 3, payload=bytes(ROW_BYTES + 1))],
        BadFrame,
        "expected 512 bytes at most, got 513",
    ),
    "too few bytes": (lambda d: [share_of(d, 3, payload=b"")], BadFrame, "takes 512 bytes, got 0"),
    "numbers that are not finite": (
        lambda d: [share_of(d, 3, payload=b"\xff" * ROW_BYTES)],
        BadFrame,
        "finite",
    ),
    "numbers whose sum would not be finite": (
        lambda d: [share_of(d, 3, torch.full((N,), 3e38))],
        BadFrame,
        "expected gradients up to 1e",
    ),
    "a sum that is too large": (
        lambda d: [piece(Phase.SUM, d.spans[0], torch.full((N,), 3e38))],
        BadFrame,
        "expected gradients up to 1e",
    ),
    "more early shares than a window": (
        lambda d: [
            GradientPiece(piece_key(1 + i, Phase.SHARE, 3), share_of(d, 3).tensor)
            for i in range(WINDOW_PIECES + 1)
        ],
        OutOfTurn,
        "before their step",
    ),
    "more early sums than a window": (
        lambda d: [
            GradientPiece(piece_key(1 + i, Phase.SUM, 0), share_of(d, 0).tensor)
            for i in range(WINDOW_PIECES + 1)
        ],
        OutOfTurn,
        "more than 32 sums arrived before their step",
    ),
}


@pytest.mark.parametrize(("pieces", "kind", "match"), ATTACKS.values(), ids=ATTACKS)
async def test_a_bad_piece_costs_its_stream_and_harms_nothing(
    site: Site,
    division: Division,
    pieces: Callable[[Division], list[GradientPiece]],
    kind: type[SwarmError],
    match: str,
) -> None:
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), gradients(2)[1]))
    hand = await site.call()
    for _ in range(3):
        assert (await hand.expect(GradientPiece)).key.phase is Phase.SHARE
    with pytest.raises(kind, match=match):
        await hand.fails(*pieces(division))
    assert not summing.done()
    summing.cancel()
    await site.assert_unharmed(step=1)


async def test_a_second_hello_costs_the_stream(site: Site) -> None:
    hand = await site.call()
    with pytest.raises(OutOfTurn, match="a sent its hello twice"):
        await hand.fails(site.hello)
    await site.assert_unharmed(step=0)


async def test_bytes_that_are_no_message_cost_the_stream(site: Site) -> None:
    for nonsense in (b"\x08\xff", b""):
        with pytest.raises(MalformedMessage):
            await site.caller.fails(nonsense)
    await site.assert_unharmed(step=0)


async def test_an_unplanned_share_that_came_early_does_not_fail_the_step(
    site: Site, division: Division, until_received: UntilReceived
) -> None:
    hand = await site.call()
    has_received = until_received(1)
    await hand.send(share_of(division, 0))
    await has_received.wait()
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), gradients(2)[1]))
    with pytest.raises(OutOfTurn, match="SHARE of piece 0"):
        await hand.fails()
    assert not summing.done()
    summing.cancel()
    await site.assert_unharmed(step=1)


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
async def test_one_who_sends_and_never_reads_is_dropped(site: Site, division: Division) -> None:
    one, other = gradients(2)
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), other))
    hand = await site.call()
    share = piece(Phase.SHARE, division.spans[3], one)
    await hand.send(share)
    answers = [await hand.receive() for _ in range(3 + 2)]
    assert PieceAck(share.key) in answers
    with pytest.raises(OutOfTurn, match="does not read"):
        await hand.send(*[share] * 2 * MAX_ANSWERS)
    summing.cancel()


async def break_a_stream(site: Site) -> None:
    hand = await site.call()
    with suppress(SwarmError):
        await hand.fails(site.hello)


async def test_a_member_that_breaks_stream_after_stream_fails_the_attempt(site: Site) -> None:
    for _ in range(MAX_BROKEN_STREAMS):
        assert not site.running.done()
        await break_a_stream(site)
    with pytest.raises(ExceptionGroup) as caught:
        await site.running
    (failure,) = caught.value.exceptions
    assert type(failure) is ProtocolError
    assert "peer a: 3 streams failed, the last with out-of-turn: a sent" in str(failure)


async def test_streams_that_only_get_lost_are_no_reason_to_give_up(site: Site) -> None:
    for _ in range(2 * MAX_BROKEN_STREAMS):
        hand = await site.call()
        await hand.stream.cancel()
    await site.assert_unharmed(step=0)


async def test_a_newer_stream_replaces_the_older(site: Site) -> None:
    old = await site.call()
    new = await site.call()
    with pytest.raises(Unavailable, match="a newer stream replaced it"):
        await old.fails()
    summing = asyncio.create_task(site.reducer.reduce(StepNumber(0), gradients(2)[1]))
    assert (await new.expect(GradientPiece)).key.phase is Phase.SHARE
    summing.cancel()


# ---- hellos


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"spec_digest": b"x" * 16}, RunMismatch, "RunSpec digest .* here"),
        ({"layers": LayerRange(0, 3)}, OutOfTurn, "expected layers 0-2, got 0-3"),
    ],
    ids=str,
)
async def test_a_hello_that_does_not_fit_is_refused(
    site: Site, changes: dict[str, Any], kind: type[SwarmError], match: str
) -> None:
    hand = await site.caller.link()
    with pytest.raises(kind, match=match):
        await hand.fails(replace(site.hello, **changes))
    await site.assert_unharmed(step=0)


def test_the_hello_names_what_both_sides_must_agree_on() -> None:
    assert set(ReduceHello.__dataclass_fields__) == {
        "run_id",
        "spec_digest",
        "attempt",
        "peer_id",
        "layers",
        "scope",
        "num_values",
    }


# ---- members that listen


@pytest.mark.parametrize("dp", ["none", "q4"])
@pytest.mark.parametrize(("names", "listeners"), [("ab", "b"), ("ab", "a"), ("abcd", "ac")])
async def test_a_listener_keeps_the_bits_that_all_others_take(
    at_work: AtWork, names: str, listeners: str, dp: str
) -> None:
    values = gradients(len(names))
    summed = [v for name, v in zip(names, values, strict=True) if name not in listeners]
    codec = PLAIN if dp == "none" else Q4
    async with at_work(names, dp=dp, listeners=listeners) as group:
        for step in range(3):
            total = await group.reduce_among(step, values, listeners, codec)
            assert error(total, plain_sum(summed)) < (1e-6 if dp == "none" else 0.4)
            group.commit()


async def test_who_listened_gives_its_gradient_as_soon_as_it_has_one(at_work: AtWork) -> None:
    values = gradients(3)
    async with at_work("abc", listeners="b") as group:
        first = await group.reduce_among(0, values, "b", PLAIN)
        assert torch.equal(first, values[0] + values[2])
        assert torch.equal(await group.reduce(1, values), plain_sum(values))


async def test_nobody_can_listen_where_nobody_has_weights(at_work: AtWork) -> None:
    async with at_work("ab", listeners="ab") as group:
        await group.connected()
        with pytest.raises(OutOfTurn, match="no connected member has weights"):
            await group.reducers[0].listen(StepNumber(0), {PeerId("a"), PeerId("b")})


async def test_members_whose_gradients_have_other_lengths_do_not_meet(site: Site) -> None:
    hand = await site.caller.link()
    await hand.send(replace(site.hello, num_values=N + 1))
    with pytest.raises(RunMismatch, match=f"{N} values here, {N + 1} at peer a"):
        await hand.fails()


async def test_a_member_that_listens_cannot_give_a_share(site: Site, division: Division) -> None:
    alone = Division(N, 2, {0})
    summing = asyncio.create_task(
        site.reducer.reduce(StepNumber(0), gradients(2)[1], {PeerId("a")})
    )
    hand = await site.call()
    with pytest.raises(OutOfTurn, match="from a member that listens"):
        await hand.fails(piece(Phase.SHARE, alone.spans[0], torch.ones(N)))
    summing.cancel()
    await asyncio.gather(summing, return_exceptions=True)
