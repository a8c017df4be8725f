"""Many requests for the status cost no more than a few."""

import asyncio

import pytest

from swarm_ft.coordinator import watching
from swarm_ft.coordinator.watching import StatusFrames
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.messages.client import StatusRequest
from tests.members import make_swarm

PAGE, NEXT_PAGE = StatusRequest(), StatusRequest(first_run=32)
KEY = make_swarm().key.public_key()
ME, OTHER = [Caller(role=Role.CLIENT, name=name, key=KEY) for name in ("me", "other")]


class Source:
    """The source of the frames."""

    def __init__(self) -> None:
        self.state: object = object()
        self.requests: list[tuple[StatusRequest, str]] = []
        self.frames = StatusFrames(self.make, lambda: self.state)

    def make(self, page: StatusRequest, caller: Caller | None) -> bytes:
        self.requests.append((page, caller.name if caller else ""))
        return b"%d" % len(self.requests)

    async def request(self, count: int, page: StatusRequest = PAGE) -> set[bytes]:
        return set(await asyncio.gather(*(self.frames.frame(page, ME) for _ in range(count))))

    def something_happens(self) -> None:
        self.state = object()


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames never age, and give nobody more new ones than at once."""
    monkeypatch.setattr(watching, "FRAME_S", 1e9)
    monkeypatch.setattr(watching, "FRESH_PER_S", 1e-9)


@pytest.mark.usefixtures("still")
async def test_sixteen_at_once_cost_one() -> None:
    source = Source()
    assert await source.request(16) == {b"1"}
    assert len(source.requests) == 1


@pytest.mark.usefixtures("still")
async def test_an_answer_is_fresh_when_something_happened_and_few_are_asked_for() -> None:
    source = Source()
    for number in range(1, watching.FRESH_BURST + 1):
        assert await source.request(1) == {b"%d" % number}
        source.something_happens()
    for _ in range(1_000):  # too many requests: it gets the last one again
        assert await source.request(1) == {b"%d" % watching.FRESH_BURST}
        source.something_happens()
    assert len(source.requests) == watching.FRESH_BURST


@pytest.mark.usefixtures("still")
async def test_callers_get_their_own_answers() -> None:
    source = Source()
    for caller in (ME, OTHER, None, ME, OTHER, None):
        await source.frames.frame(PAGE, caller)
    await source.frames.frame(NEXT_PAGE, ME)
    assert source.requests == [(PAGE, "me"), (PAGE, "other"), (PAGE, ""), (NEXT_PAGE, "me")]


async def test_who_asks_too_often_waits_for_a_page_that_it_has_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "FRESH_PER_S", 50.0)
    source = Source()
    pages = [StatusRequest(first_run=run) for run in range(watching.FRESH_BURST + 2)]
    waiting = [asyncio.create_task(source.frames.frame(page, ME)) for page in pages]
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(task.done() for task in waiting) == watching.FRESH_BURST
    assert len(set(await asyncio.gather(*waiting))) == len(pages)


async def test_frames_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FRESH_BURST", 1_000)
    source = Source()
    for run in range(watching.MAX_FRAMES + 1):
        await source.request(1, StatusRequest(first_run=run))
    await source.request(1, StatusRequest(first_run=0))
    assert len(source.requests) == watching.MAX_FRAMES + 2
