"""The coordinator from outside: its own journal, protobuf over a transport, no mocks."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.tokens import NewTokenFile, TokenFiles
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.coordinator.service import MAX_OWN_FOLLOWERS, TICK_S, CoordinatorService
from swarm_ft.coordinator.submission import MAX_KEYLESS_SUBMISSIONS
from swarm_ft.coordinator.watching import MAX_OWN_WATCHERS, MAX_WATCHERS
from swarm_ft.errors import (
    BadDataset,
    BadOption,
    Busy,
    JournalError,
    MalformedMessage,
    NotAllowed,
    NotFound,
    OutOfTurn,
    RunMismatch,
    SwarmError,
    Unavailable,
    VersionMismatch,
)
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import Attempt, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import (
    CancelRequest,
    CollectedRequest,
    RunEvent,
    RunPhase,
    RunStatus,
    SampleTokens,
    StatusRequest,
    StepCommitted,
    SubmitHeader,
    SubmitPart,
    SwarmStatus,
    WatchRequest,
)
from swarm_ft.protocol.messages.control import (
    Assign,
    ClockProbe,
    ClockReply,
    FromPeer,
    HeldStage,
    MemoryShare,
    PeerAlive,
    PeerGoodbye,
    PlanStep,
    ReleaseStage,
    Revoked,
    StageFailed,
    StayIdle,
    ToPeer,
)
from swarm_ft.protocol.messages.events import EventsRequest
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.messages.timeline import ClockEstimate, PeerTimeline, Spans, StepTimeline
from swarm_ft.protocol.spec.grant import PROBATION, Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION
from swarm_ft.transport.base import Method, call
from swarm_ft.transport.methods import CANCEL, COLLECTED, EVENTS, JOIN, STATUS, SUBMIT, WATCH
from tests.doubles.memory_transport import MemoryChannel, MemoryStream, MemoryTransport
from tests.raw_calls import RAW
from tests.unit.coordinator.conftest import FakePeer, MakeSpec

DEADLINE_S = 10.0
NO_STEP = StepNumber(1 << 30)
MINE = RunId("mine")
KEY = new_key().public_key()
Samples: TypeAlias = Sequence[tuple[int, bytes]]
Event: TypeAlias = RunEvent | PeerTimeline

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def attempts_without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the next attempt at once after a failure, so that messages pile up."""
    monkeypatch.setattr("swarm_ft.coordinator.decide.blame.RETRY_S", 0.0)


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


@dataclass
class Office:
    """A coordinator that serves, and a channel to it."""

    service: CoordinatorService
    channel: MemoryChannel
    journal: Journal
    clock: ManualClock
    transport: MemoryTransport
    endpoint: str

    def channel_of(self, name: str) -> MemoryChannel:
        """Return a channel of a client that has keys."""
        caller = Caller(role=Role.CLIENT, name=name, key=KEY)
        return self.transport.connect_as(caller, self.endpoint)


@asynccontextmanager
async def coordinator(
    path: object = ":memory:",
    *,
    journal: Journal | None = None,
    grants: Callable[[PeerId], Grant] | None = None,
    ways: Callable[[], Connectivity] = Connectivity,
    caller: Caller | None = None,
) -> AsyncIterator[Office]:
    journal = journal or Journal(str(path))
    clock = ManualClock()
    service = CoordinatorService(journal, clock, grants=grants, ways=ways)
    transport = MemoryTransport(caller=caller)
    server = await transport.serve("coordinator", 0, service.handlers())
    channel = transport.connect(server.endpoint)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Office(service, channel, journal, clock, transport, server.endpoint)
    finally:
        await channel.close()
        await server.stop()
        journal.close()


def token_ids(spec: RunSpec, sample: int) -> bytes:
    return bytes([sample, 0, 0, 0]) * spec.train.seq_length


run_names = (RunId(f"run-{number}") for number in count())


async def submit(
    channel: MemoryChannel,
    spec: RunSpec,
    samples: Samples | None = None,
    digest: bytes | None = None,
    run_id: RunId | None = None,
    priority: int | None = None,
) -> RunStatus:
    """Submit `samples`, (number, tokens) each; valid ones if None."""
    stream = await send_submission(channel, spec, samples, digest, run_id, priority)
    status = await stream.receive()
    assert status is not None
    assert await stream.receive() is None
    return status


async def send_submission(
    channel: MemoryChannel,
    spec: RunSpec,
    samples: Samples | None = None,
    digest: bytes | None = None,
    run_id: RunId | None = None,
    priority: int | None = None,
) -> MemoryStream[SubmitPart, RunStatus]:
    """Send a job without waiting for the reply."""
    if samples is None:
        samples = [(i, token_ids(spec, i)) for i in range(spec.train.num_samples)]
    stream = channel.open(SUBMIT)
    header = SubmitHeader(
        spec=spec,
        spec_digest=digest or spec.digest(),
        run_id=next(run_names) if run_id is None else run_id,
        priority=priority,
    )
    await stream.send(header)
    for sample, tokens in samples:
        await stream.send(SampleTokens(sample=SampleId(sample), token_ids=tokens))
    await stream.finish()
    return stream


class JoinedPeer:
    """A peer's end of its control stream, with the fake peer of the conftest behind it."""

    def __init__(self, channel: MemoryChannel, fake: FakePeer) -> None:
        self.fake = fake
        self.stream = channel.open(JOIN)

    async def hello(self, stage: HeldStage | None = None) -> None:
        hello = self.fake.hello()
        await self.send(replace(hello, held=(stage,)) if stage else hello)

    async def send(self, message: FromPeer) -> None:
        await self.stream.send(message)

    async def receive(self) -> ToPeer | None:
        return await self.stream.receive()

    async def work(self, stop_at: StepNumber = NO_STEP, *, goes_on: bool = False) -> None:
        """Answer until the plan of `stop_at`, a release, or the stream's end.

        Args:
            goes_on: after a release too.
        """
        while (message := await self.receive()) is not None:
            if isinstance(message, PlanStep) and message.step == stop_at:
                return
            for answer in self.fake.hear(message):
                await self.send(answer)
            if isinstance(message, ReleaseStage) and not goes_on:
                return


async def train(
    channel: MemoryChannel, peers: Sequence[FakePeer], stop_at: StepNumber = NO_STEP
) -> None:
    """Let peers join and work, all at once, until they stop by themselves."""
    async with asyncio.TaskGroup() as group:
        for fake in peers:
            joined = JoinedPeer(channel, fake)
            await joined.hello()
            group.create_task(joined.work(stop_at))


