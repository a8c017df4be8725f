"""Time of a step on given stages, from measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest

from swarm_ft.coordinator.facts.state import AttemptState, Measurements, Member, Run, SwarmState
from swarm_ft.coordinator.plan.forecast import Rates, rates_of, step_s
from swarm_ft.coordinator.plan.lateness import UNMEASURED_BYTES_S
from swarm_ft.coordinator.plan.steps import FASTER_AT_MOST, measured_on
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.machines.step_time import forecast_after_change_s
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment, stages_of
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.specs import model_spec, train_spec

SPEC = RunSpec(
    model=model_spec(num_blocks=6, block_bytes=400_000),
    train=train_spec(forward_codec="fp16", backward_codec="fp16", batch_size=8, num_samples=80),
)
BLOCK_FLOPS = stage_flops(SPEC, LayerRange(0, 1))
CROSSING_BYTES = 2 * 5 * 8 * 2
"""Bytes of a microbatch, each way."""
SUMMED_BYTES = 400_000
"""Bytes of a block's gradients that each of two replicas sends."""


def hosts(**layers: str) -> tuple[StageAssignment, ...]:
    return tuple(
        StageAssignment(peer_id=PeerId(peer), layers=LayerRange(*map(int, text.split("-"))))
        for peer, text in layers.items()
    )


def run_on(measured: Mapping[str, float], **layers: str) -> Run:
    """Return a run whose peers computed so many blocks per second."""
    rates = {PeerId(peer): (rate * BLOCK_FLOPS,) * 3 for peer, rate in measured.items()}
    return Run(
        run_id=RunId("run-1"),
        spec=SPEC,
        attempt=AttemptState(assignments=hosts(**layers)),
        measured=Measurements(flops_per_s=MappingProxyType(rates)),
    )


def placed_swarm(
    *names: str, links: Mapping[tuple[str, str], LinkSpeed] | None = None
) -> SwarmState:
    state = SwarmState()
    for name in names:
        to = {PeerId(b): speed for (a, b), speed in (links or {}).items() if a == name}
        hello = PeerHello(peer_id=PeerId(name), endpoint="a:1", layers=None, memory_bytes=1)
        member = Member(hello=hello, joined_at_s=0.0, heard_at_s=0.0, links=MappingProxyType(to))
        state = state.with_member(member)
    return state


def seconds(rates: Rates, **layers: str) -> float:
    return step_s(SPEC, stages_of(hosts(**layers)), rates, is_first=False)


def test_one_microbatch_goes_through_all_and_the_others_follow_the_slowest() -> None:
    run = run_on({"a": 10, "b": 2}, a="0-3", b="3-6")
    found = seconds(rates_of(placed_swarm("a", "b"), run), a="0-3", b="3-6")
    assert found == pytest.approx(3 / 10 + 3 / 2 + 3 * 3 / 2, rel=1e-2)


def test_layers_move_with_what_they_compute() -> None:
    run = run_on({"a": 10, "b": 2}, a="0-3", b="3-6")
    rates = rates_of(placed_swarm("a", "b"), run)
    assert seconds(rates, a="0-5", b="5-6") == pytest.approx(5 / 10 + 1 / 2 + 3 / 2, rel=1e-2)
    assert seconds(rates, a="0-6") == pytest.approx(4 * 6 / 10, rel=1e-2)


def test_who_showed_nothing_yet_is_as_fast_as_most() -> None:
    run = run_on({"a": 4, "b": 4}, a="0-3", b="3-6")
    rates = rates_of(placed_swarm("a", "b", "new"), run)
    assert seconds(rates, new="0-6") == pytest.approx(seconds(rates, a="0-6"))


def test_nobody_is_thought_faster_than_others_make_credible() -> None:
    run = run_on({"a": 1, "b": 1, "liar": 1e9}, a="0-2", b="2-4", liar="4-6")
    rates = rates_of(placed_swarm("a", "b", "liar"), run)
    assert rates.computes(PeerId("liar")) == pytest.approx(FASTER_AT_MOST * BLOCK_FLOPS)


def test_a_slow_link_is_what_a_step_waits_for() -> None:
    slow = LinkSpeed(bytes_per_s=CROSSING_BYTES / 2, least_round_trip_s=0.2)
    run = run_on({"a": 1e6, "b": 1e6}, a="0-3", b="3-6")
    rates = rates_of(placed_swarm("a", "b", links={("a", "b"): slow}), run)
    # Forward over the link and, unmeasured, back; 2 s a microbatch at the uplink; and 0.1 s a way.
    assert seconds(rates, a="0-3", b="3-6") == pytest.approx(2 + 0.2 + 3 * 2, rel=1e-2)
    assert seconds(rates, a="0-6") < 0.1


def test_a_cap_is_a_link_s_speed() -> None:
    state = placed_swarm("a", "b")
    member = state.members[PeerId("a")]
    hello = replace(member.hello, max_up_bytes_per_s=CROSSING_BYTES / 1.0)
    state = state.with_member(replace(member, hello=hello))
    rates = rates_of(state, run_on({"a": 1e6, "b": 1e6}, a="0-3", b="3-6"))
    assert seconds(rates, a="0-3", b="3-6") == pytest.approx(1 + 3, rel=1e-2)


def test_replicas_share_a_step_and_pay_for_their_sum() -> None:
    run = run_on({"a": 2, "b": 2}, a="0-3", b="3-6")
    rates = rates_of(placed_swarm("a", "b"), run)
    summed_s = 6 * SUMMED_BYTES / UNMEASURED_BYTES_S
    expected = 6 / 2 + 3 * 6 / 4 + summed_s
    assert seconds(rates, a="0-6", b="0-6") == pytest.approx(expected, rel=1e-2)


def test_what_replicas_sum_now_over_links_that_were_never_full_is_free() -> None:
    run = run_on({"a": 2, "b": 2}, a="0-6", b="0-6")
    rates = rates_of(placed_swarm("a", "b"), run)
    assert seconds(rates, a="0-6", b="0-6") == pytest.approx(6 / 2 + 3 * 6 / 4, rel=1e-2)


def test_without_anything_measured_nothing_bounds_a_step() -> None:
    rates = rates_of(placed_swarm("a", "b"), run_on({}, a="0-3", b="3-6"))
    assert seconds(rates, a="0-3", b="3-6") == 0.0
    assert math.isinf(rates.computes(PeerId("a")))


def test_on_other_layers_a_peer_takes_as_long_as_these_compute() -> None:
    run = run_on({"a": 2.0, "b": 4.0}, a="0-4", b="4-6")
    known = measured_on(run).seconds
    assert known[PeerId("a")] == pytest.approx([2.0] * 3, rel=1e-2)
    assert known[PeerId("b")] == pytest.approx([0.5] * 3, rel=2e-2)


@pytest.mark.parametrize(
    ("took_s", "was_s", "will_s", "expected_s"),
    [(3.0, 2.0, 1.0, 2.0), (1.0, 2.0, 1.0, 0.5), (3.0, 1.0, 5.0, 7.0), (2.0, 2.0, 0.0, 0.0)],
    ids=["slower than forecast", "faster", "it gets slower", "as forecast"],
)
def test_what_was_measured_changes_by_what_forecasts_do(
    took_s: float, was_s: float, will_s: float, expected_s: float
) -> None:
    assert forecast_after_change_s(took_s, was_s, will_s) == pytest.approx(expected_s)
