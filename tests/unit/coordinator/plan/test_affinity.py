"""Samples go where their buffers are, without more work for any peer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.key_frames import Way, measure
from swarm_ft.coordinator.facts.ledger import Ledger
from swarm_ft.coordinator.plan.routes import plan_microbatches, routes_of, with_entries
from swarm_ft.ids import BlockIndex, PeerId, SampleId, StepNumber
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.messages.reports import SampleSet
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.training_plan import step_microbatches, step_samples
from tests.draws import draws
from tests.specs import train_spec

STRANGER = PeerId("stranger")
FIRST = StepNumber(0)


def stages_of_sizes(*sizes: int) -> list[Stage]:
    return [
        Stage(
            layers=LayerRange(i, i + 1), peers=tuple(PeerId(f"s{i}r{r}") for r in range(replicas))
        )
        for i, replicas in enumerate(sizes)
    ]


def spec_of(count: int, size: int) -> TrainSpec:
    return train_spec(
        num_samples=4 * count * size, batch_size=count * size, micro_batch_size=size, shuffle=True
    )


def empty(stages: Sequence[Stage], spec: TrainSpec) -> Ledger:
    boundaries = tuple(BlockIndex(stage.layers.start) for stage in stages[1:])
    return Ledger.empty(boundaries, spec.num_samples)


def held_by(ledger: Ledger, sample: SampleId, route: Sequence[int]) -> Ledger:
    return ledger.after({sample: [PeerId(f"s{i}r{r}") for i, r in enumerate(route)]})


def loads(microbatches: Sequence[Microbatch], num_stages: int) -> list[Counter[int]]:
    return [Counter(batch.replica_at(i) for batch in microbatches) for i in range(num_stages)]


pipelines = st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda sizes: max(sizes) > 1)


@settings(derandomize=True, max_examples=draws(150), deadline=None)
@given(sizes=pipelines, size=st.integers(1, 4), count=st.integers(1, 9), data=st.data())
def test_loads_are_as_even_as_without_buffers_and_plans_are_a_function(
    sizes: list[int], size: int, count: int, data: st.DataObject
) -> None:
    stages, spec = stages_of_sizes(*sizes), spec_of(count, size)
    everybody = [[*stage.peers, STRANGER] for stage in stages]
    drawn = st.tuples(*(st.sampled_from(peers) for peers in everybody))
    samples_drawn = st.integers(0, spec.num_samples - 1).map(SampleId)
    inventories = data.draw(st.dictionaries(samples_drawn, drawn))
    ledger = empty(stages, spec).after(inventories) if inventories else empty(stages, spec)
    lost = data.draw(st.lists(samples_drawn))
    ledger = ledger.without(stages[0].peers[0], ledger.boundaries[0], SampleSet.of(lost))
    seconds = {stages[0].peers[0]: (data.draw(st.sampled_from([0.5, 1.0, 4.0])),)}
    step = data.draw(st.integers(0, 3).map(StepNumber))
    planned = plan_microbatches(spec, step, stages, seconds, ledger)
    plain = plan_microbatches(spec, step, stages, seconds)
    assert loads(planned, len(sizes)) == loads(plain, len(sizes))
    assert [b.index for b in planned] == [b.index for b in plain]
    assert [len(b.samples) for b in planned] == [size] * count
    samples = [sample for batch in planned for sample in batch.samples]
    assert sorted(samples) == sorted(step_samples(spec, step))
    assert planned == plan_microbatches(spec, step, stages, seconds, ledger)


def test_where_nobody_holds_anything_places_decide() -> None:
    stages, spec = stages_of_sizes(3, 2, 2), spec_of(6, 2)
    planned = plan_microbatches(spec, StepNumber(1), stages, {}, empty(stages, spec))
    assert planned == plan_microbatches(spec, StepNumber(1), stages, {})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_samples_stay_with_their_route_where_it_has_room(size: int) -> None:
    stages, spec = stages_of_sizes(2, 2, 2), spec_of(8, size)
    samples = step_samples(spec, FIRST)
    routes = {}
    for i, sample in enumerate(samples):
        routes[sample] = tuple(PeerId(f"s{stage}r{i % 2}") for stage in range(3))
    ledger = empty(stages, spec).after(routes)
    assert routes_of(plan_microbatches(spec, FIRST, stages, {}, ledger), stages) == routes


def test_who_must_leave_leaves_whole_and_takes_a_place_that_is_free_at_all_stages() -> None:
    """Check ten samples at one replica of each stage, six at the other: two too many."""
    stages, spec = stages_of_sizes(2, 2, 2), spec_of(16, 1)
    ledger = empty(stages, spec)
    for i, sample in enumerate(step_samples(spec, FIRST)):
        ledger = held_by(ledger, sample, (0, 0, 0) if i < 10 else (1, 1, 1))
    routes = Counter(b.route for b in plan_microbatches(spec, FIRST, stages, {}, ledger))
    assert routes == {(0, 0, 0): 8, (1, 1, 1): 8}


def test_samples_that_nobody_holds_fill_up_microbatches_of_those_that_are_held() -> None:
    stages, spec = stages_of_sizes(2, 2), spec_of(4, 4)
    samples, ledger = step_samples(spec, FIRST), empty(stages, spec)
    for i, sample in enumerate(samples[:12]):
        ledger = held_by(ledger, sample, (0, 0) if i < 5 else (1, 1))
    routes = routes_of(plan_microbatches(spec, FIRST, stages, {}, ledger), stages)
    assert all(routes[sample] == ("s0r0", "s1r0") for sample in samples[:5])
    assert all(routes[sample] == ("s0r1", "s1r1") for sample in samples[5:12])


def test_a_buffer_at_one_end_only_counts_for_nothing() -> None:
    """Check that such a sample fills up groups, as it starts with a key frame wherever it goes."""
    stages, spec = stages_of_sizes(2, 2), spec_of(4, 2)
    samples, known = step_samples(spec, FIRST), empty(stages, spec)
    for sample in samples[:3]:
        known = held_by(known, sample, (0, 0))
    ledger = known
    for sample in samples[3:]:
        ledger = held_by(ledger, sample, (1, 0))
    ledger = ledger.without(PeerId("s0r1"), ledger.boundaries[0], SampleSet.of(samples[3:]))
    planned = plan_microbatches(spec, FIRST, stages, {}, ledger)
    assert planned == plan_microbatches(spec, FIRST, stages, {}, known)


def test_who_replaces_a_replica_gets_what_nobody_else_holds() -> None:
    stages, spec = stages_of_sizes(2, 2), spec_of(8, 1)
    samples, ledger = step_samples(spec, FIRST), empty(stages, spec)
    for i, sample in enumerate(samples):
        ledger = held_by(ledger, sample, (i % 2, i % 2))
    stages[0] = Stage(layers=stages[0].layers, peers=(PeerId("s0r0"), PeerId("new")))
    routes = routes_of(plan_microbatches(spec, FIRST, stages, {}, ledger), stages)
    assert [routes[sample] for sample in samples] == [("s0r0", "s1r0"), ("new", "s1r1")] * 4


def test_constants_are_with_the_receiver_alone_whoever_sent_them() -> None:
    stages, spec = stages_of_sizes(2, 2, 2), spec_of(8, 1)
    samples = step_samples(spec, FIRST)
    ledger = replace(empty(stages, spec), entry=1)
    for i, sample in enumerate(samples):
        ledger = held_by(ledger, sample, (0, i % 2, i % 2))
    ledger = ledger.without(PeerId("s0r0"), ledger.boundaries[0], SampleSet.of(samples))
    planned = with_entries(plan_microbatches(spec, FIRST, stages, {}, ledger), stages, ledger)
    assert [batch.entry for batch in planned] == [1] * len(planned)
    routes = routes_of(planned, stages)
    assert [routes[sample][1:] for sample in samples] == [("s1r0", "s2r0"), ("s1r1", "s2r1")] * 4
    assert ledger.keepers(samples) == [PeerId("s1r0"), PeerId("s1r1")] * 4
    assert ledger.buffered(stages)[ledger.boundaries[0]] == len(samples)
    assert not ledger.keeps_all(stages[1].peers, spec.num_samples)
    for sample in map(SampleId, range(spec.num_samples)):
        ledger = held_by(ledger, sample, (0, 0, 0))
    assert ledger.keeps_all(stages[1].peers, spec.num_samples)
    assert not ledger.keeps_all(stages[1].peers[1:], spec.num_samples)


def test_a_microbatch_begins_above_the_frozen_stages_only_where_all_of_it_is_kept() -> None:
    stages, spec = stages_of_sizes(1, 1), spec_of(2, 2)
    first, *others = step_microbatches(spec, FIRST)
    ledger = replace(empty(stages, spec), entry=1)
    for sample in (*first.samples, *others[0].samples[1:]):
        ledger = held_by(ledger, sample, (0, 0))
    planned = with_entries([first, *others], stages, ledger)
    assert [batch.entry for batch in planned] == [1, 0]
    # What began at the first stage may be under way there.
    again = with_entries([first, *others], stages, ledger, only={others[0].index})
    assert [batch.entry for batch in again] == [0, 0]
    done = [replace(batch, done=frozenset({1})) for batch in (first, *others)]
    assert [b.entry for b in with_entries(done, stages, empty(stages, spec))] == [0, 0]
    lost = replace(empty(stages, spec), entry=1)
    assert [b.entry for b in with_entries(done, stages, lost, only={first.index})] == [1, 0]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2)])
def test_affinity_loses_a_fifth_less_than_places(sizes: tuple[int, ...], size: int) -> None:
    """Count key frames, and deltas on a buffer of an earlier visit than the last."""
    rates = {way: measure(sizes, size, way, num_samples=1024) for way in Way}
    lost = {way: one.key_frames + one.stale_frames for way, one in rates.items()}
    assert lost[Way.DATA] > 0.45
    assert lost[Way.PLACES] < 0.12
    assert lost[Way.LEDGER] < 0.075
    assert lost[Way.LEDGER] < 0.8 * lost[Way.PLACES]
    assert rates[Way.LEDGER].key_frames < rates[Way.PLACES].key_frames
