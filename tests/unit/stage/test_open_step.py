"""Each microbatch of a step goes through an engine once, whatever is requested."""

import pytest

from swarm_ft.errors import MalformedMessage, OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.stage.base import OpenStep

TextStep = OpenStep[str, str]


@pytest.fixture
def step() -> TextStep:
    """Microbatch 0 is counted, 1 has had its backward, 2 its forward, 3 nothing."""
    step = TextStep(StepNumber(7), 10)
    for microbatch in map(MicrobatchIndex, range(3)):
        step.graphs[microbatch] = f"graph {microbatch}"
    for microbatch in map(MicrobatchIndex, range(2)):
        assert step.graph_of(microbatch) == f"graph {microbatch}"
        del step.graphs[microbatch]
        step.products[microbatch] = f"left {microbatch}"
    assert step.count(MicrobatchIndex(0)) == "left 0"
    return step


@pytest.mark.parametrize(
    ("microbatch", "expected"), [(0, "counted already"), (1, "had its backward")]
)
def test_what_is_in_the_gradients_is_not_computed_again(
    step: TextStep, microbatch: int, expected: str
) -> None:
    with pytest.raises(OutOfTurn, match=f"step 7: microbatch {microbatch} .*{expected}"):
        step.check_untouched(MicrobatchIndex(microbatch))
    with pytest.raises(OutOfTurn, match=expected):
        step.graph_of(MicrobatchIndex(microbatch))


def test_a_backward_needs_a_forward_and_weights_need_a_backward(step: TextStep) -> None:
    with pytest.raises(OutOfTurn, match="backward of microbatch 3 before its forward"):
        step.graph_of(MicrobatchIndex(3))
    for microbatch in (0, 2, 3):
        with pytest.raises(OutOfTurn, match=f"microbatch {microbatch} had no backward"):
            step.count(MicrobatchIndex(microbatch))


def test_it_is_complete_when_nothing_is_in_the_gradients_by_half(step: TextStep) -> None:
    with pytest.raises(OutOfTurn, match=r"microbatches \[1\] are still to be computed"):
        step.check_complete()
    step.count(MicrobatchIndex(1))
    step.check_complete()
    assert step.counted == {0, 1}


def test_it_is_resumed_with_what_is_counted_and_nothing_else(step: TextStep) -> None:
    with pytest.raises(OutOfTurn, match=r"half of \[1\]"):
        step.resume(StepNumber(7), {MicrobatchIndex(0)})
    step.count(MicrobatchIndex(1))
    others: list[tuple[int, set[int]]] = [(8, {0, 1}), (7, {0}), (7, {0, 1, 2}), (7, set())]
    for number, counted in others:
        with pytest.raises(OutOfTurn, match="cannot be resumed"):
            step.resume(StepNumber(number), set(map(MicrobatchIndex, counted)))
    assert step.graphs
    step.resume(StepNumber(7), frozenset({MicrobatchIndex(0), MicrobatchIndex(1)}))
    assert step.graphs == {}
    assert step.counted == {0, 1}


@pytest.mark.parametrize("num_targets", [0, -1])
def test_without_targets_there_is_no_mean(num_targets: int) -> None:
    with pytest.raises(MalformedMessage, match="step 7: expected 1 target or more"):
        OpenStep(StepNumber(7), num_targets)
