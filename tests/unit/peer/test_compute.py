"""One thread for all runs of a peer, in the order of its fair queue."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from swarm_ft.ids import RunId
from swarm_ft.peer.compute import Compute
from tests.doubles.clock import ManualClock

A, B = RunId("a"), RunId("b")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def compute(clock: ManualClock) -> Iterator[Compute]:
    compute = Compute(clock)
    yield compute
    compute.close()


class Long:
    """Work under way until it may end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.may_end.wait(60.0)
        return "long"


async def test_what_comes_of_work_and_what_it_raises(compute: Compute) -> None:
    seat = compute.handle_for(A)
    assert await seat.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await seat.run(lambda: 1 // 0)
    assert await seat.background.run(threading.current_thread) is await seat.run(
        threading.current_thread
    )


async def test_a_run_waits_while_the_thread_is_at_another_and_knows_for_how_long(
    compute: Compute, clock: ManualClock
) -> None:
    work, a, b = Long(), compute.handle_for(A), compute.handle_for(B)
    first = asyncio.create_task(a.run(work))
    await asyncio.to_thread(work.began.wait)
    second = asyncio.create_task(b.run(lambda: "short"))
    await asyncio.sleep(0)
    clock.advance(3.0)
    assert (a.waited_s, b.waited_s) == (0.0, 3.0), "while it waits, too"
    work.may_end.set()
    assert (await first, await second) == ("long", "short")
    assert (a.waited_s, b.waited_s) == (0.0, 3.0)


async def test_what_is_cancelled_before_its_turn_is_never_done(compute: Compute) -> None:
    work, done = Long(), threading.Event()
    first = asyncio.create_task(compute.handle_for(A).run(work))
    await asyncio.to_thread(work.began.wait)
    second = asyncio.create_task(compute.handle_for(B).run(done.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    work.may_end.set()
    await first
    assert await compute.handle_for(A).run(lambda: 1) == 1
    assert not done.is_set()


async def test_who_is_cancelled_at_work_holds_the_thread_until_its_end(compute: Compute) -> None:
    work = Long()
    first = asyncio.create_task(compute.handle_for(A).run(work))
    await asyncio.to_thread(work.began.wait)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(compute.handle_for(B).run(lambda: work.may_end.is_set()))
    await asyncio.sleep(0)
    work.may_end.set()
    assert await second
