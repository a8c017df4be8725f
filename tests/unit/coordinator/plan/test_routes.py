"""Routes of microbatches over the replicas of each stage."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.connectivity import Connectivity, pair_of
from swarm_ft.coordinator.facts.state import PlannedStep
from swarm_ft.coordinator.plan.routes import plan_again, plan_microbatches
from swarm_ft.ids import MicrobatchIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.training_plan import step_microbatches, step_samples
from tests.draws import draws
from tests.specs import train_spec
from tests.unit.coordinator.conftest import MakeSpec

FIRST = StepNumber(0)
MakeTrain: TypeAlias = Callable[..., TrainSpec]


def stages_of_sizes(*sizes: int) -> list[Stage]:
    return [
        Stage(
            layers=LayerRange(i, i + 1), peers=tuple(PeerId(f"s{i}r{r}") for r in range(replicas))
        )
        for i, replicas in enumerate(sizes)
    ]


@pytest.fixture
def train(make_spec: MakeSpec) -> MakeTrain:
    return lambda **changes: make_spec(**changes).train


def loads(microbatches: Sequence[Microbatch], stage_index: int) -> Counter[int]:
    return Counter(batch.replica_at(stage_index) for batch in microbatches)


def test_without_replicas_microbatches_are_in_the_order_of_the_data(train: MakeTrain) -> None:
    spec = train(num_samples=32, batch_size=8, micro_batch_size=2)
    step = StepNumber(1)
    assert plan_microbatches(spec, step, stages_of_sizes(1, 1), {}) == step_microbatches(spec, step)


@settings(
    derandomize=True,
    max_examples=draws(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    size=st.integers(1, 4),
    count=st.integers(1, 9),
    step=st.integers(0, 5).map(StepNumber),
)
def test_every_sample_has_one_route_and_replicas_share_evenly(
    train: MakeTrain, sizes: list[int], size: int, count: int, step: StepNumber
) -> None:
    spec = train(num_samples=4 * size * count, batch_size=size * count, micro_batch_size=size)
    microbatches = plan_microbatches(spec, step, stages_of_sizes(*sizes), {})
    samples = [sample for batch in microbatches for sample in batch.samples]
    assert sorted(samples) == sorted(step_samples(spec, step))
    assert [batch.index for batch in microbatches] == list(range(count))
    for index, replicas in enumerate(sizes):
        shares = loads(microbatches, index)
        assert set(shares) <= set(range(replicas))
        assert max(shares.values()) - min(shares[r] for r in range(replicas)) <= 1


def test_a_peer_half_as_fast_gets_half(train: MakeTrain) -> None:
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    stages = stages_of_sizes(2, 1)
    seconds = {PeerId("s0r0"): (1.0, 1.3, 0.9), PeerId("s0r1"): (2.0,)}
    assert loads(plan_microbatches(spec, FIRST, stages, seconds), 0) == {0: 8, 1: 4}


def test_noise_moves_nothing(train: MakeTrain) -> None:
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    seconds = {PeerId("s0r0"): (1.0, 0.8, 1.2, 1.0, 1.3), PeerId("s0r1"): (1.0, 1.1, 0.9, 1.0, 0.7)}
    assert loads(plan_microbatches(spec, FIRST, stages_of_sizes(2), seconds), 0) == {0: 6, 1: 6}


def test_a_peer_that_slows_down_is_relieved_in_the_next_step(train: MakeTrain) -> None:
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    seconds = {PeerId("s0r0"): (1.0, 1.0, 1.0, 1.0, 3.0), PeerId("s0r1"): (1.0,)}
    assert loads(plan_microbatches(spec, FIRST, stages_of_sizes(2), seconds), 0) == {0: 3, 1: 9}


def test_a_newcomer_counts_as_fast_as_the_others(train: MakeTrain) -> None:
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    seconds = {PeerId("s0r0"): (3.0,), PeerId("s0r1"): (3.0,)}
    shares = loads(plan_microbatches(spec, FIRST, stages_of_sizes(3), seconds), 0)
    assert shares == {0: 4, 1: 4, 2: 4}


def test_all_replicas_have_something_to_do_from_the_start(train: MakeTrain) -> None:
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    microbatches = plan_microbatches(spec, FIRST, stages_of_sizes(3, 2), {})
    assert {batch.replica_at(0) for batch in microbatches[:3]} == {0, 1, 2}
    assert {batch.replica_at(1) for batch in microbatches[:3]} == {0, 1}


def test_samples_meet_the_same_replicas_again_in_a_shuffled_epoch(train: MakeTrain) -> None:
    """Check that few change sides: those near the division, whose rank depends on the others."""
    spec = train(num_samples=512, batch_size=64, micro_batch_size=4, shuffle=True)
    met: list[dict[SampleId, int]] = [{}, {}]
    for epoch in range(2):
        for step in map(StepNumber, range(epoch * 8, epoch * 8 + 8)):
            for batch in plan_microbatches(spec, step, stages_of_sizes(2), {}):
                met[epoch] |= dict.fromkeys(batch.samples, batch.replica_at(0))
    same = sum(met[0][sample] == met[1][sample] for sample in map(SampleId, range(512)))
    assert same / 512 > 0.9
    by_chance = sum(sample % 2 == met[1][sample] for sample in map(SampleId, range(512)))
    assert by_chance / 512 < 0.6


# ---- a step that is planned again


def planned(train: MakeTrain, *sizes: int, count: int = 12, **changes: Any) -> PlannedStep:
    spec = train(num_samples=4 * count, batch_size=count, micro_batch_size=1, **changes)
    stages = stages_of_sizes(*sizes)
    return PlannedStep(
        microbatches=plan_microbatches(spec, FIRST, stages, {}), stages=tuple(stages)
    )


def without(stages: Sequence[Stage], *removed: PeerId) -> list[Stage]:
    return [
        Stage(layers=stage.layers, peers=tuple(p for p in stage.peers if p not in removed))
        for stage in stages
    ]


def hosts(microbatches: Sequence[Microbatch], stages: Sequence[Stage], index: int) -> list[PeerId]:
    return [stages[index].peers[batch.replica_at(index)] for batch in microbatches]


def test_only_the_microbatches_of_a_lost_peer_change_their_way(train: MakeTrain) -> None:
    before = planned(train, 3, 2)
    stages = without(before.stages, PeerId("s0r1"))
    again = plan_again(before, stages, {}, {})
    assert [(b.index, b.samples) for b in again] == [
        (b.index, b.samples) for b in before.microbatches
    ]
    assert hosts(again, stages, 1) == hosts(before.microbatches, before.stages, 1)
    moved = zip(hosts(before.microbatches, before.stages, 0), hosts(again, stages, 0), strict=True)
    assert all(was in (now, "s0r1") for was, now in moved)
    assert set(loads(again, 0).values()) == {6}


def test_what_is_done_stays_done_and_whoever_has_less_to_do_takes_more(train: MakeTrain) -> None:
    before = planned(train, 3)
    of: dict[PeerId | None, list[MicrobatchIndex]] = {peer: [] for peer in before.stages[0].peers}
    for batch in before.microbatches:
        of[before.host(batch, 0)].append(batch.index)
    stages = without(before.stages, PeerId("s0r2"))
    again = plan_again(before, stages, {PeerId("s0r0"): frozenset(of[PeerId("s0r0")])}, {})
    assert [batch.index for batch in again if batch.done == {0}] == of[PeerId("s0r0")]
    to_do = Counter(stages[0].peers[batch.replica_at(0)] for batch in again if 0 not in batch.done)
    assert to_do == {"s0r0": 4, "s0r1": 4}


def test_where_two_are_done_with_the_same_one_begins_anew(train: MakeTrain) -> None:
    before = planned(train, 2, count=4)
    claims = {
        PeerId("s0r0"): frozenset(map(MicrobatchIndex, (0, 1))),
        PeerId("s0r1"): frozenset(map(MicrobatchIndex, (1, 2, 3))),
    }
    again = plan_again(before, before.stages, claims, {})
    assert {batch.index for batch in again if batch.done} == {1, 2, 3}
    assert all(batch.replica_at(0) == 1 for batch in again if batch.done)


def test_microbatches_that_there_are_not_cannot_be_done(train: MakeTrain) -> None:
    before = planned(train, 1, count=2)
    again = plan_again(
        before, before.stages, {PeerId("s0r0"): frozenset(map(MicrobatchIndex, (0, 2)))}, {}
    )
    assert not any(batch.done for batch in again)


def test_after_a_restart_only_what_is_done_has_a_place(train: MakeTrain) -> None:
    before = PlannedStep(microbatches=planned(train, 2, count=4).microbatches)
    stages = stages_of_sizes(2)
    again = plan_again(before, stages, {PeerId("s0r1"): frozenset({MicrobatchIndex(0)})}, {})
    assert again[0].replica_at(0) == 1
    assert Counter(b.replica_at(0) for b in again if not b.done) == {0: 2, 1: 1}


@settings(
    derandomize=True,
    max_examples=draws(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_whoever_goes_each_microbatch_has_one_place_at_each_stage(
    train: MakeTrain, data: st.DataObject, sizes: list[int]
) -> None:
    before = planned(train, *sizes, count=data.draw(st.integers(1, 8)))
    everybody = [peer for stage in before.stages for peer in stage.peers]
    removed = data.draw(st.sets(st.sampled_from(everybody)))
    stages = without(before.stages, *removed)
    if not all(stage.peers for stage in stages):
        return
    indices = st.integers(0, len(before.microbatches) - 1).map(MicrobatchIndex)
    claims = data.draw(st.dictionaries(st.sampled_from(everybody), st.frozensets(indices)))
    again = plan_again(before, stages, claims, {})
    for index, stage in enumerate(stages):
        assert all(batch.replica_at(index) < len(stage.peers) for batch in again)
        for peer in stage.peers:
            done = {
                batch.index
                for batch in again
                if index in batch.done and stage.peers[batch.replica_at(index)] == peer
            }
            assert done in (set(), claims.get(peer, frozenset()))


# ---- who reaches whom


def direct(*pairs: tuple[str, str], stages: Sequence[Stage]) -> Connectivity:
    """Return a connectivity in which these pairs connect directly, and other pairs over a relay."""
    names = [peer for stage in stages for peer in stage.peers]
    met: dict[tuple[str, str], Way] = dict.fromkeys(combinations(sorted(names), 2), Way.RELAYED)
    return Connectivity(met=met | {pair_of(*pair): Way.DIRECT for pair in pairs})


def routes_through(
    spec: TrainSpec, stages: Sequence[Stage], ways: Connectivity
) -> set[tuple[int, ...]]:
    return {batch.route for batch in plan_microbatches(spec, FIRST, stages, {}, None, ways)}


def test_a_microbatch_goes_on_to_a_replica_that_is_reached(train: MakeTrain) -> None:
    spec, stages = train(num_samples=8, batch_size=8, micro_batch_size=1), stages_of_sizes(2, 2, 2)
    crossed = ("s0r0", "s1r1"), ("s0r1", "s1r0"), ("s1r0", "s2r0"), ("s1r1", "s2r1")
    ways = direct(*crossed, stages=stages)
    assert routes_through(spec, stages, ways) == {(0, 1, 1), (1, 0, 0)}
    assert routes_through(spec, stages, Connectivity()) == {(0, 0, 0), (1, 1, 1)}


def test_who_reaches_all_leaves_to_others_whom_they_reach(train: MakeTrain) -> None:
    spec, stages = train(num_samples=8, batch_size=8, micro_batch_size=1), stages_of_sizes(2, 2)
    ways = direct(("s0r0", "s1r0"), ("s0r0", "s1r1"), ("s0r1", "s1r0"), stages=stages)
    assert routes_through(spec, stages, ways) == {(0, 1), (1, 0)}


@settings(derandomize=True, max_examples=draws(100), deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 12))
def test_whatever_is_known_of_ways_nobodys_load_changes(
    data: st.DataObject, sizes: list[int], count: int
) -> None:
    spec = train_spec(num_samples=count, batch_size=count, micro_batch_size=1)
    stages = stages_of_sizes(*sizes)
    names: list[str] = sorted(peer for stage in stages for peer in stage.peers)
    pairs = list(combinations(names, 2))
    met = data.draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from(list(Way))))
    plain = plan_microbatches(spec, FIRST, stages, {})
    planned = plan_microbatches(spec, FIRST, stages, {}, None, Connectivity(met=met))
    for index in range(len(sizes)):
        assert loads(planned, index) == loads(plain, index)
    assert planned == plan_microbatches(spec, FIRST, stages, {}, None, Connectivity(met=met))
