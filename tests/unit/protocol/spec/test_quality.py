"""How coarsely to code for an asked loss of quality."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.spec.codec_spec import (
    MAX_QUALITY_STEP,
    MIN_QUALITY_STEP,
    Direction,
    parse_codec_spec,
)
from swarm_ft.protocol.spec.quality import COST_A_NAT, QualityControl, measures_at
from swarm_ft.protocol.spec.run_spec import forward_codec_of


def after(control: QualityControl, *excesses: float) -> QualityControl:
    for excess in excesses:
        control = control.measured(excess)
    return control


def test_the_first_step_is_measured() -> None:
    assert measures_at(0)
    assert 0 < sum(map(measures_at, range(1000))) < 500


@given(st.floats(0.0, 1.0), st.lists(st.floats(), max_size=20))
def test_whatever_is_told_the_step_is_one_that_codecs_take(asked: float, told: list[float]) -> None:
    control = after(QualityControl.of(asked), *told)
    assert MIN_QUALITY_STEP <= control.step_size <= MAX_QUALITY_STEP
    parsed = parse_codec_spec(forward_codec_of(control.step_size), Direction.FORWARD)
    assert parsed.number == pytest.approx(control.step_size)
    assert control.cost >= 0.0


def test_less_asked_is_a_finer_step() -> None:
    steps = [QualityControl.of(asked).step_size for asked in (0.001, 0.01, 0.1)]
    assert steps == sorted(set(steps))


def test_the_step_follows_the_cost() -> None:
    begun = QualityControl.of(0.01)
    allowed = 0.01 / COST_A_NAT
    assert after(begun, 4 * allowed).step_size < begun.step_size
    assert after(begun, allowed / 4).step_size > begun.step_size
    assert after(begun, -1.0).step_size > begun.step_size


def test_a_model_of_the_cost_ends_near_what_was_asked() -> None:
    """Whose excess goes as the step to the power 1.5, and is ten times what was foretold."""
    control = QualityControl.of(0.01)
    for _ in range(40):
        control = control.measured(2.0 * control.step_size**1.5)
    assert 2.0 * control.step_size**1.5 * COST_A_NAT == pytest.approx(0.01, rel=0.5)


def test_what_is_no_number_is_not_counted() -> None:
    begun = QualityControl.of(0.01)
    assert after(begun, math.nan, math.inf, -math.inf) == begun
