"""Watchers receive all updates in order; timelines only on request, and up to a limit."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from swarm_ft.coordinator import watching as watchers_module
from swarm_ft.coordinator.watching import Watchers
from swarm_ft.errors import Busy, Unavailable
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.messages.timeline import ClockEstimate, PeerTimeline, Spans, StepTimeline
from swarm_ft.protocol.spec.layers import LayerRange

RUN = RunId("run")
THREE = Spans(*[(1, 1, 1)] * len(Spans.__dataclass_fields__))


def committed(step: int) -> StepCommitted:
    return StepCommitted(
        step=StepNumber(step),
        loss=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        num_samples=2,
        seconds=1.0,
    )


def timeline(step: int, *, run: RunId = RUN, num_dropped: int = 0) -> PeerTimeline:
    step_timeline = StepTimeline(
        run_id=run,
        attempt=Attempt(1),
        step=StepNumber(step),
        origin_us=0,
        clock=ClockEstimate(0, 1),
        spans=THREE,
        num_dropped=num_dropped,
    )
    return PeerTimeline(peer_id=PeerId("a"), layers=LayerRange(0, 2), timeline=step_timeline)


@pytest.fixture
def watchers() -> Watchers:
    return Watchers()


def test_a_run_has_so_many_watchers_and_room_again_when_one_leaves(watchers: Watchers) -> None:
    with ExitStack() as stack:
        for _ in range(watchers_module.MAX_WATCHERS - 1):
            stack.enter_context(watchers.watching(RUN, is_tracing=False))
        for _ in range(2):
            with watchers.watching(RUN, is_tracing=False):
                with pytest.raises(Busy, match="run has 16 watchers already"):
                    stack.enter_context(watchers.watching(RUN, is_tracing=False))
                with watchers.watching(RunId("other"), is_tracing=False):
                    pass


async def test_only_who_wants_timelines_gets_them_in_order_with_the_rest(
    watchers: Watchers,
) -> None:
    with (
        watchers.watching(RUN, is_tracing=True) as tracing,
        watchers.watching(RUN, is_tracing=False) as watching,
    ):
        for step in range(2):
            watchers.publish(RUN, committed(step))
            watchers.trace(timeline(step))
        expected = [committed(0), timeline(0), committed(1), timeline(1)]
        assert [await tracing.next() for _ in range(4)] == expected
        assert [await watching.next() for _ in range(2)] == [committed(0), committed(1)]


async def test_a_run_is_traced_as_long_as_somebody_wants_it(watchers: Watchers) -> None:
    assert not watchers.is_traced(RUN)
    with watchers.watching(RUN, is_tracing=True):
        with watchers.watching(RUN, is_tracing=True), watchers.watching(RUN, is_tracing=False):
            assert watchers.is_traced(RUN)
            assert not watchers.is_traced(RunId("other"))
        assert watchers.is_traced(RUN)
    with watchers.watching(RUN, is_tracing=False):
        assert not watchers.is_traced(RUN)


async def test_timelines_of_other_runs_are_not_told(watchers: Watchers) -> None:
    with watchers.watching(RUN, is_tracing=True) as tracing:
        watchers.trace(timeline(0, run=RunId("other")))
        watchers.trace(timeline(1))
        assert await tracing.next() == timeline(1)


async def test_what_a_slow_reader_misses_is_counted_in_the_next_it_gets(
    watchers: Watchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers_module, "MAX_QUEUED_TIMELINES", 2)
    with watchers.watching(RUN, is_tracing=True) as slow:
        for step in range(4):
            watchers.trace(timeline(step, num_dropped=10))
        watchers.publish(RUN, committed(3))
        events = [await slow.next() for _ in range(3)]
        assert events == [timeline(0, num_dropped=10), timeline(1, num_dropped=10), committed(3)]
        for step in (4, 5):
            watchers.trace(timeline(step))
        missed = 2 * (len(THREE) + 10)
        assert await slow.next() == timeline(4, num_dropped=missed)
        assert await slow.next() == timeline(5)


async def test_a_count_stays_in_its_field(
    watchers: Watchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers_module, "MAX_QUEUED_TIMELINES", 1)
    many = timeline(0)
    many = replace(many, timeline=replace(many.timeline, num_dropped=2**32 - 1))
    with watchers.watching(RUN, is_tracing=True) as slow:
        for _ in range(3):
            watchers.trace(many)
        await slow.next()
        watchers.trace(many)
        event = await slow.next()
        assert isinstance(event, PeerTimeline)
        assert event.timeline.num_dropped == 2**32 - 1


async def test_a_watcher_that_does_not_read_is_dropped_and_told_so(
    watchers: Watchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a watcher that once waited for ever for the last status."""
    monkeypatch.setattr(watchers_module, "MAX_QUEUED", 2)
    with (
        watchers.watching(RUN, is_tracing=False) as slow,
        watchers.watching(RUN, is_tracing=False) as quick,
    ):
        for step in range(3):
            watchers.publish(RUN, committed(step))
            assert await quick.next() == committed(step)
        with pytest.raises(Unavailable, match="left 2 events unread; watch the run again"):
            await slow.dropped()
