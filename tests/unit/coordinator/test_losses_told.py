"""Losses of a run for the page: all, or evenly chosen ones."""

import pytest

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import NotFound
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import StepCommitted
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

STEPS = 9


@pytest.mark.parametrize(
    ("first", "max_points", "expected"),
    [
        (0, 100, list(range(STEPS))),
        (0, STEPS, list(range(STEPS))),
        (0, 4, [2, 5, 8]),
        (6, 100, [6, 7, 8]),
        (STEPS, 100, []),
        (100, 100, []),
    ],
)
async def test_the_last_is_always_among_them(
    make_swarm: type[Swarm],
    make_spec: MakeSpec,
    a: FakePeer,
    b: FakePeer,
    first: int,
    max_points: int,
    expected: list[int],
) -> None:
    journal = Journal(":memory:")
    swarm = make_swarm(journal)
    swarm.submit(make_spec(num_steps=STEPS, num_eval_samples=2, eval_steps=3))
    swarm.join(a, b)
    swarm.settle()
    service = CoordinatorService(journal, SystemClock())
    losses = service.losses(RUN, first, max_points)
    steps = [one for one in losses if isinstance(one, StepCommitted)]
    assert [one.step for one in steps] == expected
    known = {one.step: one.loss for one in swarm.steps()}
    assert all(one.loss == known[one.step] for one in steps)
    evaluated = [one.step for one in losses if not isinstance(one, StepCommitted)]
    assert evaluated == [step for step in (0, 3, 6, 9) if step >= first]
    with pytest.raises(NotFound, match="run-none is not known here"):
        service.losses(RunId("run-none"), 0, 1)
