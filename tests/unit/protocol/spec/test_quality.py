"""Coarseness of codes for a configured loss of quality."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.codec.spec import MAX_QUALITY_STEP, MIN_QUALITY_STEP, Direction, parse_codec_spec
from swarm_ft.protocol.spec.quality import Prices, QualityControl, measures_at, num_measured
from swarm_ft.protocol.spec.run_spec import forward_codec_of

either = pytest.mark.parametrize("adapts", [False, True])


def after(control: QualityControl, *excesses: float) -> QualityControl:
    for excess in excesses:
        control = control.with_measurement(excess)
    return control


def test_steps_are_measured_now_and_then_and_the_first_is_not() -> None:
    assert not measures_at(0)
    for steps in (1, 8, 9, 1000):
        assert num_measured(steps) == sum(map(measures_at, range(steps)))
    assert 0 < num_measured(1000) < 500


@given(st.floats(0.0, 1.0), st.booleans(), st.lists(st.floats(), max_size=20))
def test_whatever_is_told_the_step_is_one_that_codecs_take(
    quality: float, adapts: bool, excesses: list[float]
) -> None:
    control = after(QualityControl.of(quality, adapts=adapts), *excesses)
    assert MIN_QUALITY_STEP <= control.step_size <= MAX_QUALITY_STEP
    parsed = parse_codec_spec(forward_codec_of(control.step_size), Direction.FORWARD)
    assert parsed.number == pytest.approx(control.step_size)
    assert control.cost >= 0.0


@either
def test_less_asked_is_a_finer_step(adapts: bool) -> None:
    steps = [QualityControl.of(quality, adapts=adapts).step_size for quality in (0.001, 0.01, 0.1)]
    assert steps == sorted(set(steps))


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.booleans())
def test_less_asked_is_no_coarser_codec_of_gradients(
    quality: float, other: float, adapts: bool
) -> None:
    bits = [
        parse_codec_spec(Prices.of(adapts=adapts).backward_codec(each), Direction.BACKWARD).number
        for each in sorted((quality, other))
    ]
    assert bits[0] >= bits[1]


@pytest.mark.parametrize("quality", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_adapters_are_coded_more_finely(quality: float) -> None:
    """The codes are finer both ways, for every share, and after each measurement."""
    weights, adapters = (QualityControl.of(quality, adapts=adapts) for adapts in (False, True))
    assert adapters.step_size < weights.step_size
    assert after(adapters, quality).step_size < after(weights, quality).step_size
    assert after(adapters, quality).cost > after(weights, quality).cost
    fewer, more = (
        parse_codec_spec(
            Prices.of(adapts=adapts).backward_codec(quality), Direction.BACKWARD
        ).number
        for adapts in (False, True)
    )
    assert more > fewer or quality < 0.01


@either
def test_the_step_follows_the_cost(adapts: bool) -> None:
    begun = QualityControl.of(0.01, adapts=adapts)
    allowed = 0.01 / Prices.of(adapts=adapts).a_nat
    assert after(begun, 4 * allowed).step_size < begun.step_size
    assert after(begun, allowed / 4).step_size > begun.step_size
    assert after(begun, -1.0).step_size > begun.step_size


@either
def test_a_model_of_the_cost_ends_near_what_was_asked(adapts: bool) -> None:
    """The model's excess follows the step to the power 1.5, and is five times the prediction."""
    control = QualityControl.of(0.01, adapts=adapts)
    for _ in range(40):
        control = control.with_measurement(0.2 * control.step_size**1.5)
    cost = 0.2 * control.step_size**1.5 * Prices.of(adapts=adapts).a_nat
    assert cost == pytest.approx(0.01, rel=0.1)


def test_what_is_no_number_is_not_counted() -> None:
    begun = QualityControl.of(0.01, adapts=False)
    assert after(begun, math.nan, math.inf, -math.inf) == begun
