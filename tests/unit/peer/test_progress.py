"""The parts of an open step that outlive its attempt."""

import pytest
import torch

from swarm_ft.codec.spec import Direction
from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.peer.step import StepProgress
from swarm_ft.protocol.messages.boundary import FrameKey
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.spec.microbatch import Microbatch

STEP = StepNumber(3)
FRONT, BEHIND = BlockIndex(2), BlockIndex(4)


def batch(index: int, *samples: int) -> Microbatch:
    return Microbatch(MicrobatchIndex(index), tuple(SampleId(sample) for sample in samples))


FIRST, SECOND = batch(0, 4, 5), batch(1, 6, 7)


def key(
    microbatch: int, sample: int, direction: Direction = Direction.FORWARD, attempt: int = 1
) -> FrameKey:
    return FrameKey(
        Attempt(attempt), STEP, MicrobatchIndex(microbatch), SampleId(sample), direction
    )


@pytest.fixture
def progress() -> StepProgress:
    """The first microbatch is done."""
    return StepProgress(STEP, done={FIRST.index: FIRST.samples})


def test_what_was_sent_of_a_finished_microbatch_is_kept_for_later_attempts(
    progress: StepProgress,
) -> None:
    x = torch.ones(2, 2)
    progress.keep([(key(0, 4), x), (key(1, 6), x)])
    assert progress.sent(key(0, 4, attempt=2)) is x
    for missing in (key(1, 6), key(0, 5), key(0, 4, Direction.BACKWARD)):
        with pytest.raises(OutOfTurn, match="nothing of it is stored here"):
            progress.sent(missing)


def test_a_later_attempt_takes_the_place_of_an_earlier_one(progress: StepProgress) -> None:
    first, second = torch.ones(1), torch.zeros(1)
    progress.keep([(key(0, 4), first)])
    progress.keep([(key(0, 4, attempt=2), second)])
    assert progress.sent(key(0, 4)) is second


def test_a_plan_by_which_something_else_is_done_is_out_of_turn(progress: StepProgress) -> None:
    progress.check([FIRST])
    others: list[list[Microbatch]] = [[], [SECOND], [FIRST, SECOND], [batch(0, 4, 6)]]
    for other in others:
        with pytest.raises(OutOfTurn, match=r"step 3: expected the plan to count"):
            progress.check(other)


def test_traffic_of_all_attempts_is_added_up(progress: StepProgress) -> None:
    progress.count(
        [Traffic(boundary=FRONT, forward_bytes=5), Traffic(boundary=BEHIND, backward_bytes=1)]
    )
    total = progress.count([Traffic(boundary=FRONT, forward_bytes=7)])
    assert total == (
        Traffic(boundary=FRONT, forward_bytes=12),
        Traffic(boundary=BEHIND, backward_bytes=1),
    )


def test_the_samples_are_those_of_what_is_done(progress: StepProgress) -> None:
    assert progress.samples == {4, 5}