async def watch(channel: MemoryChannel, run_id: RunId | None = None) -> list[Event]:
    """Return all events up to the end of the run."""
    return [event async for event in events(channel, run_id)]


async def events(channel: MemoryChannel, run_id: RunId | None = None) -> AsyncIterator[Event]:
    stream = channel.open(WATCH)
    await stream.send(WatchRequest(run_id=run_id))
    await stream.finish()
    while (message := await stream.receive()) is not None:
        yield message


async def seen_by(office: Office, count: int) -> None:
    """Wait until so many jobs' tokens are being written."""
    while len(list(office.journal.tokens.folder.iterdir())) < count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def read_by(office: Office, samples: list[int]) -> None:
    """Wait until the coordinator has read so many samples of each job."""
    incoming = office.service._submissions._incoming  # noqa: SLF001 - nobody else asks for it
    while [one.num_bytes for one in incoming] != [num * len(TOKENS) for num in samples]:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def swarm_status(channel: MemoryChannel) -> SwarmStatus:
    return await call(channel, STATUS, StatusRequest(), DEADLINE_S)


def steps_of(seen: Iterable[Event]) -> list[StepNumber]:
    return [event.step for event in seen if isinstance(event, StepCommitted)]


def phases_of(seen: Iterable[Event]) -> list[RunPhase]:
    return [event.phase for event in seen if isinstance(event, RunStatus)]


def status_in(event: Event) -> RunStatus:
    assert isinstance(event, RunStatus)
    return event


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec()


@pytest.fixture
def peers(make_peer: type[FakePeer]) -> list[FakePeer]:
    return [make_peer("a", "0-2"), make_peer("b", "2-4")]


async def joined_to_a_run(office: Office, spec: RunSpec, fake: FakePeer) -> JoinedPeer:
    """Return a peer with an assignment of all layers of a new run."""
    await submit(office.channel, spec)
    joined = JoinedPeer(office.channel, fake)
    await joined.hello()
    assert isinstance(await joined.receive(), Assign)
    return joined


# ---- the whole run


async def test_a_run_trains_and_is_collected(
    tmp_path: Path, spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator(tmp_path / "journal.db") as office, asyncio.TaskGroup() as group:
        run_id = (await submit(office.channel, spec)).run_id
        training = group.create_task(train(office.channel, peers))
        seen = await watch(office.channel, run_id)
        assert steps_of(seen) == [0, 1, 2]
        assert phases_of(seen)[-1] is RunPhase.FINISHED
        assert not training.done(), "peers keep the result"
        request = CollectedRequest(run_id=run_id)
        reply = await call(office.channel, COLLECTED, request, DEADLINE_S)
        assert reply.phase == RunPhase.COLLECTED
        await training
    assert [peer.applied for peer in peers] == [[], []], "they were released"


async def test_first_and_last_stage_get_the_tokens_of_the_step(
    spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    peers = [make_peer("a", "0-1"), make_peer("b", "1-2"), make_peer("c", "2-4")]
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec)
        group.create_task(train(office.channel, peers, stop_at=StepNumber(2)))
    plans = {p.peer_id: next(m for m in p.heard if isinstance(m, PlanStep)) for p in peers}
    expected = {sample: token_ids(spec, sample) for sample in range(4)}
    assert plans[PeerId("a")].tokens == plans[PeerId("c")].tokens == expected
    assert plans[PeerId("b")].tokens == {}
    assert {(plan.num_targets, plan.lengths) for plan in plans.values()} == {(16, (5,) * 4)}


async def test_plans_count_what_is_learned_and_how_long_samples_are(
    spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    peers = [make_peer("a", "0-1"), make_peer("b", "1-2"), make_peer("c", "2-4")]
    short = token_ids(spec, 1)[:12] + EMPTY * 2
    samples = [(0, TOKENS), (1, short), (2, READ * 3 + bytes(8)), *GOOD[3:]]
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec, samples)
        group.create_task(train(office.channel, peers, stop_at=StepNumber(2)))
    for peer in peers:
        plan = next(m for m in peer.heard if isinstance(m, PlanStep))
        assert plan.samples == (0, 1, 2, 3)
        assert plan.num_targets == 4 + 2 + 2 + 4
        assert plan.lengths == (5, 3, 5, 5)


async def test_status_shows_members_and_runs(spec: RunSpec, peers: Sequence[FakePeer]) -> None:
    async with coordinator() as office:
        assert not (await swarm_status(office.channel)).runs
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        status = await swarm_status(office.channel)
        assert [member.peer_id for member in status.members] == ["a"]
        assert [run.phase for run in status.runs] == [RunPhase.LOADING]
        await joined.stream.cancel()


async def test_status_shows_what_is_kept_at_a_boundary(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        await submit(office.channel, spec)
        async with asyncio.TaskGroup() as group:
            group.create_task(train(office.channel, peers, stop_at=StepNumber(1)))
        (boundary,) = (await swarm_status(office.channel)).runs[0].boundaries
    assert (boundary.boundary, boundary.buffered_samples) == (2, 4)
    assert boundary.key_frames == 4


def make_all(fake: FakePeer) -> FakePeer:
    """Return the same peer, for all layers."""
    fake.layers = LayerRange(0, 4)
    return fake


# ---- submissions


async def test_a_submission_is_answered_with_the_run(spec: RunSpec) -> None:
    async with coordinator() as office:
        status = await submit(office.channel, spec)
        assert status.spec == spec
        assert status.phase is RunPhase.WAITING
        assert status.detail == "waiting for layers 0-4"


TOKENS = bytes(20)
EMPTY, READ = b"\xff" * 4, b"\0\0\0\x80"
GOOD = [(i, TOKENS) for i in range(6)]


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        ([], BadDataset, "expected 6 samples, got 0"),
        (GOOD[:5], BadDataset, "expected 6 samples, got 5"),
        ([*GOOD, (6, TOKENS)], MalformedMessage, "expected 6 samples of tokens"),
        ([(1, TOKENS), *GOOD], MalformedMessage, "expected sample 0, got sample 1"),
        ([(0, TOKENS), (0, TOKENS)], MalformedMessage, "expected sample 1, got sample 0"),
        ([(0, bytes(16))], BadDataset, "sample 0: expected 5 tokens, got 4"),
        ([(0, bytes(24))], BadDataset, "sample 1: expected 5 tokens, got 1"),
        ([(0, bytes(60)), (2, TOKENS)], MalformedMessage, "expected sample 3, got sample 2"),
        ([(0, bytes(60)), (3, bytes(80))], MalformedMessage, "expected 6 samples .*, got more"),
        ([(0, bytes(19))], MalformedMessage, "tokens of 4 bytes, got 19"),
        ([(0, b"")], MalformedMessage, "tokens of 4 bytes, got 0"),
        (
            [(0, bytes(16) + bytes([50, 0, 0, 0]))],
            BadDataset,
            "token id 50 is outside the model's vocabulary of 50",
        ),
        ([(0, TOKENS + bytes(4) + EMPTY * 4)], BadDataset, "sample 1: .* 2 tokens or more, got 1"),
        ([(0, TOKENS + bytes(4) + EMPTY + bytes(12))], BadDataset, "sample 1: .*without gaps"),
        ([(0, READ * 5)], BadDataset, "sample 0: expected a token that is to be learned"),
    ],
)
async def test_bad_data_is_refused_and_leaves_nothing(
    spec: RunSpec, samples: Samples, error: type[SwarmError], text: str
) -> None:
    async with coordinator() as office:
        with pytest.raises(error, match=text):
            await submit(office.channel, spec, samples)
        assert not (await swarm_status(office.channel)).runs
        assert office.journal.load(0.0) == ()
        assert await emptied(office.journal)


