"""Which microbatch passes which replica of each stage."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.routes import plan_microbatches
from swarm_ft.ids import PeerId
from swarm_ft.protocol.coordinator_messages import Stage
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.training_plan import step_microbatches, step_samples


def stages_of_sizes(*sizes):
    return [
        Stage(
            layers=LayerRange(i, i + 1), peers=tuple(PeerId(f"s{i}r{r}") for r in range(replicas))
        )
        for i, replicas in enumerate(sizes)
    ]


@pytest.fixture
def train(make_spec):
    return lambda **changes: make_spec(**changes).train


def loads(microbatches, stage_index):
    return Counter(batch.replica_at(stage_index) for batch in microbatches)


def test_without_replicas_microbatches_are_in_the_order_of_the_data(train):
    spec = train(num_samples=32, batch_size=8, micro_batch_size=2)
    assert plan_microbatches(spec, 1, stages_of_sizes(1, 1), {}) == step_microbatches(spec, 1)


@settings(
    derandomize=True,
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    size=st.integers(1, 4),
    count=st.integers(1, 9),
    step=st.integers(0, 5),
)
def test_every_sample_has_one_route_and_replicas_share_evenly(train, sizes, size, count, step):
    spec = train(num_samples=4 * size * count, batch_size=size * count, micro_batch_size=size)
    microbatches = plan_microbatches(spec, step, stages_of_sizes(*sizes), {})
    samples = [sample for batch in microbatches for sample in batch.samples]
    assert sorted(samples) == sorted(step_samples(spec, step))
    assert [batch.index for batch in microbatches] == list(range(count))
    for index, replicas in enumerate(sizes):
        shares = loads(microbatches, index)
        assert set(shares) <= set(range(replicas))
        assert max(shares.values()) - min(shares[r] for r in range(replicas)) <= 1


def test_a_peer_half_as_fast_gets_half(train):
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    stages = stages_of_sizes(2, 1)
    seconds = {"s0r0": (1.0, 1.3, 0.9), "s0r1": (2.0,)}
    assert loads(plan_microbatches(spec, 0, stages, seconds), 0) == {0: 8, 1: 4}


def test_noise_moves_nothing(train):
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    seconds = {"s0r0": (1.0, 0.8, 1.2, 1.0, 1.3), "s0r1": (1.0, 1.1, 0.9, 1.0, 0.7)}
    assert loads(plan_microbatches(spec, 0, stages_of_sizes(2), seconds), 0) == {0: 6, 1: 6}


def test_a_peer_that_slows_down_is_relieved_in_the_next_step(train):
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    seconds = {"s0r0": (1.0, 1.0, 1.0, 1.0, 3.0), "s0r1": (1.0,)}
    assert loads(plan_microbatches(spec, 0, stages_of_sizes(2), seconds), 0) == {0: 3, 1: 9}


def test_a_newcomer_counts_as_fast_as_the_others(train):
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    seconds = {"s0r0": (3.0,), "s0r1": (3.0,)}
    shares = loads(plan_microbatches(spec, 0, stages_of_sizes(3), seconds), 0)
    assert shares == {0: 4, 1: 4, 2: 4}


def test_all_replicas_have_something_to_do_from_the_start(train):
    spec = train(num_samples=12, batch_size=12, micro_batch_size=1)
    microbatches = plan_microbatches(spec, 0, stages_of_sizes(3, 2), {})
    assert {batch.replica_at(0) for batch in microbatches[:3]} == {0, 1, 2}
    assert {batch.replica_at(1) for batch in microbatches[:3]} == {0, 1}


def test_samples_meet_the_same_replicas_again_in_a_shuffled_epoch(train):
    """Few change sides: those near the division, whose rank in a step depends on the others."""
    spec = train(num_samples=512, batch_size=64, micro_batch_size=4, shuffle=True)
    met = [{}, {}]
    for epoch in range(2):
        for step in range(epoch * 8, epoch * 8 + 8):
            for batch in plan_microbatches(spec, step, stages_of_sizes(2), {}):
                met[epoch] |= dict.fromkeys(batch.samples, batch.replica_at(0))
    same = sum(met[0][sample] == met[1][sample] for sample in range(512))
    assert same / 512 > 0.9
    by_chance = sum(sample % 2 == met[1][sample] for sample in range(512))
    assert by_chance / 512 < 0.6
