"""A peer records its steps and reports them: only on request, and bounded."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from swarm_ft.codec.spec import Direction
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, RunId, SampleId, StepNumber
from swarm_ft.peer import timeline as timeline_module
from swarm_ft.peer.timeline import NUM_PROBES, Timeline
from swarm_ft.protocol.messages.boundary import FrameKey
from swarm_ft.protocol.messages.control import ClockProbe, ClockReply, FromPeer, PlanStep
from swarm_ft.protocol.messages.timeline import ClockEstimate, Span, SpanKind, StepTimeline
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.transport.base import Transport
from tests.doubles.clock import ManualClock
from tests.unit.peer.conftest import BOUNDARY_BLOCK, AtWork, End, MakeSpec

T = TypeVar("T")

AHEAD_US = 5_000_000
KEY = FrameKey(Attempt(1), StepNumber(0), MicrobatchIndex(2), SampleId(7), Direction.BACKWARD)
STEP, BOUNDARY = StepNumber(4), BlockIndex(4)
MICROBATCH = MicrobatchIndex(0)


def plan_of(step: int, *, traced: bool = True, attempt: int = 1) -> PlanStep:
    batches = (Microbatch(MICROBATCH, (SampleId(1), SampleId(2))),)
    return PlanStep(
        run_id=RunId("run"),
        attempt=Attempt(attempt),
        step=StepNumber(step),
        microbatches=batches,
        traced=traced,
    )


class Peer:
    """A timeline with its messages; `answer` is the coordinator's, whose clock is ahead."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sent: list[FromPeer] = []
        self.timeline = Timeline(self.clock, self.sent.append)

    def answer(self, *, after_s: float = 0.002) -> None:
        """Answer the last clock probe."""
        probe = next(message for message in reversed(self.sent) if isinstance(message, ClockProbe))
        self.clock.advance(after_s / 2)
        now_us = round(1e6 * self.clock.now_s()) + AHEAD_US
        self.clock.advance(after_s / 2)
        self.timeline.on_clock_reply(ClockReply(probe.sent_us, now_us))

    def timeline_sent(self) -> StepTimeline:
        """Return the one timeline that was sent."""
        (timeline,) = (message for message in self.sent if isinstance(message, StepTimeline))
        return timeline


@pytest.fixture
def peer() -> Peer:
    return Peer()


def work(peer: Peer) -> None:
    """Some of each thing that is recorded, a second each."""
    timeline = peer.timeline
    begin_s = timeline.now_s()
    peer.clock.advance(1)
    timeline.add(SpanKind.WAIT_INPUT, begin_s, microbatch=MicrobatchIndex(3))
    begin_s = timeline.now_s()
    peer.clock.advance(1)
    timeline.add_frame(SpanKind.SEND, KEY, begin_s, BOUNDARY, 99)
    timeline.timed(SpanKind.FORWARD, peer.clock.advance, MICROBATCH)(1)
    timeline.on_ready()
    peer.clock.advance(1)
    timeline.on_commit()
    timeline.timed(SpanKind.OPTIMIZER, peer.clock.advance)(1)
    timeline.send_spans()


def test_a_step_that_nobody_traces_records_and_says_nothing(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0, traced=False))
    work(peer)
    assert peer.sent == []


def test_what_is_off_wraps_nothing_and_reads_no_clock(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = peer.timeline
    monkeypatch.setattr(peer.clock, "now_s", None)
    assert timeline.timed(SpanKind.FORWARD, work, MICROBATCH) is work
    timeline.add(SpanKind.WAIT_ACKS, timeline.now_s())
    timeline.add_frame(SpanKind.SEND, KEY, timeline.now_s(), BOUNDARY, 99)


def test_a_traced_step_is_told_once_it_is_committed(peer: Peer) -> None:
    peer.clock.advance(10)
    peer.timeline.on_plan(plan_of(4))
    peer.answer()
    work(peer)
    timeline = peer.timeline_sent()
    assert (timeline.run_id, timeline.attempt, timeline.step, timeline.num_dropped) == (
        "run",
        1,
        4,
        0,
    )
    assert timeline.origin_us == 10_000_000
    late, second = 2_000, 1_000_000  # the answer took 2 ms
    assert sorted(timeline.spans, key=lambda span: span.begin_us) == [
        Span(SpanKind.STEP, 0, late + 5 * second, STEP),
        Span(SpanKind.PLAN, 0, 0, STEP),
        Span(SpanKind.WAIT_INPUT, late, second, STEP, microbatch=MicrobatchIndex(3)),
        Span(
            SpanKind.SEND,
            late + second,
            second,
            KEY.step,
            microbatch=KEY.microbatch,
            sample=KEY.sample,
            boundary=BOUNDARY,
            direction=Direction.BACKWARD,
            num_bytes=99,
        ),
        Span(SpanKind.FORWARD, late + 2 * second, second, STEP, microbatch=MICROBATCH),
        Span(SpanKind.READY, late + 3 * second, 0, STEP),
        Span(SpanKind.WAIT_COMMIT, late + 3 * second, second, STEP),
        Span(SpanKind.COMMIT, late + 4 * second, 0, STEP),
        Span(SpanKind.OPTIMIZER, late + 4 * second, second, STEP),
    ]


def test_the_next_step_begins_with_nothing(peer: Peer) -> None:
    for step in range(2):
        peer.timeline.on_plan(plan_of(step))
        peer.answer()
        work(peer)
    first, second = (message for message in peer.sent if isinstance(message, StepTimeline))
    assert len(first.spans) == len(second.spans)
    assert {span.step for span in second.spans if span.kind is SpanKind.STEP} == {1}


def test_the_quickest_answer_tells_how_far_the_clock_is(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0))
    for after_s in (0.5, 0.004, 0.2):
        peer.answer(after_s=after_s)
    peer.timeline.send_spans()
    clock = peer.timeline_sent().clock
    assert clock.offset_us == AHEAD_US
    assert 2_000 <= clock.error_us < 2_100