async def emptied(journal: Journal) -> bool:
    """Wait until no token file is there; another thread deletes them."""
    while any(journal.tokens.folder.iterdir()):  # noqa: ASYNC110
        await asyncio.sleep(0)
    return True


async def test_samples_may_come_together(spec: RunSpec) -> None:
    together = [(0, b"".join(token_ids(spec, i) for i in range(6)))]
    async with coordinator() as office:
        await submit(office.channel, spec, together, run_id=MINE)
        await submit(office.channel, spec, run_id=MINE)
        samples = office.journal.tokens.read(MINE, spec, [SampleId(i) for i in range(6)])
    assert samples == {i: token_ids(spec, i) for i in range(6)}


async def test_the_largest_token_of_the_vocabulary_is_taken(spec: RunSpec) -> None:
    async with coordinator() as office:
        samples = [(i, bytes([49, 0, 0, 0]) * 5) for i in range(6)]
        await submit(office.channel, spec, samples)


async def test_another_digest_of_the_spec_is_a_mismatch(spec: RunSpec) -> None:
    async with coordinator() as office:
        with pytest.raises(RunMismatch, match="both need the same version"):
            await submit(office.channel, spec, digest=b"x" * 16)
        assert not (await swarm_status(office.channel)).runs


async def test_more_data_than_is_allowed_is_refused_before_it_is_sent(make_spec: MakeSpec) -> None:
    spec = make_spec(num_samples=1 << 24, seq_length=1 << 10)
    async with coordinator() as office:
        with pytest.raises(BadDataset, match=r"data: expected at most .* bytes of tokens"):
            await submit(office.channel, spec, [])


async def test_a_submission_without_a_header_is_out_of_turn(spec: RunSpec) -> None:
    async with coordinator() as office:
        for first in (None, SampleTokens(sample=SampleId(0), token_ids=TOKENS)):
            stream = office.channel.open(SUBMIT)
            if first is not None:
                await stream.send(first)
            await stream.finish()
            with pytest.raises(OutOfTurn, match="expected a header"):
                await stream.receive()


async def test_a_spec_out_of_bounds_is_malformed(spec: RunSpec) -> None:
    good = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId("run"))
    wire: Any = SUBMIT.request.to_wire(good)
    wire.header.spec.train.num_samples = 0
    raw_submit: Method[Any, RunStatus] = SUBMIT
    async with coordinator() as office:
        stream = office.channel.open(replace(raw_submit, request=RAW))
        await stream.send(wire.header.SerializeToString())
        with pytest.raises(MalformedMessage, match="num_samples: expected 1 to"):
            await stream.receive()


async def test_a_client_that_goes_away_halfway_leaves_nothing(spec: RunSpec) -> None:
    async with coordinator() as office:
        stream = office.channel.open(SUBMIT)
        header = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId("run"))
        await stream.send(header)
        await stream.send(SampleTokens(sample=SampleId(0), token_ids=TOKENS))
        while not any(office.journal.tokens.folder.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await stream.cancel()
        assert not (await swarm_status(office.channel)).runs
        assert office.journal.load(0.0) == ()
        assert await emptied(office.journal)


async def test_one_submission_too_many_is_told_to_try_again(spec: RunSpec) -> None:
    async with coordinator() as office:
        header = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId("run"))
        others = [office.channel.open(SUBMIT) for _ in range(MAX_KEYLESS_SUBMISSIONS)]
        for other in others:
            await other.send(header)
        with pytest.raises(Busy, match="try again later"):
            await submit(office.channel, spec, run_id=MINE)
        await others[0].cancel()
        while True:  # until the coordinator has seen that one is gone
            with suppress(Busy):
                assert (await submit(office.channel, spec, run_id=MINE)).run_id == "mine"
                break
        for other in others:
            await other.cancel()


async def begun(channel: MemoryChannel, spec: RunSpec, name: str) -> MemoryStream[Any, Any]:
    """Start a job that sends one sample and no more."""
    stream = channel.open(SUBMIT)
    header = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId(name))
    await stream.send(header)
    await stream.send(SampleTokens(sample=SampleId(0), token_ids=TOKENS))
    return stream


async def test_jobs_that_trickle_in_do_not_keep_others_out(spec: RunSpec) -> None:
    async with coordinator() as office:
        trickling = [
            await begun(office.channel_of(f"client-{i // 2}"), spec, f"slow-{i}") for i in range(4)
        ]
        honest = office.channel_of("honest")
        assert (await submit(honest, spec, run_id=MINE)).run_id == "mine"
        one_more = await begun(office.channel_of("client-0"), spec, "one-more")
        with pytest.raises(Busy, match="2 jobs are being submitted"):
            await one_more.receive()
        for stream in trickling:
            await stream.cancel()


