"""Cuts of a model among peers in a row, such that the slowest is as fast as possible."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.coordinator.plan.cuts import Model, StageSeat
from swarm_ft.protocol.spec.flops import stage_flops
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.specs import model_spec, train_spec

PLENTY = 1e18
BLOCK_BYTES = 400_000


def spec_of(num_blocks: int, **model: object) -> RunSpec:
    fields = {"block_bytes": BLOCK_BYTES, **model}
    return RunSpec(model=model_spec(num_blocks=num_blocks, **fields), train=train_spec())


def seat(
    speed: float, memory_bytes: float = PLENTY, inside: str = "", *, end: bool = True
) -> StageSeat:
    start, stop = map(int, inside.split("-")) if inside else (0, 4096)
    return StageSeat(
        flops_per_s=speed,
        memory_bytes=memory_bytes,
        inside=LayerRange(start, stop),
        may_be_end=end,
    )


def cut(spec: RunSpec, *seats: StageSeat) -> list[str]:
    return [str(layers) for layers in Model(spec).cut(seats)]


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ((1, 1, 1), ["0-3", "3-6", "6-9"]),
        ((1, 1), ["0-5", "5-9"]),
        ((2, 0.25, 2), ["0-4", "4-5", "5-9"]),
        ((4, 4, 1), ["0-4", "4-8", "8-9"]),
        ((1,), ["0-9"]),
    ],
)
def test_each_has_as_many_layers_as_it_is_fast(
    speeds: tuple[float, ...], expected: list[str]
) -> None:
    """Check also that of two equal cuts the one with less work beside the head wins."""
    assert cut(spec_of(9), *map(seat, speeds)) == expected


def test_a_large_head_counts_as_what_it_computes() -> None:
    spec = spec_of(9, vocab_size=20_000, hidden_size=16)
    assert cut(spec, seat(1), seat(1), seat(1)) == ["0-4", "4-8", "8-9"]


def test_nobody_has_more_than_it_has_room_for() -> None:
    spec = spec_of(9)
    room = spec.memory_bytes(LayerRange(0, 2))
    assert cut(spec, seat(100, room), seat(1), seat(1)) == ["0-2", "2-6", "6-9"]
    assert cut(spec, seat(100, room), seat(1, room)) == []


def test_what_all_blocks_share_takes_room_at_each_stage() -> None:
    spec = spec_of(4, shared_bytes=10 * BLOCK_BYTES)
    room = spec.memory_bytes(LayerRange(0, 2))
    assert cut(spec, seat(1, room), seat(1, room)) == ["0-2", "2-4"]
    assert cut(spec, seat(1, room - 1), seat(1, room)) in ([], ["0-1", "1-3"])


def test_nobody_hosts_what_it_may_not() -> None:
    spec = spec_of(9)
    assert cut(spec, seat(1), seat(9, inside="3-5"), seat(1)) == ["0-3", "3-5", "5-9"]
    assert cut(spec, seat(1), seat(1, end=False)) == []
    assert cut(spec, seat(1), seat(1, end=False), seat(1)) == ["0-3", "3-6", "6-9"]


@given(
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=1, max_size=4),
    room=st.lists(st.integers(1, 8), min_size=4, max_size=4),
)
def test_no_cut_is_faster(speeds: list[float], room: list[int]) -> None:
    spec = spec_of(8)
    most = [int(spec.memory_bytes(LayerRange(0, blocks))) for blocks in room]
    seats = [seat(speed, most[place]) for place, speed in enumerate(speeds)]

    def slowest_s(edges: tuple[int, ...]) -> float:
        ranges = [LayerRange(start, stop) for start, stop in pairwise(edges)]
        if any(len(r) > blocks for r, blocks in zip(ranges, room, strict=False)):
            return float("inf")
        times = [stage_flops(spec, r) / s for r, s in zip(ranges, speeds, strict=True)]
        return max(times)

    inner = combinations(range(1, 8), len(speeds) - 1)
    best_s = min(slowest_s((0, *edges, 8)) for edges in inner)
    found = Model(spec).cut(seats)
    if not found:
        assert best_s == float("inf")
    else:
        edges = (0, *(layers.stop for layers in found))
        assert slowest_s(edges) == pytest.approx(best_s)