def test_time_is_asked_for_a_few_times_a_step_one_after_the_other(peer: Peer) -> None:
    def num_probes() -> int:
        return sum(isinstance(message, ClockProbe) for message in peer.sent)

    peer.timeline.on_plan(plan_of(0))
    for answered in range(NUM_PROBES + 2):
        assert num_probes() == min(1 + answered, NUM_PROBES)
        peer.answer()
    peer.timeline.on_ready()
    assert num_probes() == NUM_PROBES + 1


def test_nothing_is_told_while_the_clock_is_not_known(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0))
    work(peer)
    assert not [message for message in peer.sent if isinstance(message, StepTimeline)]
    peer.timeline.on_plan(plan_of(1))
    peer.answer()
    peer.timeline.send_spans()
    assert {span.step for span in peer.timeline_sent().spans} == {1}, (
        "what was recorded is forgotten"
    )


def test_too_many_spans_are_counted_and_the_step_itself_is_there(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_module, "MAX_SPANS", 50)
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    for _ in range(60):
        peer.timeline.add_frame(SpanKind.SEND, KEY, peer.timeline.now_s(), BOUNDARY, 99)
    peer.timeline.send_spans()
    timeline = peer.timeline_sent()
    kinds = Counter(span.kind for span in timeline.spans)
    assert kinds == {SpanKind.STEP: 1, SpanKind.PLAN: 1, SpanKind.SEND: 48}
    assert timeline.num_dropped == 12


def test_a_span_that_began_before_anybody_asked_is_none(peer: Peer) -> None:
    begin_s = peer.timeline.now_s()
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    peer.timeline.add(SpanKind.WAIT_INPUT, begin_s)
    peer.timeline.send_spans()
    assert SpanKind.WAIT_INPUT not in {span.kind for span in peer.timeline_sent().spans}


def test_frames_of_the_next_step_that_come_early_are_told_with_it(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    peer.timeline.send_spans()
    peer.sent.clear()
    early = KEY._replace(step=StepNumber(1))
    peer.timeline.add_frame(SpanKind.RECEIVE, early, peer.timeline.now_s(), BOUNDARY, 99)
    peer.timeline.on_plan(plan_of(1))
    peer.timeline.send_spans()
    assert (SpanKind.RECEIVE, 1) in {(span.kind, span.step) for span in peer.timeline_sent().spans}


def test_an_attempt_that_is_over_is_told_and_a_commit_repeated_adds_nothing(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0, attempt=3))
    peer.answer()
    peer.timeline.send_spans()
    assert peer.timeline_sent().attempt == 3
    peer.sent.clear()
    peer.timeline.on_commit()
    peer.timeline.send_spans()
    assert peer.sent == []


def test_what_fails_is_no_span(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    with pytest.raises(ZeroDivisionError):
        peer.timeline.timed(SpanKind.FORWARD, lambda: 1 / 0)()
    peer.timeline.send_spans()
    assert SpanKind.FORWARD not in {span.kind for span in peer.timeline_sent().spans}


def test_the_best_estimate_outlives_a_step(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    peer.timeline.send_spans()
    peer.sent.clear()
    peer.timeline.on_plan(plan_of(1))
    peer.timeline.send_spans()
    assert peer.timeline_sent().clock == ClockEstimate(AHEAD_US, 1_000)


def test_a_coordinator_that_is_joined_anew_may_have_another_clock(peer: Peer) -> None:
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    peer.timeline.on_joined()
    peer.timeline.send_spans()
    assert not [message for message in peer.sent if isinstance(message, StepTimeline)]


class LatePool(ThreadPoolExecutor):
    """A pool whose threads are always busy for 9 seconds first."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(1)
        self._clock = clock

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self._clock.advance(9)
        return super().submit(fn, *args, **kwargs)


async def test_frames_are_timed_in_the_thread_that_codes_them(
    peer: Peer, make_spec: MakeSpec, at_work: AtWork, transport: Transport
) -> None:
    """Waiting for the thread is no part of it."""
    spec = make_spec(forward_codec="aq4")
    x = torch.ones(spec.train.seq_length, spec.model.hidden_size)
    peer.timeline.on_plan(plan_of(0))
    peer.answer()
    with LatePool(peer.clock) as pool:
        up, down = (End(spec, sends, pool) for sends in Direction)
        up.timeline = down.timeline = peer.timeline
        async with at_work(down, up) as site, site.dialled(up, transport):
            for step in range(2):
                for end in (up, down):  # what the first step leaves is committed upstream alone
                    end.begin(step, [7])
                up.send(step, {7: x})
                await down.receive(1)
                await up.boundary.wait_settled()
                up.store.commit(StepNumber(step))
    peer.timeline.send_spans()
    encode, decode = SpanKind.ENCODE, SpanKind.DECODE
    coded = [span for span in peer.timeline_sent().spans if span.kind in (encode, decode)]
    assert [(span.kind, span.step) for span in coded] == [
        (encode, 0),
        (decode, 0),
        (encode, 1),
        (decode, 1),  # as a delta, whose base is not there; then as a key frame
        (encode, 1),
        (decode, 1),
    ]
    assert {span.duration_us for span in coded} == {0}
    spans = {(span.sample, span.microbatch, span.boundary, span.direction) for span in coded}
    assert spans == {(7, 0, BOUNDARY_BLOCK, Direction.FORWARD)}
    assert coded[0].num_bytes == coded[1].num_bytes > coded[2].num_bytes > 0