async def test_the_slowest_job_of_who_has_most_makes_room(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.submission.MAX_SUBMISSIONS", 3)
    async with coordinator() as office:
        slow = await begun(office.channel_of("a"), spec, "slow")
        faster = await begun(office.channel_of("a"), spec, "faster")
        for sample in range(1, 4):
            await faster.send(SampleTokens(sample=SampleId(sample), token_ids=TOKENS))
        other = await begun(office.channel_of("b"), spec, "other")
        await seen_by(office, 3)
        await read_by(office, [1, 4, 1])
        assert (await submit(office.channel_of("honest"), spec, run_id=MINE)).run_id == "mine"
        with pytest.raises(Busy, match="gets the place of this one, the slowest upload"):
            await slow.receive()
        # The others go on to their ends.
        for stream, first in ((faster, 4), (other, 1)):
            for sample in range(first, spec.train.num_rows):
                await stream.send(SampleTokens(sample=SampleId(sample), token_ids=TOKENS))
            await stream.finish()
            assert await stream.receive() is not None


async def test_a_job_is_not_replaced_by_one_of_a_client_with_as_many_at_once(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.submission.MAX_SUBMISSIONS", 2)
    async with coordinator() as office:
        first = await begun(office.channel_of("a"), spec, "first")
        other = await begun(office.channel_of("b"), spec, "other")
        await seen_by(office, 2)
        with pytest.raises(Busy, match="2 jobs are being submitted"):
            await submit(office.channel_of("c"), spec, run_id=MINE)
        monkeypatch.setattr("swarm_ft.coordinator.submission.EVICT_AFTER_S", 0.0)
        assert (await submit(office.channel_of("c"), spec, run_id=MINE)).run_id == "mine"
        ends = [asyncio.ensure_future(stream.receive()) for stream in (first, other)]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [Busy]
        for stream in (first, other):
            await stream.cancel()
        await asyncio.wait(ends)


async def test_followers_that_read_nothing_leave_room_for_others(spec: RunSpec) -> None:
    member = Caller(role=Role.CLIENT, name="noisy", key=new_key().public_key())
    async with coordinator(caller=member) as office:
        await submit(office.channel, spec)
        followers = [office.channel.open(EVENTS) for _ in range(MAX_OWN_FOLLOWERS)]
        for follower in followers:
            await follower.send(EventsRequest(follows=True))
            assert await follower.receive() is not None
        one_more = office.channel.open(EVENTS)
        await one_more.send(EventsRequest(follows=True))
        with pytest.raises(Busy, match="8 followers of yours are open already"):
            await one_more.receive()
        # What does not follow takes no place, and neither does the owner's page.
        looking = office.channel.open(EVENTS)
        await looking.send(EventsRequest())
        assert await looking.receive() is not None
        assert [event async for event in office.service.events(EventsRequest())]
        for follower in followers:
            await follower.cancel()


async def test_a_member_watches_so_often_in_all(spec: RunSpec) -> None:
    member = Caller(role=Role.CLIENT, name="noisy", key=new_key().public_key())
    async with coordinator(caller=member) as office:
        for number in range(MAX_OWN_WATCHERS // MAX_WATCHERS + 1):
            await submit(office.channel, spec, run_id=RunId(f"run-{number}"))
        watchers = []
        for number in range(MAX_OWN_WATCHERS):
            watcher = office.channel.open(WATCH)
            await watcher.send(WatchRequest(run_id=RunId(f"run-{number // MAX_WATCHERS}")))
            assert await watcher.receive() is not None
            watchers.append(watcher)
        for run, words in (("run-0", "run-0 has 16 watchers"), ("run-2", "you have 32 watchers")):
            watcher = office.channel.open(WATCH)
            await watcher.send(WatchRequest(run_id=RunId(run)))
            with pytest.raises(Busy, match=words):
                await watcher.receive()
        for watcher in watchers:
            await watcher.cancel()


async def test_a_client_that_sends_nothing_makes_room(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.submission.PART_TIMEOUT_S", 0.01)
    async with coordinator() as office:
        stream = office.channel.open(SUBMIT)
        header = SubmitHeader(spec=spec, spec_digest=spec.digest(), run_id=RunId("run"))
        await stream.send(header)
        with pytest.raises(Unavailable, match="sent nothing of its job for"):
            await stream.receive()
        assert await emptied(office.journal)


@pytest.mark.parametrize("run_id", ["", "a/b", "..\\x", "line\nbreak", "x" * 65])
async def test_a_run_whose_name_is_none_is_malformed(spec: RunSpec, run_id: RunId | None) -> None:
    async with coordinator() as office:
        with pytest.raises(MalformedMessage, match="run_id"):
            await submit(office.channel, spec, run_id=run_id)


async def test_digests_of_another_clients_run_are_refused(spec: RunSpec) -> None:
    """Check digests that a peer or a reader could use to have the model opened elsewhere."""
    async with coordinator() as office:
        for changes in ({"owner": "somebody"}, {"nonce": None}):
            other = replace(spec, model=replace(spec.model, **changes))
            with pytest.raises(NotAllowed, match="keyed with the name of the client"):
                await submit(office.channel, other)
        with pytest.raises(NotAllowed):
            await submit(office.channel, replace(spec, inherited_digest=b"i" * 16))


# ---- submissions that come again


async def test_a_submission_that_comes_again_is_the_run_it_became(spec: RunSpec) -> None:
    async with coordinator() as office:
        first = await submit(office.channel, spec, run_id=MINE)
        assert await submit(office.channel, spec, run_id=MINE) == first
        (run,) = (await swarm_status(office.channel)).runs
        assert run.run_id == "mine"


async def test_a_submission_that_comes_again_after_a_restart_is_the_same_run(
    spec: RunSpec, tmp_path: Path
) -> None:
    async with coordinator(tmp_path / "journal.db") as office:
        await submit(office.channel, spec, run_id=MINE)
    async with coordinator(tmp_path / "journal.db") as office:
        await submit(office.channel, spec, run_id=MINE)
        assert len((await swarm_status(office.channel)).runs) == 1


async def test_a_submission_of_a_run_that_is_over_is_told_so(spec: RunSpec) -> None:
    async with coordinator() as office:
        await submit(office.channel, spec, run_id=MINE)
        await call(office.channel, CANCEL, CancelRequest(run_id=MINE), DEADLINE_S)
        assert (await submit(office.channel, spec, run_id=MINE)).phase is RunPhase.CANCELLED


async def test_another_job_cannot_take_the_name_of_a_run(
    spec: RunSpec, make_spec: MakeSpec
) -> None:
    others = [(i, TOKENS) for i in range(5)] + [(5, bytes([1, 0, 0, 0]) * 5)]
    async with coordinator() as office:
        first = await submit(office.channel, spec, GOOD, run_id=MINE)
        for other_spec, samples in ((make_spec(num_steps=7), GOOD), (spec, others)):
            with pytest.raises(RunMismatch, match="mine exists already"):
                await submit(office.channel, other_spec, samples, run_id=MINE)
        (run,) = (await swarm_status(office.channel)).runs
        assert (run.run_id, run.spec_digest) == (MINE, first.spec.digest())


class SlowTokens(TokenFiles):
    """Token files that are kept only after permission."""

    def __init__(self) -> None:
        super().__init__(None)
        self.may_keep, self.is_keeping = threading.Event(), threading.Event()

    def begin(self, run_id: RunId, spec: RunSpec) -> NewTokenFile:
        new = super().begin(run_id, spec)
        keep = new.keep

        def keep_slowly() -> None:
            self.is_keeping.set()
            assert self.may_keep.wait(DEADLINE_S)
            keep()

        new.keep = keep_slowly  # type: ignore[method-assign]  # its caller opened this file
        return new


async def test_a_submission_whose_client_goes_away_while_it_is_written_is_a_run(
    spec: RunSpec,
) -> None:
    journal = Journal(":memory:")
    journal.tokens = tokens = SlowTokens()
    async with coordinator(journal=journal) as office:
        stream = await send_submission(office.channel, spec, run_id=MINE)
        await asyncio.to_thread(tokens.is_keeping.wait, DEADLINE_S)
        await stream.cancel()
        again = asyncio.create_task(submit(office.channel, spec, run_id=MINE))
        assert not (await swarm_status(office.channel)).runs, "others are served meanwhile"
        tokens.may_keep.set()
        assert (await again).run_id == "mine"
        assert len((await swarm_status(office.channel)).runs) == 1
        assert len(journal.load(0.0)) == 1
        assert journal.tokens.read(MINE, spec, [SampleId(5)]) == {5: token_ids(spec, 5)}


# ---- data on the disk


async def test_the_tokens_of_a_run_that_is_over_are_deleted(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office, asyncio.TaskGroup() as group:
        run_id = (await submit(office.channel, spec)).run_id
        training = group.create_task(train(office.channel, peers))
        await watch(office.channel, run_id)
        assert any(office.journal.tokens.folder.iterdir()), "it may have to be made again"
        await call(office.channel, COLLECTED, CollectedRequest(run_id=run_id), DEADLINE_S)
        assert await emptied(office.journal)
        await training
        assert (await submit(office.channel, spec, run_id=run_id)).phase is RunPhase.COLLECTED


async def test_a_run_whose_tokens_were_altered_fails_and_the_next_one_trains(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office, asyncio.TaskGroup() as group:
        damaged = (await submit(office.channel, spec)).run_id
        (file,) = office.journal.tokens.folder.iterdir()
        data = bytearray(file.read_bytes())
        data[0] ^= 1
        file.write_bytes(data)
        sound = (await submit(office.channel, spec)).run_id
        training = group.create_task(train_all(office.channel, peers))
        last = status_in((await watch(office.channel, damaged))[-1])
        assert last.phase is RunPhase.FAILED
        assert "its data cannot be read" in last.detail
        assert "sample 0 of run" in last.detail
        assert phases_of(await watch(office.channel, sound))[-1] is RunPhase.FINISHED
        training.cancel()
    for peer in peers:
        plans = [message for message in peer.heard if isinstance(message, PlanStep)]
        assert {plan.run_id for plan in plans if plan.tokens} == {sound}


async def train_all(channel: MemoryChannel, peers: Sequence[FakePeer]) -> None:
    """Let peers work for one run after the other."""
    async with asyncio.TaskGroup() as group:
        for fake in peers:
            joined = JoinedPeer(channel, fake)
            await joined.hello()
            group.create_task(joined.work(goes_on=True))


# ---- watching


async def test_a_late_watcher_sees_the_history_and_then_what_happens(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        run_id = (await submit(office.channel, spec)).run_id
        async with asyncio.TaskGroup() as group:
            group.create_task(train(office.channel, peers, stop_at=StepNumber(2)))
        watcher = events(office.channel, run_id)
        history = [await anext(watcher) for _ in range(3)]
        assert isinstance(history[0], RunStatus)
        assert history[0].committed_steps == 2
        assert steps_of(history) == [0, 1]
        losses = [event.loss for event in history[1:] if isinstance(event, StepCommitted)]
        assert losses == [10.0, 9.0]
        async with asyncio.TaskGroup() as group:
            training = group.create_task(train(office.channel, peers))
            live = [event async for event in watcher]
            training.cancel()
        assert steps_of(live) == [2]
        assert phases_of(live)[-1] is RunPhase.FINISHED


@pytest.mark.parametrize("steps_at_once", [1, 2, 256])
async def test_a_run_that_is_over_is_shown_whole(
    spec: RunSpec, peers: Sequence[FakePeer], monkeypatch: pytest.MonkeyPatch, steps_at_once: int
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.service.STEPS_AT_ONCE", steps_at_once)
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec)
        training = group.create_task(train(office.channel, peers))
        await watch(office.channel)
        again = await watch(office.channel)
        assert phases_of(again) == [RunPhase.FINISHED, RunPhase.FINISHED]
        assert steps_of(again) == [0, 1, 2]
        training.cancel()


async def test_a_watcher_that_leaves_is_forgotten(spec: RunSpec) -> None:
    async with coordinator() as office:
        run_id = (await submit(office.channel, spec)).run_id
        watcher = office.channel.open(WATCH)
        await watcher.send(WatchRequest(run_id=run_id))
        await watcher.receive()
        await watcher.cancel()
        request = CancelRequest(run_id=run_id)
        assert (await call(office.channel, CANCEL, request, DEADLINE_S)).phase == (
            RunPhase.CANCELLED
        )


async def to_its_end(stream: MemoryStream[Any, Any]) -> None:
    while await stream.receive() is not None:
        pass


async def test_a_watcher_that_does_not_read_is_dropped_and_may_watch_anew(
    make_spec: MakeSpec, peers: Sequence[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a watcher that once waited for the end of its run for ever."""
    monkeypatch.setattr("swarm_ft.coordinator.watching.MAX_QUEUED", 3)
    async with coordinator() as office, asyncio.TaskGroup() as group:
        run_id = (await submit(office.channel, make_spec(num_steps=9))).run_id
        slow = office.channel.open(WATCH)
        await slow.send(WatchRequest(run_id=run_id))
        await slow.finish()
        training = group.create_task(train(office.channel, peers))
        while not any(peer.exported for peer in peers):  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="left 3 events unread; watch the run again"):
            await to_its_end(slow)
        again = await watch(office.channel, run_id)
        assert steps_of(again) == list(range(9))
        assert phases_of(again)[-1] is RunPhase.FINISHED
        training.cancel()


async def test_the_only_run_that_is_not_over_is_meant_by_no_name(spec: RunSpec) -> None:
    async with coordinator() as office:
        with pytest.raises(NotFound, match="you have no runs yet"):
            await watch(office.channel)
        first, second = [await submit(office.channel, spec) for _ in range(2)]
        with pytest.raises(BadOption, match="--run: 2 runs are under way, name one") as refusal:
            await call(office.channel, CANCEL, CancelRequest(), DEADLINE_S)
        for run in (first, second):
            assert f"{run.run_id} (waiting, step 0/" in refusal.value.message
        await call(office.channel, CANCEL, CancelRequest(run_id=second.run_id), DEADLINE_S)
        reply = await call(office.channel, CANCEL, CancelRequest(), DEADLINE_S)
        assert (reply.run_id, reply.phase) == (first.run_id, RunPhase.CANCELLED)
        with pytest.raises(BadOption, match="--run: no run of yours is under way"):
            await call(office.channel, CANCEL, CancelRequest(), DEADLINE_S)
        (newest, *_) = await watch(office.channel)
        assert isinstance(newest, RunStatus)
        assert newest.run_id == second.run_id, "of those that are over the newest may be looked at"
        with pytest.raises(NotFound, match=f"nobody is not known here, or not .*{first.run_id}"):
            await watch(office.channel, RunId("nobody"))


async def test_a_job_keeps_its_priority(spec: RunSpec) -> None:
    async with coordinator() as office:
        usual = await submit(office.channel, spec)
        urgent = await submit(office.channel, spec, priority=9)
        priorities = {run.run_id: run.priority for run in office.journal.load(0.0)}
        assert priorities == {usual.run_id: DEFAULT_PRIORITY, urgent.run_id: 9}


# ---- what peers do when


def timeline_of(run_id: RunId, step: int) -> StepTimeline:
    columns = [(1,)] * len(Spans.__dataclass_fields__)
    return StepTimeline(
        run_id=run_id,
        attempt=Attempt(1),
        step=StepNumber(step),
        origin_us=3,
        clock=ClockEstimate(-5, 2),
        spans=Spans(*columns),
    )


@pytest.mark.parametrize("is_traced", [True, False])
async def test_plans_ask_for_timelines_if_a_watcher_does(
    spec: RunSpec, peers: Sequence[FakePeer], is_traced: bool
) -> None:
    fake = make_all(peers[0])
    async with coordinator() as office:
        run_id = (await submit(office.channel, spec)).run_id
        watcher = office.channel.open(WATCH)
        await watcher.send(WatchRequest(run_id=run_id, traced=is_traced))
        await watcher.receive()
        joined = JoinedPeer(office.channel, fake)
        await joined.hello()
        await joined.work(stop_at=StepNumber(1))
        await watcher.cancel()
    plans = [message for message in fake.heard if isinstance(message, PlanStep)]
    assert [plan.traced for plan in plans] == [is_traced]
    assert plans[0].tokens, "the rest of the plan is there too"


async def tracing(
    channel: MemoryChannel, run_id: RunId | None
) -> MemoryStream[WatchRequest, Event]:
    """Open a watcher that traces, and read the run's history."""
    watcher = channel.open(WATCH)
    await watcher.send(WatchRequest(run_id=run_id, traced=True))
    await watcher.receive()
    return watcher


async def test_timelines_go_to_whoever_asked_and_into_no_journal(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        run_id = RunId((await swarm_status(office.channel)).runs[0].run_id)
        watcher = await tracing(office.channel, run_id)
        await joined.send(timeline_of(run_id, 1))
        assert await watcher.receive() == PeerTimeline(
            peer_id=peers[0].peer_id, layers=LayerRange(0, 4), timeline=timeline_of(run_id, 1)
        )
        assert office.journal.steps(run_id, 0, 9) == ()
        await watcher.cancel()


async def test_a_peer_tells_nothing_of_runs_that_it_has_no_part_in(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        other = (await submit(office.channel, spec)).run_id
        watcher = await tracing(office.channel, other)
        await joined.send(timeline_of(RunId("nobody"), 1))
        await joined.send(timeline_of(other, 1))
        assert await answer_to_probe(joined), "what was said before was heard"
        await call(office.channel, CANCEL, CancelRequest(run_id=other), DEADLINE_S)
        event = await watcher.receive()
        assert isinstance(event, RunStatus)
        assert event.phase is RunPhase.CANCELLED


async def answer_to_probe(joined: JoinedPeer) -> ClockReply:
    await joined.send(ClockProbe(77))
    while not isinstance(message := await joined.receive(), ClockReply):
        pass
    return message


async def test_a_peer_that_asks_is_told_the_time(spec: RunSpec, peers: Sequence[FakePeer]) -> None:
    async with coordinator() as office:
        joined = JoinedPeer(office.channel, peers[0])
        await joined.hello()
        office.clock.time_s = 123.5
        assert await answer_to_probe(joined) == ClockReply(77, 123_500_000)


# ---- cancelling


async def test_cancel_releases_peers_and_ends_watching(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office, asyncio.TaskGroup() as group:
        run_id = (await submit(office.channel, spec)).run_id
        watching = group.create_task(watch(office.channel, run_id))
        joined = JoinedPeer(office.channel, make_all(peers[0]))
        await joined.hello()
        assert isinstance(await joined.receive(), Assign)
        reply = await call(office.channel, CANCEL, CancelRequest(run_id=run_id), DEADLINE_S)
        assert reply.phase == RunPhase.CANCELLED
        assert isinstance(await joined.receive(), ReleaseStage)
        assert phases_of(await watching)[-1] is RunPhase.CANCELLED
        await joined.stream.cancel()


async def test_collecting_what_is_not_finished_changes_nothing(spec: RunSpec) -> None:
    async with coordinator() as office:
        run_id = (await submit(office.channel, spec)).run_id
        request = CollectedRequest(run_id=run_id)
        reply = await call(office.channel, COLLECTED, request, DEADLINE_S)
        assert reply.phase == RunPhase.WAITING


# ---- restarts


async def test_a_restarted_coordinator_goes_on_with_the_run(
    tmp_path: Path, spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    path = tmp_path / "journal.db"
    async with coordinator(path) as office:
        run_id = (await submit(office.channel, spec)).run_id
        await train(office.channel, peers, stop_at=StepNumber(2))
    async with coordinator(path) as office, asyncio.TaskGroup() as group:
        watcher = events(office.channel, run_id)
        first = status_in(await anext(watcher))
        assert (first.phase, first.committed_steps) == (RunPhase.WAITING, 2)
        training = group.create_task(train(office.channel, peers))
        seen = [event async for event in watcher]
        assert steps_of(seen) == [0, 1, 2]
        assert [peer.applied for peer in peers] == [[0, 1, 2]] * 2
        training.cancel()


async def test_a_restarted_coordinator_still_has_the_result(
    tmp_path: Path, spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    path = tmp_path / "journal.db"
    async with coordinator(path) as office, asyncio.TaskGroup() as group:
        run_id = (await submit(office.channel, spec)).run_id
        training = group.create_task(train(office.channel, peers))
        await watch(office.channel, run_id)
        training.cancel()
    async with coordinator(path) as office:
        seen = await watch(office.channel, run_id)
        assert steps_of(seen) == [0, 1, 2]
        assert [str(stage.layers) for stage in status_in(seen[0]).assignments] == ["0-2", "2-4"]


# ---- peers


async def refused(joined: JoinedPeer) -> SwarmError:
    """Return the error that ends a peer's stream, after any messages."""
    return await error_of(drained(joined))


async def drained(joined: JoinedPeer) -> None:
    while await joined.receive() is not None:
        pass


async def error_of(awaitable: Awaitable[object]) -> SwarmError:
    with pytest.raises(SwarmError) as caught:
        await awaitable
    return caught.value


async def test_a_peer_that_does_not_fit_stays_and_learns_why(
    spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    async with coordinator() as office, asyncio.TaskGroup() as group:
        running = group.create_task(office.service.run())
        await submit(office.channel, spec)
        joined = JoinedPeer(office.channel, make_peer("far", "4-8"))
        await joined.hello()
        message = await joined.receive()
        running.cancel()
        assert isinstance(message, StayIdle)
        assert "outside the model" in message.reason
        (member,) = (await swarm_status(office.channel)).members
        assert (member.peer_id, member.idle) == ("far", message.reason)


async def test_peers_on_one_machine_are_notified_and_its_key_stays_with_the_coordinator(
    make_peer: type[FakePeer],
) -> None:
    async with coordinator() as office:
        both = []
        for name in ("a", "b"):
            fake = make_peer(name, "auto", 1000)
            fake.machine_key, fake.machine_memory_bytes = "secret", 1200
            both.append(JoinedPeer(office.channel, fake))
            await both[-1].hello()
        for joined in both:
            assert await joined.receive() == MemoryShare(memory_bytes=600, num_peers=2)
        status = await swarm_status(office.channel)
    counted = {one.peer_id: (one.memory_bytes, one.offered_bytes) for one in status.members}
    assert counted == {"a": (600, 1000), "b": (600, 1000)}
    state = office.service._state  # noqa: SLF001 - what a recording gets
    assert not any(one.hello.machine_key for one in state.members.values())


async def test_what_a_peer_may_host_is_asked_of_the_registry(peers: Sequence[FakePeer]) -> None:
    async with coordinator(grants={peers[0].peer_id: PROBATION}.__getitem__) as office:
        joined = JoinedPeer(office.channel, peers[0])
        await joined.hello()
        await joined.send(ClockProbe(5))
        assert isinstance(await joined.receive(), ClockReply)
        (member,) = (await swarm_status(office.channel)).members
        assert (member.peer_id, member.grant) == ("a", PROBATION)


async def test_whom_the_registry_does_not_know_is_no_member(peers: Sequence[FakePeer]) -> None:
    def unknown(peer_id: PeerId) -> Grant:
        raise NotAllowed(f"peer {peer_id}: it is no member")

    async with coordinator(grants=unknown) as office:
        joined = JoinedPeer(office.channel, peers[0])
        await joined.hello()
        assert isinstance(await refused(joined), NotAllowed)
        assert not (await swarm_status(office.channel)).members


async def test_who_was_invited_for_other_layers_is_told_so(peers: Sequence[FakePeer]) -> None:
    only = Grant(layers=LayerRange(2, 4))
    async with coordinator(grants=lambda _: only) as office:
        joined = JoinedPeer(office.channel, peers[0])
        await joined.hello()
        error = await refused(joined)
        assert isinstance(error, NotAllowed)
        assert "peer a may host layers 2-4 only, and offers layers 0-2" in error.message


async def test_whose_key_is_revoked_is_sent_away_and_the_others_are_told(
    peers: Sequence[FakePeer],
) -> None:
    async with coordinator() as office:
        one, other = (JoinedPeer(office.channel, fake) for fake in peers[:2])
        await one.hello()
        await other.hello()
        await swarm_status(office.channel)  # both are in
        office.service.revoke(frozenset({one.fake.peer_id}))
        assert await other.receive() == Revoked(names=(one.fake.peer_id,))
        with pytest.raises(NotAllowed, match="its key was revoked"):
            await one.receive()
        late = JoinedPeer(office.channel, peers[1])
        await late.hello()
        assert await late.receive() == Revoked(names=(one.fake.peer_id,))


async def test_a_peer_of_another_spec_is_to_let_go_of_it(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        run_id = (await submit(office.channel, spec)).run_id
        joined = JoinedPeer(office.channel, peers[0])
        layers = LayerRange(0, 2)
        stage = HeldStage(run_id=run_id, spec_digest=bytes(16), layers=layers, committed_steps=0)
        await joined.hello(stage)
        assert isinstance(await joined.receive(), ReleaseStage)


async def test_a_peer_without_the_model_stays_and_the_run_fails(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        status = (await swarm_status(office.channel)).runs[0]
        failed = StageFailed(
            run_id=RunId(status.run_id), attempt=Attempt(1), code="bad-model", message="no such"
        )
        await joined.send(failed)
        message = await joined.receive()
        assert isinstance(message, ReleaseStage)
        (run,) = (await swarm_status(office.channel)).runs
        assert run.phase is RunPhase.FAILED
        assert (
            run.detail == f"no peer can host it: peer {joined.fake.peer_id} cannot host it: no such"
        )


async def test_a_peer_that_joins_twice_keeps_its_newer_stream(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    fake = make_all(peers[0])
    async with coordinator() as office, asyncio.TaskGroup() as group:
        older = await joined_to_a_run(office, spec, fake)
        newer = JoinedPeer(office.channel, fake)
        await newer.hello()
        error = await refused(older)
        assert isinstance(error, OutOfTurn)
        assert "joined again elsewhere" in error.message
        working = group.create_task(newer.work())
        seen = await watch(office.channel)
        assert phases_of(seen)[-1] is RunPhase.FINISHED
        assert RunPhase.WAITING not in phases_of(seen)[1:], "the older stream's end changes nothing"
        working.cancel()


async def test_an_older_stream_ends_even_if_nobody_reads_it(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    fake = make_all(peers[0])
    async with coordinator() as office:
        older = await joined_to_a_run(office, spec, fake)
        await probe_at(older, range(1, 11))
        newer = JoinedPeer(office.channel, fake)
        await newer.hello()
        assert isinstance(await newer.receive(), Assign)
        assert isinstance(await error_of(probe_at(older, count(11))), OutOfTurn)
        assert len((await swarm_status(office.channel)).members) == 1


async def test_a_peer_whose_stream_ends_is_no_member(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        watcher = events(office.channel)
        assert status_in(await anext(watcher)).phase is RunPhase.LOADING
        await joined.stream.cancel()
        assert status_in(await anext(watcher)).phase is RunPhase.WAITING
        assert not (await swarm_status(office.channel)).members
        await call(office.channel, CANCEL, CancelRequest(), DEADLINE_S)
        assert phases_of([event async for event in watcher])[-1] is RunPhase.CANCELLED


async def test_a_goodbye_ends_the_membership(spec: RunSpec, peers: Sequence[FakePeer]) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        await joined.send(PeerGoodbye())
        await joined.stream.finish()
        await drained(joined)
        status = await swarm_status(office.channel)
        assert not status.members
        assert status.runs[0].detail == "waiting for layers 0-4"


async def test_a_peer_that_does_not_read_is_dropped(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        error = await error_of(probe_at(joined, count(1)))
        assert isinstance(error, Unavailable)
        assert "does not read" in error.message
        assert not (await swarm_status(office.channel)).members


async def probe_at(joined: JoinedPeer, times: Iterable[int]) -> None:
    """Send requests whose replies nobody reads."""
    for time_us in times:
        await joined.send(ClockProbe(time_us))


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_peer_begins_with_a_hello(is_silent: bool) -> None:
    async with coordinator() as office:
        stream = office.channel.open(JOIN)
        if not is_silent:
            await stream.send(PeerGoodbye())
        await stream.finish()
        with pytest.raises(OutOfTurn, match="expected a hello"):
            await stream.receive()


async def test_a_peer_of_an_older_version_is_told_so_and_never_known(
    peers: Sequence[FakePeer],
) -> None:
    async with coordinator() as office:
        joined = JoinedPeer(office.channel, peers[0])
        older = replace(joined.fake.hello(), protocol_version=PROTOCOL_VERSION - 1)
        await joined.send(older)
        with pytest.raises(VersionMismatch, match=f"update peer {older.peer_id} .pip install"):
            await joined.receive()
        assert not (await swarm_status(office.channel)).members


async def test_a_client_of_an_older_version_is_told_so() -> None:
    async with coordinator() as office:
        requests: tuple[tuple[Method[Any, Any], object], ...] = (
            (WATCH, WatchRequest(protocol_version=0)),
            (CANCEL, CancelRequest(protocol_version=0)),
            (COLLECTED, CollectedRequest(run_id=RunId("run"), protocol_version=0)),
            (STATUS, StatusRequest(protocol_version=0)),
        )
        for method, request in requests:
            with pytest.raises(VersionMismatch, match="the client has an older one: update"):
                await call(office.channel, method, request, DEADLINE_S)


async def test_a_second_hello_is_out_of_turn(spec: RunSpec, peers: Sequence[FakePeer]) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        await joined.hello()
        error = await refused(joined)
        assert isinstance(error, OutOfTurn)
        assert "expected one hello" in error.message


async def test_a_malformed_message_costs_the_peer_its_stream(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office:
        joined = await joined_to_a_run(office, spec, make_all(peers[0]))
        await joined.send(PeerAlive(compute_s=-1.0))
        assert isinstance(await refused(joined), MalformedMessage)
        assert not (await swarm_status(office.channel)).members


# ---- a journal that fails


async def test_a_failing_journal_ends_the_coordinator_and_nothing_is_said(
    spec: RunSpec, peers: Sequence[FakePeer]
) -> None:
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec)
        running = group.create_task(error_of(office.service.run()))
        office.journal.close()
        for _ in range(2):
            joined = JoinedPeer(office.channel, make_all(peers[0]))
            await joined.hello()
            with pytest.raises(JournalError):
                await joined.receive()
        assert isinstance(await running, JournalError)


async def test_time_passes_while_it_runs(spec: RunSpec, make_peer: type[FakePeer]) -> None:
    """Check the gathering of new peers, which only the clock can end."""
    async with coordinator() as office, asyncio.TaskGroup() as group:
        running = group.create_task(office.service.run())
        await submit(office.channel, spec)
        joined = JoinedPeer(office.channel, make_peer("any", "auto"))
        await joined.hello()
        watcher = events(office.channel)
        while status_in(await anext(watcher)).detail != "gathering peers":
            pass
        hearing = asyncio.ensure_future(joined.receive())
        while not hearing.done():
            office.clock.time_s += SETTLE_S / 4
            await asyncio.wait([hearing], timeout=TICK_S)
        assert isinstance(hearing.result(), Assign)
        running.cancel()


async def test_who_reaches_whom_is_asked_as_time_passes_and_decides_who_sits_where(
    make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    known = [Connectivity()]
    async with coordinator(ways=lambda: known[-1]) as office, asyncio.TaskGroup() as group:
        running = group.create_task(office.service.run())
        joined = [JoinedPeer(office.channel, make_peer(name, "auto")) for name in "abc"]
        for peer in joined:
            await peer.hello()
        known.append(Connectivity(met={("a", "b"): Way.RELAYED, ("a", "c"): Way.PUNCHED}))
        await submit(office.channel, make_spec(num_blocks=3))
        hearing = asyncio.ensure_future(joined[0].receive())
        while not hearing.done():
            office.clock.time_s += SETTLE_S / 4
            await asyncio.wait([hearing], timeout=TICK_S)
        assign = hearing.result()
        assert isinstance(assign, Assign)
        assert assign.assignments[1].peer_id == "c", "a and b are not beside each other"
        running.cancel()
